"""Images that Incrementals use must never be deleted, in any interleaving of two processes on one root (ADR 0023)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.copies.copying import copy_checkpoint
from strata.checkpoint.copies.tiers import TieredStorage
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import committed
from strata.checkpoint.format.uses import NAME
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.storage.sink import Storage, put
from strata.client.checkpoints.retention import retain
from strata.core.checkpoints.references import Keep
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import Refused
from tests.not_none import not_none
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, loaded, local_catalog, snapshot_of

FULL, INCREMENTAL = CheckpointType.FULL, CheckpointType.INCREMENTAL
STAYS = np.arange(100)


class Stepping(MemoryStorage):
    """A storage that calls `fault` for `list` and `exists` as well."""

    def list(self, folder: str = "") -> list[str]:
        self.fault("list", folder)
        return super().list(folder)

    def exists(self, name: str) -> bool:
        self.fault("exists", name)
        return super().exists(name)


def save(storage: Storage, catalog: LocalCatalog, step: int, kind: CheckpointType) -> CheckpointMetadata:
    saver = Saver(storage=storage, catalog=catalog, commit_timeout_s=5)
    state = {"stays": STAYS, "step": np.array([step])}
    return saver.save(snapshot_of(state), SaveRequest(step=step, type=kind), an_info(step))


def on_base(catalog: LocalCatalog, *bases: CheckpointMetadata, step: int) -> SaveRequest:
    """Return an Incremental whose base is the first of `bases`, and that uses the images of the last."""
    base, uses = bases[0], frozenset({catalog.folder(bases[-1])})
    return SaveRequest(step=step, type=INCREMENTAL, base_step=base.step, base_attempt=base.id, uses=uses)


def check_all(storage: Storage) -> dict[int, CheckpointType]:
    """Verify every checkpoint in `storage`; return their types by step."""
    catalog = local_catalog(storage, start=900)
    found = {}
    for checkpoint in catalog.all():
        assert checkpoint.state is CheckpointState.COMMITTED, checkpoint.reason
        back = loaded(storage, catalog, checkpoint)
        assert back["step"].tolist() == [checkpoint.step]
        assert np.array_equal(back["stays"], STAYS)
        found[checkpoint.step] = checkpoint.checkpoint_type
    return found


Act = Callable[[], object]


def two_processes(storage: Stepping) -> dict[str, Act]:
    """Return the acts of two processes: one commits a newer Full and deletes; a later one saves an Incremental."""
    deleting, building = local_catalog(storage, start=200), local_catalog(storage, start=100)
    for catalog in (deleting, building):
        catalog.begin(SaveRequest(step=0))  # allocates a generation

    def commit_and_delete() -> None:
        save(storage, deleting, 2, FULL)
        retain(deleting, storage, Keep(latest=1), now_unix_ms=0)

    return {"delete": commit_and_delete, "build": lambda: save(storage, building, 9, INCREMENTAL)}


def at_each_step(make: Callable[[], tuple[Any, Stepping, Act, Act]], *, least: int) -> Iterator[Any]:
    """For each storage call of one act, run the whole other act at this call, and yield the result of `make`.

    `make` returns (result, storage whose calls count, stepped act, other act). There are more than `least` steps.
    """
    for number in itertools.count():
        made, storage, act, other = make()
        if not _met(storage, number, act, other):
            assert number > least
            return
        yield made


def _met(storage: Stepping, number: int, act: Act, other: Act) -> bool:
    steps, met = itertools.count(), []

    def meet(verb: str, name: str) -> None:
        if next(steps) == number:
            met.append(name)
            other()

    storage.fault = meet
    act()
    storage.heal()
    return bool(met)


@pytest.mark.parametrize(("one", "other"), [("build", "delete"), ("delete", "build")])
def test_a_begin_and_a_deletion_may_interleave_at_any_step(one: str, other: str) -> None:
    def make() -> tuple[Storage, Stepping, Act, Act]:
        storage = Stepping()
        save(storage, local_catalog(storage), 1, FULL)
        acts = two_processes(storage)
        return storage, storage, acts[one], acts[other]

    ends = set()
    for storage in at_each_step(make, least=20):
        found = check_all(storage)
        assert 9 in found, "the newest, which was told to be committed"
        ends.add((found[9], 1 in found))
    assert (INCREMENTAL, True) in ends, "the old one stays when it is used"
    assert any(not stays for _, stays in ends), "and goes when it is not"


def one_process(steps: int) -> tuple[TieredStorage, Stepping, LocalCatalog, Act]:
    """Return storages with `steps` saves, the near one, the catalog, and the copying process's retention pass."""
    near = Stepping()
    storage = TieredStorage(near, MemoryStorage())
    catalog = local_catalog(storage)
    for step in range(1, steps + 1):
        save(storage, catalog, step, FULL)
    return storage, near, catalog, lambda: retain(catalog, storage, Keep(latest=1), now_unix_ms=0)


