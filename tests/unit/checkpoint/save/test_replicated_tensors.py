"""Replicated tensors, equal on all ranks: written once, compared, and restored by any number of ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.restore.restore import restore_into
from strata.checkpoint.save.replicated_tensors import Replication
from strata.checkpoint.snapshot.state import Flat
from strata.core.kv.records import CheckpointState
from tests.unit.checkpoint.ranks import Ranks

LARGE = 3 * CHUNK_BYTES + 5


def a_state(rank: int, *, small: Any = (1.0,) * 4) -> dict[str, Any]:
    large = np.arange(LARGE, dtype=np.uint8)
    return {"same": {"large": large, "small": np.array(small), "raw": b"xyz"}, "mine": np.full(2, rank)}


def restored(ranks: Ranks, rank: int, state: dict[str, Any]) -> dict[str, Any]:
    restore_into(ranks.loaded(rank, state).saved, state)
    return state


def test_a_replicated_tensor_is_written_once_and_any_rank_restores_it() -> None:
    ranks = Ranks(3)
    ranks.save(states=[a_state(rank) for rank in range(3)], paths=[["same"]] * 3)
    assert ranks.states() == [CheckpointState.COMMITTED] * 3
    names = [f"{ranks.folder}/rank-{rank:05d}.json" for rank in range(3)]
    written = [
        sum(entry.chunk_bytes(number) for number, _, _ in entry.located())
        for manifest in (RankManifest.from_bytes(ranks.near.objects[name], what=name) for name in names)
        for name, entry in manifest.tensors.items()
        if name.startswith("same")
    ]
    assert sum(written) == LARGE + 32 + 3
    assert max(written) <= 2 * CHUNK_BYTES
    for rank in range(4):
        empty = {"same": {"large": np.zeros(LARGE, np.uint8), "small": np.zeros(4), "raw": None}}
        here = restored(ranks, rank, empty)["same"]
        assert here["large"].tolist() == a_state(0)["same"]["large"].tolist()
        assert (here["small"].tolist(), here["raw"]) == ([1.0] * 4, b"xyz")
    assert restored(ranks, 2, {"mine": np.zeros(2, np.int64)})["mine"].tolist() == [2, 2]


@pytest.mark.parametrize(
    ("small", "declared", "printed"),
    [
        ((2.0,) * 4, "same", "same.small differs between rank 0 and rank 1"),
        ((1.0,) * 5, "same", "float64[4] on rank 0 and float64[5] on rank 1"),
        ((1.0,) * 4, "mine", "every rank must declare the same tensors"),
    ],
)
def test_a_replicated_tensor_that_differs_is_named_and_aborts_the_save(
    small: tuple[float, ...], declared: str, printed: str
) -> None:
    ranks = Ranks(2)
    ranks.save(states=[a_state(0), a_state(1, small=small)], paths=[["same"], [declared]])
    assert ranks.record.state is CheckpointState.ABORTED
    assert any(printed in str(error) for error in ranks.ends.values())


def test_the_model_hash_does_not_depend_on_the_number_of_ranks() -> None:
    prints = set()
    for count in (1, 2, 3):
        ranks = Ranks(count)
        state = {"model": {"w": np.arange(LARGE, dtype=np.uint8)}}
        ranks.save(states=[state] * count, paths=[["model"]] * count)
        prints.add(ranks.loaded(0).manifest.model_hash)
    assert len(prints) == 1


def test_a_path_declares_every_tensor_below_it() -> None:
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
    for ranks, held in ((2, {"a"}), (1, set())):
        everything = Flat(replication=Replication(rank=0, ranks=ranks, paths=frozenset({""})))
        everything.add("", {"a": value.copy()})
        everything.add("__rng__", {"t": value.copy()})
        assert set(everything.replicas) == held
