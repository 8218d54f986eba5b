"""Snapshots for an Incremental: hashed in place, and only bytes that the arena lacks are copied."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from strata.checkpoint.catalog.protocol import SaveRequest
from strata.checkpoint.format.digest import CHUNK_BYTES, chunks, digest
from strata.checkpoint.format.entries import Shard
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.save.writer import AsyncCheckpointWriter
from strata.checkpoint.snapshot import snapshot
from strata.checkpoint.snapshot.memory import copy
from strata.checkpoint.snapshot.snapshot import Arena, Snapshot, take_snapshot
from strata.checkpoint.snapshot.state import Flat
from strata.core.kv.records import CheckpointType
from tests.not_none import not_none
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import loaded, local_catalog

INCREMENTAL = CheckpointType.INCREMENTAL


class Copies:
    """A copy function that counts the bytes copied into arenas."""

    def __init__(self) -> None:
        self.total_bytes = 0

    def __call__(self, into: memoryview, data: memoryview) -> None:
        self.total_bytes += len(into)
        copy(into, data)

    def taken(self) -> int:
        total, self.total_bytes = self.total_bytes, 0
        return total


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Copies:
    copies = Copies()
    monkeypatch.setattr(snapshot, "copy", copies)
    return copies


def a_state() -> dict[str, Any]:
    """Return a state of three chunks, a strided tensor, a tensor without bytes, and a small tensor."""
    random = np.random.default_rng(3)
    return {
        "large": random.integers(0, 255, 2 * CHUNK_BYTES + 4096, dtype=np.uint8),
        "strided": random.random((6, 5))[:, ::2],
        "none": np.zeros((0, 3)),
        "small": random.random(7),
    }


def take(state: Any, arena: Arena, *, hashed: bool = True) -> Snapshot:
    flat = Flat()
    tree = flat.add("", state)
    return take_snapshot(flat, tree=tree, rng=None, arena=arena, hashed=hashed)


def digests_of(taken: Snapshot) -> dict[str, tuple[str, ...]]:
    return {name: tuple(map(digest, chunks(view))) for name, view in taken.views.items()}


def bytes_of(taken: Snapshot) -> bytes:
    return b"".join(taken.pieces)


def test_a_hashed_snapshot_equals_a_plain_copy_and_has_its_digests() -> None:
    taken = take(a_state(), Arena())
    assert bytes_of(taken) == bytes_of(take(a_state(), Arena(), hashed=False))
    assert taken.digests == digests_of(taken)


def test_chunks_already_in_the_arena_are_not_copied(copies: Copies) -> None:
    state, arena = a_state(), Arena()
    take(state, arena)
    assert copies.taken() == state["large"].nbytes + state["small"].nbytes
    state["large"][CHUNK_BYTES] ^= 1
    state["strided"][0, 0] += 1
    taken = take(state, arena)
    assert copies.taken() == CHUNK_BYTES
    assert bytes_of(taken) == bytes_of(take(state, Arena(), hashed=False))
    assert taken.digests == digests_of(taken)


def fail(into: memoryview, data: memoryview) -> None:
    into[:10] = bytes(10)
    raise MemoryError


@pytest.mark.parametrize(
    "between", ["a copy without digests", "lent", "released", "a larger one", "a failure", "another layout"]
)
def test_an_arena_used_in_between_keeps_nothing_to_reuse(
    between: str, copies: Copies, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, arena = a_state(), Arena()
    first = take(state, arena)
    size_bytes = first.layout.size_bytes
    del first
    if between == "a copy without digests":
        take({name: array + 1 for name, array in state.items()}, arena, hashed=False)
    elif between == "lent":
        arena.lend(size_bytes)[:] = bytes(size_bytes)
        arena.take_back()
    elif between == "released":
        arena.release()
    elif between == "another layout":
        state["one more"] = np.arange(3)
    elif between == "a failure":
        with monkeypatch.context() as patch:
            patch.setattr(snapshot, "copy", fail)
            with pytest.raises(MemoryError):
                take({name: array + 1 for name, array in state.items()}, arena)
    else:
        arena.take(size_bytes + (4 << 20))
    copies.taken()
    taken = take(state, arena)
    assert copies.taken() == sum(array.nbytes for name, array in state.items() if name != "strided")
    assert bytes_of(taken) == bytes_of(take(state, Arena(), hashed=False))


def test_digests_match_the_arena_even_if_the_state_changes_during_the_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    state, arena = a_state(), Arena()
    take(state, arena)
    state["large"][0] += 1

    def changing(into: memoryview, data: memoryview) -> None:
        state["large"][1] += 1  # between hash and copy
        copy(into, data)

    monkeypatch.setattr(snapshot, "copy", changing)
    taken = take(state, arena)
    assert taken.digests == digests_of(taken)


def test_an_incremental_after_a_full_copies_only_changed_chunks(copies: Copies) -> None:
    storage = MemoryStorage()
    catalog = local_catalog(storage)
    writer = AsyncCheckpointWriter(Saver(storage=storage, catalog=catalog, commit_timeout_s=20))
    state = a_state()

    def save(step: int, kind: CheckpointType = INCREMENTAL) -> int:
        writer.write(state, SaveRequest(step=step, type=kind), capture_rng=False).wait(20)
        writer.wait_until_finished(20)
        return copies.taken()

    save(1, CheckpointType.FULL)
    state["large"][0] += 1
    assert save(2) == CHUNK_BYTES
    assert save(3) == 0
    state["large"][:CHUNK_BYTES] += 1
    assert save(4) == CHUNK_BYTES
    writer.close()
    for checkpoint in catalog.all():
        assert checkpoint.checkpoint_type is (CheckpointType.FULL if checkpoint.step == 1 else INCREMENTAL)
    newest = not_none(catalog.latest())
    back = loaded(storage, catalog, newest)
    assert all(np.array_equal(back[name], state[name]) for name in state)


def test_parts_of_larger_tensors_are_copied_last() -> None:
    """The tensors that ranks compare come first, so they are hashed while the parts are still copied."""
    flat = Flat()
    tree = flat.add("", {"part": np.ones(4), "w": np.ones(4), "part2": np.ones(4), "x": np.ones(4)})
    flat.shards |= {name: Shard(global_shape=(8,), offsets=(0,)) for name in ("part", "part2")}
    taken = take_snapshot(flat, tree=tree, rng=None, arena=Arena())
    assert list(taken.places) == ["w", "x", "part", "part2"]
