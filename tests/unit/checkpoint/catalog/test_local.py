from __future__ import annotations

import itertools
import threading
from pathlib import Path

import pytest

from strata.checkpoint.catalog import marks
from strata.checkpoint.catalog.evidence import folders
from strata.checkpoint.catalog.protocol import SaveRequest
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.root import COORDINATED, STANDALONE, claim, job_owner, owner_of, parse_owner
from strata.core.kv.records import CheckpointState
from strata.errors import ConfigError, Refused, StorageError
from tests.not_none import not_none
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import local_catalog, save


def test_a_standalone_catalog_needs_only_its_storage() -> None:
    storage = MemoryStorage()
    storage.create_once("generations/notes.txt", b"no generation")
    catalog = local_catalog(storage)
    assert catalog.all() == []
    assert catalog.latest() is None
    for step in (20, 100):
        save(storage, catalog, {"a": step}, step, metadata={"note": str(step)})
    reopened = local_catalog(storage, start=50)
    assert [(c.generation, c.step) for c in reopened.all()] == [(1, 20), (1, 100)]
    latest = not_none(reopened.latest())
    assert (latest.step, latest.metadata, latest.ranks, latest.latest) == (100, {"note": "100"}, 1, True)
    assert latest.state is CheckpointState.COMMITTED
    assert reopened.restore_point() == latest
    assert latest.size_bytes > 0
    assert latest.model_hash


def test_each_saving_process_has_its_own_generation_and_gets_a_new_one_after_going_back() -> None:
    storage = MemoryStorage()
    first, second = local_catalog(storage), local_catalog(storage, start=50)
    save(storage, first, {"a": 1}, 100)
    save(storage, second, {"a": 2}, 60)
    save(storage, first, {"a": 3}, 120)
    assert [(c.generation, c.step) for c in first.all()] == [(1, 100), (1, 120), (2, 60)]
    newest = [c for c in first.all() if c.latest]
    assert [c.step for c in newest] == [60], "what a later process saved is newer, whatever its step"
    first.go_back()
    save(storage, first, {"a": 1}, 20)
    latest = not_none(first.latest())
    assert (latest.generation, latest.step) == (3, 20)


def test_two_writers_of_one_step_never_share_a_slot(tmp_path: Path) -> None:
    together, nonces = threading.Barrier(4), itertools.count()

    def write(number: int) -> None:
        storage = LocalStorage(tmp_path, nonce=lambda: f"w{number}-{next(nonces)}")
        catalog = local_catalog(storage, start=100 * number)
        together.wait(10)
        for step in (20, 40):
            save(storage, catalog, {"a": number}, step)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    found = local_catalog(LocalStorage(tmp_path, nonce=str)).all()
    assert sorted(c.order for c in found) == [(g, s) for g in range(1, 5) for s in (20, 40)]
    assert all(c.state is CheckpointState.COMMITTED for c in found)


def test_a_failed_save_may_be_repeated_and_its_leftovers_are_listed() -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    storage.fail(StorageError("disk full"), name=GLOBAL_NAME)
    with pytest.raises(StorageError, match="disk full"):
        save(storage, catalog, {"a": 1}, 20)
    storage.heal()
    assert catalog.all() == []
    assert len(catalog.leftovers()) == 1
    save(storage, catalog, {"a": 1}, 20)
    assert [c.step for c in catalog.all()] == [20]
    (rest,) = catalog.leftovers()
    remove_objects(storage, rest)
    assert catalog.leftovers() == []
    assert [c.step for c in catalog.all()] == [20]


def test_leftovers_exclude_saves_under_way_here_or_in_another_process() -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    record = catalog.begin(SaveRequest(step=20))
    storage.create_once(f"{catalog.folder(record)}/rank-00000.json", b"")
    assert catalog.leftovers() == []
    later = local_catalog(storage, start=50)
    other = later.begin(SaveRequest(step=20))
    storage.create_once(f"{later.folder(other)}/rank-00000.json", b"")
    assert catalog.leftovers() == []
    assert later.leftovers() == [], "the earlier process still saves"
    storage.held.discard(f"generations/{record.generation:06d}")
    assert later.leftovers() == [catalog.folder(record)], "the earlier process is over"


def test_a_damaged_marked_checkpoint_is_corrupt_and_its_predecessor_is_kept_as_latest() -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    first = save(storage, catalog, {"a": 20}, 20)
    assert save(storage, catalog, {"a": 2}, 20).id == first.id, "a step is saved once"
    last = save(storage, catalog, {"a": 40}, 40)
    del storage.objects[f"{catalog.folder(last)}/rank-00000.safetensors"]
    found = [(c.step, c.state, c.latest) for c in catalog.all()]
    assert found == [(20, CheckpointState.COMMITTED, True), (40, CheckpointState.CORRUPT, False)]
    with pytest.raises(Refused):
        catalog.delete(first)
    save(storage, catalog, {"a": 60}, 60)
    catalog.delete(first)