def test_a_begin_and_a_deletion_of_one_process_may_interleave_at_any_step() -> None:
    def make() -> tuple[Any, Stepping, Act, Act]:
        storage, near, catalog, collect_garbage = one_process(2)
        return (
            (storage, collect_garbage),
            near,
            lambda: save(storage, catalog, 3, INCREMENTAL),
            collect_garbage,
        )

    for storage, collect_garbage in at_each_step(make, least=20):
        collect_garbage()
        assert check_all(storage) in ({2: FULL, 3: INCREMENTAL}, {3: FULL})


def test_garbage_collection_spares_a_save_in_progress_at_any_step() -> None:
    def make() -> tuple[Any, Stepping, Act, Act]:
        _, near, catalog, collect_garbage = one_process(1)
        (base,) = catalog.all()
        request = on_base(catalog, base, step=3)
        written: list[str] = []

        def begin() -> None:
            written.append(f"{catalog.folder(catalog.begin(request))}/half")
            put(near, written[0], b"1")

        return (near, written), near, collect_garbage, begin

    for near, written in at_each_step(make, least=3):
        assert near.exists(written[0])
        assert near.exists(written[0].replace("half", NAME))


def test_a_checkpoint_being_deleted_is_refused_as_a_base() -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    first, second = save(storage, catalog, 1, FULL), save(storage, catalog, 2, FULL)
    catalog.delete(first)  # its objects are removed next
    with pytest.raises(Refused, match="deleted"):
        catalog.begin(on_base(catalog, second, first, step=3))
    assert not storage.list(f"step-{3:012d}-gen-000001-a2")
    catalog.deleted(first)
    with pytest.raises(Refused, match="newest"):
        catalog.delete(second)
    catalog.begin(on_base(catalog, second, first, step=4))


def test_a_newer_checkpoint_of_another_process_is_seen_in_tiered_storage() -> None:
    near, far = MemoryStorage(), MemoryStorage()
    storage = TieredStorage(near, far)
    catalog, other = local_catalog(storage), local_catalog(storage, start=50)
    base = save(storage, catalog, 1, FULL)
    save(storage, other, 2, FULL)
    retain(other, storage, Keep(latest=1), now_unix_ms=0)
    with pytest.raises(Refused, match="not the newest"):
        catalog.begin(on_base(catalog, base, step=3))
    save(storage, catalog, 3, INCREMENTAL)
    assert 3 in check_all(storage)


@pytest.mark.parametrize("died_at", ["begin", "finish", "create"])
def test_a_process_that_died_during_a_save_does_not_block_deletions(died_at: str) -> None:
    storage = Stepping()
    catalog = local_catalog(storage)
    save(storage, catalog, 1, FULL)
    dying = local_catalog(storage, start=100)

    def die(verb: str, name: str) -> None:
        if verb == died_at and "step-000000000009" in name and not name.endswith(NAME):
            raise KeyboardInterrupt

    storage.fault = die
    with pytest.raises(KeyboardInterrupt):
        save(storage, dying, 9, INCREMENTAL)
    storage.heal()
    dying.go_back()
    catalog.go_back()
    for step in (2, 3):
        save(storage, catalog, step, FULL)
        retain(catalog, storage, Keep(latest=1), now_unix_ms=0)
    assert check_all(storage) == {3: FULL}
    assert {name.partition("/")[0] for name in storage.objects if name.startswith("step-")} == {
        catalog.folder(catalog.all()[0])
    }


# -- the document -----------------------------------------------------------------------------

UNSEALED = b'{"format": "strata-uses", "version": 1, "folders": [], "self": "another digest"}'


@pytest.mark.parametrize(
    ("harm", "printed"),
    [("lost", "is used by"), ("illegible", "is used by"), ("illegible, without a manifest", "not known")],
)
def test_without_a_readable_uses_file_the_manifest_counts_or_deletions_stop(harm: str, printed: str) -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    base = save(storage, catalog, 1, FULL)
    user = save(storage, catalog, 2, INCREMENTAL)
    save(storage, catalog, 3, FULL)
    folder = catalog.folder(user)
    del storage.objects[f"{folder}/{NAME}"]
    if harm != "lost":
        storage.objects[f"{folder}/{NAME}"] = UNSEALED
    if harm == "illegible, without a manifest":
        del storage.objects[f"{folder}/{GLOBAL_NAME}"]
    with pytest.raises(Refused, match=printed):
        local_catalog(storage, start=50).delete(base)


# -- a copy includes the images it uses -------------------------------------------------------


def test_base_images_copied_with_an_incremental_are_not_garbage_collected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    source, target = MemoryStorage(), MemoryStorage()
    catalog = local_catalog(source)
    save(source, catalog, 1, FULL)
    user = save(source, catalog, 2, INCREMENTAL)
    folder = catalog.folder(user)
    proof = not_none(committed(source, folder))
    copy_checkpoint([source], target, folder, proof[1])
    there = local_catalog(target, start=50)
    save(target, there, 7, FULL)
    retain(there, target, Keep(latest=5), now_unix_ms=0)
    assert check_all(target).keys() == {2, 7}
    retain(there, target, Keep(latest=1), now_unix_ms=0)
    retain(there, target, Keep(latest=1), now_unix_ms=0)
    assert {name.partition("/")[0] for name in target.objects if name.startswith("step-")} == {
        there.folder(there.all()[0])
    }
    assert MARKER in {name.rpartition("/")[2] for name in target.objects}
