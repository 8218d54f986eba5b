"""What all ranks hold alike: written once, compared, and restored by any number of them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from strata.checkpoint.catalog import CheckpointMetadata, SaveRequest
from strata.checkpoint.digest import CHUNK_BYTES
from strata.checkpoint.manifest import RankManifest
from strata.checkpoint.reader import load
from strata.checkpoint.replication import Replication
from strata.checkpoint.restoring import restore_into
from strata.checkpoint.saving import Saver
from strata.checkpoint.state import Flat
from strata.core.records import CheckpointState, CheckpointType
from strata.errors import StrataError
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import an_info, snapshot_of
from tests.unit.checkpoint.shared_catalog import SharedCatalog

LARGE = 3 * CHUNK_BYTES + 5


class World:
    """Ranks that save together."""

    def __init__(self, ranks: int) -> None:
        self.storage = MemoryStorage()
        self.shared = SharedCatalog(ranks)
        self.errors: list[StrataError] = []

    def save(
        self,
        states: Sequence[Mapping[str, Any]],
        step: int,
        *,
        paths: Sequence[Sequence[str]] = (),
        kind: CheckpointType = CheckpointType.FULL,
    ) -> CheckpointMetadata:
        def one(rank: int) -> None:
            declared = frozenset(paths[rank]) if paths else frozenset({"same"})
            replication = Replication(rank=rank, ranks=len(states), paths=declared)
            saver = Saver(storage=self.storage, catalog=self.shared.of(rank), commit_timeout_s=20)
            snapshot = snapshot_of(states[rank], replication=replication)
            try:
                saver.save(snapshot, SaveRequest(step=step, type=kind), an_info(step))
            except StrataError as error:
                self.errors.append(error)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(states))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return self.shared.records[step]

    def manifests(self, record: CheckpointMetadata) -> list[RankManifest]:
        folder = self.shared.of(0).folder(record)
        return [
            RankManifest.from_bytes(self.storage.read(f"{folder}/rank-{rank:05d}.json"), what="it")
            for rank in range(self.shared.world_size)
        ]

    def restored(self, record: CheckpointMetadata, rank: int, state: dict[str, Any]) -> dict[str, Any]:
        folder = self.shared.of(0).folder(record)
        loaded = load(self.storage, folder, manifest_digest=record.manifest_digest, rank=rank, state=state)
        restore_into(loaded.saved, state)
        return state


def a_state(rank: int, *, small: float = 1.0) -> dict[str, Any]:
    large = np.arange(LARGE, dtype=np.uint8)
    return {"same": {"large": large, "small": np.full(4, small), "raw": b"xyz"}, "mine": np.full(2, rank)}


def empty() -> dict[str, Any]:
    return {"same": {"large": np.zeros(LARGE, np.uint8), "small": np.zeros(4), "raw": None}}


def test_replicas_write_once_and_any_rank_restores() -> None:
    world = World(3)
    record = world.save([a_state(rank) for rank in range(3)], step=5)
    assert (record.state, world.errors) == (CheckpointState.COMMITTED, [])
    written = [
        sum(entry.chunk_bytes(number) for number, _, _ in entry.located())
        for manifest in world.manifests(record)
        for name, entry in manifest.tensors.items()
        if name.startswith("same")
    ]
    assert sum(written) == LARGE + 32 + 3
    assert max(written) <= 2 * CHUNK_BYTES
    for rank in range(4):
        here = world.restored(record, rank, empty())["same"]
        assert here["large"].tolist() == a_state(0)["same"]["large"].tolist()
        assert (here["small"].tolist(), here["raw"]) == ([1.0] * 4, b"xyz")
    own = world.restored(record, 2, {"mine": np.zeros(2, np.int64)})
    assert own["mine"].tolist() == [2, 2]


def test_what_differs_is_an_error_that_names_the_tensor_and_nothing_is_committed() -> None:
    world = World(2)
    record = world.save([a_state(0), a_state(1, small=2.0)], step=5)
    assert record.state is CheckpointState.ABORTED
    assert any("same.small differs between rank 0 and rank 1" in str(error) for error in world.errors)


def test_what_one_rank_did_not_declare_is_an_error() -> None:
    world = World(2)
    record = world.save([a_state(0), a_state(1)], step=5, paths=[["same"], []])
    assert record.state is CheckpointState.ABORTED
    assert any("every rank must declare the same tensors" in str(error) for error in world.errors)


def test_another_shape_is_an_error() -> None:
    world = World(2)
    other = a_state(1)
    other["same"]["small"] = np.ones(5)
    record = world.save([a_state(0), other], step=5)
    assert record.state is CheckpointState.ABORTED
    assert any("float64[4] on rank 0 and float64[5] on rank 1" in str(error) for error in world.errors)


def test_the_fingerprint_of_the_model_does_not_depend_on_the_number_of_replicas() -> None:
    prints = set()
    for ranks in (1, 2, 3):
        world = World(ranks)
        states = [{"model": {"w": np.arange(LARGE, dtype=np.uint8)}} for _ in range(ranks)]
        record = world.save(states, step=1, paths=[["model"]] * ranks)
        folder = world.shared.of(0).folder(record)
        loaded = load(world.storage, folder, manifest_digest=record.manifest_digest, rank=0)
        prints.add(loaded.manifest.model_hash)
    assert len(prints) == 1


def test_a_path_stands_for_what_is_below_it() -> None:
    replication = Replication(rank=1, ranks=2, paths=frozenset({"model", "optim.state"}))
    flat = Flat(replication=replication)
    value = np.ones(1)
    flat.add(
        "",
        {
            "model": {"w": value.copy(), "deep": [value.copy()]},
            "modelled": value.copy(),
            "optim": {"state": {0: value.copy()}, "other": value.copy()},
            "empty": np.ones(0),
        },
    )
    flat.add("__rng__", {"t": value.copy()})
    assert set(flat.replicas) == {"model.w", "model.deep.0", "optim.state.0"}
    assert {(each.number, each.count) for each in flat.replicas.values()} == {(1, 2)}
    everything = Flat(replication=Replication(rank=0, ranks=2, paths=frozenset({""})))
    everything.add("", {"a": value.copy()})
    everything.add("__rng__", {"t": value.copy()})
    assert set(everything.replicas) == {"a"}
    alone = Flat(replication=Replication(rank=0, ranks=1, paths=frozenset({""})))
    alone.add("", {"a": value.copy()})
    assert not alone.replicas
