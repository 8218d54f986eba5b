"""The search of storage roots: the checkpoints it finds, and its messages about everything else below a root."""

from __future__ import annotations

import dataclasses
import json
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.root import COORDINATED, STANDALONE
from strata.client.checkpoints.manager import CheckpointManager
from strata.controlplane.restoring import expected, lineage_of
from strata.controlplane.storage_search import Searched, search, survey
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import CheckpointType, encode
from strata.core.restore.storage_evidence import Seen
from strata.errors import NotFound, Refused, StorageError
from tests.unit.core.lost_etcd import LostJob
from tests.unit.core.rig import KEYS

OURS = "aaaa"


def state(value: float, size: int = 10) -> dict[str, object]:
    return {"model": {"w": np.full(size, value, dtype=np.float32)}, "step": int(value)}


def own(folder: Path, owner: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = {"format": "strata-root", "version": 1, "owner": owner, "id": "i"}
    (folder / "strata.json").write_text(json.dumps(body))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root owned by coordinators, with the steps 10 and 20 of job gpt."""
    where = tmp_path / "root"
    with CheckpointManager(where / "gpt") as manager:
        for step in (10, 20):
            manager.save_state(state(step), step=step, metadata={"lr": "0.1"}).wait()
    own(where, COORDINATED)
    own(where / "gpt", f"{COORDINATED}:{OURS}/gpt")
    return where


def storage(root: Path) -> LocalStorage:
    return LocalStorage(root, nonce=lambda: uuid.uuid4().hex)


def look(*roots: Path, verify: bool = False, known: dict[str, str] | None = None) -> Searched:
    surveys = [survey(storage(root)) for root in roots]
    return search(surveys, OURS, expected=known or {}, verify=verify)


def folder_of(root: Path, step: int) -> Path:
    (folder,) = (root / "gpt").glob(f"step-{step:012d}-*")
    return folder


def test_a_complete_checkpoint_is_found_with_its_manifest_data(root: Path) -> None:
    searched = look(root)
    first, second = sorted(searched.found.checkpoints, key=lambda c: c.step)
    assert searched.skipped == ()
    assert searched.found.generations == {"gpt": 1}
    assert (first.step, second.step, second.generation, second.ranks) == (10, 20, 1, 1)
    assert second.predecessor == (10, 1, first.attempt)
    assert second.type is CheckpointType.FULL
    assert second.metadata == {"lr": "0.1"}
    assert second.manifest_digest.startswith("xxh3-128:")
    assert second.path == folder_of(root, 20).as_uri()
    assert second.size_bytes > 0


def test_an_incremental_names_the_checkpoints_it_uses(tmp_path: Path) -> None:
    where = tmp_path / "root"
    with CheckpointManager(where / "gpt") as manager:
        kept = np.arange(5 << 20, dtype=np.float32)
        manager.save_state({"kept": kept, "step": 1}, step=1).wait()
        manager.save_state(
            {"kept": kept, "step": 2}, step=2, checkpoint_type=CheckpointType.INCREMENTAL
        ).wait()
    own(where, COORDINATED)
    own(where / "gpt", f"{COORDINATED}:{OURS}/gpt")
    base, user = sorted(look(where).found.checkpoints, key=lambda c: c.step)
    assert user.type is CheckpointType.INCREMENTAL
    assert user.uses == (base.where,)
    (folder_of(where, 1) / "rank-00000.safetensors").unlink()
    searched = look(where)
    assert searched.found.checkpoints == ()
    assert set(searched.found.damaged) == {base.path, user.path}, "its base's bytes are its own"


def cut(folder: Path) -> None:
    image = folder / "rank-00000.safetensors"
    image.write_bytes(image.read_bytes()[:-1])


def flip(folder: Path) -> None:
    image = folder / "rank-00000.safetensors"
    data = bytearray(image.read_bytes())
    data[-1] ^= 1
    image.write_bytes(data)


def rewrite(name: str, data: bytes) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return write


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def as_a_folder(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return change


@pytest.mark.parametrize(
    "change",
    [
        cut,
        lose("rank-00000.safetensors"),
        lose("rank-00000.json"),
        lose("manifest.json"),
        rewrite("COMMIT", b"nonsense"),
        rewrite("COMMIT", b"[" * 100_000),
        rewrite("COMMIT", b"{}"),
        rewrite("manifest.json", b'{"format": "strata-manifest"}'),
        rewrite("manifest.json", b"\xff" * 1000),
        rewrite("rank-00000.json", b"null"),
        as_a_folder("COMMIT"),
        as_a_folder("manifest.json"),
    ],
)
def test_a_marked_but_incomplete_checkpoint_is_damaged(root: Path, change: Callable[[Path], None]) -> None:
    change(folder_of(root, 20))
    searched = look(root)
    assert [c.step for c in searched.found.checkpoints] == [10]
    assert list(searched.found.damaged) == [folder_of(root, 20).as_uri()]
    assert len(searched.skipped) == 1


def test_a_flipped_bit_is_found_only_by_reading_every_byte(root: Path) -> None:
    flip(folder_of(root, 20))
    assert len(look(root).found.checkpoints) == 2
    searched = look(root, verify=True)
    assert [c.step for c in searched.found.checkpoints] == [10]
    assert "differs from the saved data" in searched.skipped[0]


def test_a_checkpoint_without_a_marker_counts_only_if_the_catalog_knows_its_manifest(root: Path) -> None:
    digests = {c.path: c.manifest_digest for c in look(root).found.checkpoints}
    lose("COMMIT")(folder_of(root, 20))
    assert [c.step for c in look(root).found.checkpoints] == [10]
    found = look(root, known=digests).found
    assert {c.step: c.marked for c in found.checkpoints} == {10: True, 20: False}
    lose("manifest.json")(folder_of(root, 20))
    assert look(root, known=digests).found.damaged == {}, "it was being removed"
    assert look(root).found.generations == {"gpt": 1}


def test_another_checkpoint_in_a_folder_is_damage(root: Path) -> None:
    shutil.rmtree(folder_of(root, 20))
    shutil.copytree(folder_of(root, 10), root / "gpt" / "step-000000000030-gen-000001-abc")
    (why,) = look(root).found.damaged.values()
    assert why == "it holds another checkpoint"


@pytest.mark.parametrize(
    "name",
    [
        "step-000000000030-gen-999999999999-x",
        "step-000000000030-gen-000000-x",
        "step-000000000030-gen-0000001-x",
        f"step-000000000030-gen-000002-{'x' * 150}",
    ],
)
def test_a_folder_that_no_save_makes_is_left_out_in_one_line(root: Path, name: str) -> None:
    (root / "gpt" / name).mkdir()
    searched = look(root)
    assert len(searched.found.checkpoints) == 2
    assert searched.found.generations == {"gpt": 1}
    assert len(searched.skipped) == 1


def test_unowned_and_foreign_folders_are_excluded(root: Path) -> None:
    (root / "notes").mkdir()
    (root / "a file").write_text("x")
    own(root / "other", f"{COORDINATED}:bbbb/other")
    own(root / "lying", f"{COORDINATED}:{OURS}/gpt")
    own(root / "bad", "nonsense")
    own(root / "..bad", f"{COORDINATED}:{OURS}/..bad")
    (root / "broken").mkdir()
    (root / "broken" / "strata.json").write_bytes(b"[" * 50_000)
    found = survey(storage(root))
    assert found.jobs == {OURS: ("gpt",), "bbbb": ("other",)}
    assert {Path(uri).name for uri in found.unread} == {"lying", "..bad", "broken"}
    assert set(found.unread) <= set(look(root).found.unread)
    assert len(look(root).skipped) == 3
    assert lineage_of([found], OURS) == OURS
    with pytest.raises(Refused, match="of 2 clusters") as error:
        lineage_of([found], "")
    assert "aaaa has gpt; bbbb has other" in error.value.hint
    with pytest.raises(Refused, match="no root has a job of lineage cccc"):
        lineage_of([found], "cccc")


@pytest.mark.parametrize("data", [None, b"[" * 100, b'{"format": "strata-root"}'])
def test_a_job_without_a_readable_owner_is_never_proven_empty(root: Path, data: bytes | None) -> None:
    committed = FoundJob(root)
    assert committed.seen() is Seen.PROVEN
    owner = root / "gpt" / "strata.json"
    owner.unlink() if data is None else owner.write_bytes(data)
    assert committed.seen() is Seen.UNREAD
    shutil.rmtree(root / "gpt")
    assert committed.seen() is Seen.UNREAD
    own(root / "gpt", f"{COORDINATED}:{OURS}/gpt")
    assert committed.seen() is Seen.ABSENT


class FoundJob:
    """Step 20 of job gpt as the catalog has it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._record = dataclasses.replace(LostJob(20).record(20), path=folder_of(root, 20).as_uri())
        self._record = dataclasses.replace(self._record, manifest_digest="")

    def seen(self) -> Seen:
        return look(self._root).found.seen(self._record.path, self._record)[0]


def test_a_restored_cluster_is_found_by_its_lineage(root: Path) -> None:
    own(
        root / "old", f"{COORDINATED}:{OURS}.77/old"
    )  # as written by a release that did not record the lineage
    assert survey(storage(root)).jobs == {OURS: ("gpt", "old")}
    assert lineage_of([survey(storage(root))], f"{OURS}.99") == OURS


def test_a_link_out_of_the_root_is_not_followed(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    own(tmp_path / "elsewhere", f"{COORDINATED}:{OURS}/linked")
    (root / "linked").symlink_to(tmp_path / "elsewhere")
    assert survey(storage(root)).jobs == {OURS: ("gpt",)}


def test_a_job_s_folder_that_cannot_be_listed_is_unread(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    surveyed = survey(storage(root))

    def fails(_folder: str = "") -> list[str]:
        raise StorageError("cannot list it: Input/output error")

    monkeypatch.setattr(surveyed.storage, "list", fails)
    searched = search([surveyed], OURS, expected={})
    assert list(searched.found.unread) == [(root / "gpt").as_uri()]
    assert "Input/output error" in searched.skipped[0]


def test_a_folder_that_is_no_storage_root_is_refused_with_a_reason(root: Path, tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="no storage root"):
        survey(storage(tmp_path / "nothing"))
    with pytest.raises(Refused, match="folder of one job"):
        survey(storage(root / "gpt"))
    own(tmp_path / "alone", STANDALONE)
    with pytest.raises(Refused, match="without coordinators"):
        survey(storage(tmp_path / "alone"))
    own(tmp_path / "empty", COORDINATED)
    empty = survey(storage(tmp_path / "empty"))
    with pytest.raises(NotFound, match="no job's folder"):
        lineage_of([empty], "")


def test_the_search_expects_the_catalogs_committed_checkpoints() -> None:
    job = LostJob(20, 40)
    base = {key: value for key, value in job.base().items() if key.startswith(KEYS.jobs)}
    assert expected(base, KEYS) == {job.record(step).path: "m" for step in (20, 40)}
    assert expected({KEYS.job("job").checkpoint(1, 1): b"nonsense", KEYS.jobs: b""}, KEYS) == {}
    assert expected({}, ClusterKeys("other")) == {}
    assert encode(job.record(20))