def test_a_folder_that_was_renamed_by_hand_is_corrupt() -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    folder = catalog.folder(save(storage, catalog, {"a": 1}, 20))
    for name in list(storage.objects):
        if name.startswith(folder):
            renamed = name.replace("step-000000000020", "step-000000000099")
            storage.objects[renamed] = storage.objects.pop(name)
    (found,) = catalog.all()
    assert (found.step, found.state) == (99, CheckpointState.CORRUPT)
    assert "another checkpoint" in found.reason


def test_deletion_starts_with_the_marker_and_survives_any_interruption() -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    folder = catalog.folder(save(storage, catalog, {"a": 1}, 20))
    deleted: list[str] = []

    def interrupt(verb: str, name: str) -> None:
        if verb == "delete":
            first = name not in deleted
            deleted.append(name)
            if first and not name.endswith(MARKER):
                raise StorageError("interrupted")

    storage.fault = interrupt
    for _ in range(10):
        try:
            remove_objects(storage, folder)
            break
        except StorageError:
            assert catalog.all() == [], "without its marker it no longer counts"
    assert storage.list(folder) == []
    once = [name.rpartition("/")[2] for name in dict.fromkeys(deleted)]
    assert once == [MARKER, GLOBAL_NAME, "rank-00000.safetensors", "rank-00000.json"]


# -- ownership of a root ----------------------------------------------------------------------


def test_a_root_belongs_to_one_mode_and_a_jobs_folder_to_one_cluster() -> None:
    storage = MemoryStorage()
    assert owner_of(storage) is None
    for _ in range(2):
        claim(storage, STANDALONE)
    assert owner_of(storage) == STANDALONE
    with pytest.raises(ConfigError, match="names standalone as the owner of this folder, not coordinated"):
        claim(storage, COORDINATED)
    for job in ("gpt", "bert"):
        claim(storage, f"{COORDINATED}:uid-1/{job}", folder=job)
    with pytest.raises(ConfigError, match="uid-1/gpt"):
        claim(storage, f"{COORDINATED}:uid-2/gpt", folder="gpt")


def test_a_restored_cluster_keeps_the_folders_of_its_lineage() -> None:
    storage = MemoryStorage()
    claim(storage, job_owner("uid-1", "gpt"), folder="gpt")
    claim(storage, job_owner("uid-1.aa", "gpt"), folder="gpt")
    owner = owner_of(storage, folder="gpt")
    assert owner == f"{COORDINATED}:uid-1/gpt"
    assert parse_owner(owner) == ("uid-1", "gpt")
    for other in (STANDALONE, COORDINATED, f"{COORDINATED}:/gpt", f"{COORDINATED}:uid", ""):
        assert parse_owner(other) is None


@pytest.mark.parametrize("data", [b"{", b"[]", b"{}", b"\xff", b'{"attempt": "a1", "self": "0"}'])
def test_a_broken_tag_hides_no_checkpoint_and_lets_none_be_deleted(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    for step in (20, 40, 60):
        save(storage, catalog, {"a": step}, step)
    first, second, _ = catalog.all()
    marks.tag(storage, second, "good")
    storage.create_once("tags/best", data)
    assert [(c.step, c.tags) for c in catalog.all()] == [(20, ()), (40, ("good",)), (60, ())]
    assert "tags/best" in caplog.text
    point = not_none(catalog.restore_point())
    assert point.step == 60
    with pytest.raises(Refused, match="the tag best, which may name"):
        catalog.delete(first)
    marks.tag(storage, second, "best")
    assert catalog.all()[1].tags == ("best", "good")
    catalog.delete(first)


@pytest.mark.parametrize("name", [".DS_Store", "best~", "a note.txt"])
def test_a_tag_file_with_an_invalid_name_is_no_tag_and_blocks_no_deletion(tmp_path: Path, name: str) -> None:
    storage = LocalStorage(tmp_path, nonce=lambda: "n")
    catalog = local_catalog(storage)
    for step in (20, 40):
        save(storage, catalog, {"a": step}, step)
    (tmp_path / "tags" / "folder").mkdir(parents=True)
    (tmp_path / "tags" / name).write_bytes(b"x")
    assert marks.tags(storage) == marks.Tags({}, {})
    catalog.delete(catalog.all()[0])


@pytest.mark.parametrize("ask", ["restore_point", "latest", "all"])
def test_a_checkpoint_replaced_during_a_listing_does_not_read_as_empty_storage(ask: str) -> None:
    storage = MemoryStorage()
    writing = local_catalog(storage)
    save(storage, writing, {"a": 1}, 1)
    (old,) = folders(storage.list())

    class Overtaken(MemoryStorage):
        """Between a listing and a read, another process commits a newer checkpoint and removes the older one."""

        overtaken = False

        def list(self, folder: str = "") -> list[str]:
            before = super().list(folder)
            if not self.overtaken:
                self.overtaken = True
                save(storage, writing, {"a": 2}, 2)
                remove_objects(storage, old.name)
            return before

    reading = Overtaken()
    reading.objects = storage.objects
    found = getattr(local_catalog(reading, start=50), ask)()
    assert [c.step for c in (found if ask == "all" else [found])] == [2]
