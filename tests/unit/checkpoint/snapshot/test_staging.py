"""The first blocks of an image are written while its last blocks are copied.

No block may be written before it is copied.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.catalog.protocol import SaveRequest
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.snapshot import snapshot
from strata.checkpoint.snapshot.memory import copy
from strata.checkpoint.snapshot.snapshot import Arena
from strata.checkpoint.snapshot.staging import Staging
from strata.checkpoint.snapshot.state import Flat
from strata.errors import CheckpointAborted
from tests.unit.checkpoint import writer_rig

LIMIT_S = 20


def test_a_staged_range_is_ready_once_all_bytes_before_it_are_copied() -> None:
    go = [threading.Event() for _ in range(3)]

    def work(number: int) -> None:
        assert go[number].wait(LIMIT_S)

    staging = Staging([10, 20, 30], work)
    there: list[int] = []

    def wait_for(*sizes: int) -> None:
        for size in sizes:
            staging.wait(size)
            there.append(size)

    run = threading.Thread(target=staging.run, args=(3,))
    waiting = threading.Thread(target=wait_for, args=(0, 5, 10, 11, 25, 30))
    go[1].set()  # the second run alone releases no waiter
    run.start()
    waiting.start()
    go[0].set()
    staging.wait(20)
    assert there in ([], [0], [0, 5], [0, 5, 10], [0, 5, 10, 11])
    go[2].set()
    run.join(LIMIT_S)
    waiting.join(LIMIT_S)
    assert there == [0, 5, 10, 11, 25, 30]
    staging.wait()


def test_a_wait_for_a_failed_or_unstarted_copy_raises() -> None:
    def work(number: int) -> None:
        if number:
            raise MemoryError

    failed, never = Staging([10, 20], work), Staging([10, 20], work)
    with pytest.raises(MemoryError):
        failed.run(1)
    failed.wait(10)
    never.end()
    for staging, wanted in ((failed, 11), (failed, None), (never, 1)):
        with pytest.raises(CheckpointAborted, match="not copied whole"):
            staging.wait(wanted)
    Staging().wait()


def test_a_source_array_is_referenced_until_it_is_copied_and_no_longer() -> None:
    class Made:
        """Returns a state that nothing else references, as an object's `state_dict()` does."""

        def __init__(self) -> None:
            self.given: list[weakref.ref[Any]] = []

        def state_dict(self) -> Any:
            array = np.arange(100_000)
            self.given.append(weakref.ref(array))
            return {"array": array}

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    made, flat = Made(), Flat()
    tree = flat.add("", {"made": made})
    taken = snapshot.take_snapshot(flat, tree=tree, rng=None, arena=Arena(), ahead=True)
    del flat
    assert made.given[0]() is not None
    taken.staging.run(2)
    assert made.given[0]() is None
    assert bytes(taken.views["made.array"]) == np.arange(100_000).tobytes()


class Rig(writer_rig.Rig):
    """A writer whose copies and written blocks the test observes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.written = threading.Event()
        self.copied: list[memoryview] = []
        self.fail_after: int | None = None
        self.storage.fault = self._hear
        monkeypatch.setattr(snapshot, "copy", self._copy)
        monkeypatch.setattr("strata.checkpoint.save.writer.COPY_THREADS", 1)
        self.state = {"a": np.random.default_rng(1).integers(0, 255, 4 * CHUNK_BYTES, dtype=np.uint8)}

    def _hear(self, verb: str, name: str) -> None:
        if verb == "write" and name.endswith("safetensors"):
            self.written.set()

    def _copy(self, into: memoryview, data: memoryview) -> None:
        if len(self.copied) == self.fail_after:
            raise KeyboardInterrupt
        if len(self.copied) == 3:
            assert self.written.wait(LIMIT_S), "nothing is written before the last chunk is copied"
        copy(into, data)
        self.copied.append(into)

    def save(self, step: int) -> CheckpointInfo:
        return self.writer.write(self.state, SaveRequest(step=step), capture_rng=False)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = Rig(monkeypatch)
    yield rig
    rig.writer.close()


def test_a_staged_snapshot_is_written_while_it_is_copied(rig: Rig) -> None:
    info = rig.save(1)
    assert info.staged
    before = rig.state["a"].copy()
    rig.state["a"][:] = 0
    info.wait(LIMIT_S)
    assert rig.steps() == [1]
    assert np.array_equal(rig.loaded()["a"], before)


@pytest.mark.parametrize("copied", [0, 2])
def test_an_interrupted_copy_saves_nothing_and_raises_once(rig: Rig, copied: int) -> None:
    rig.save(1).wait(LIMIT_S)
    rig.copied.clear()
    rig.fail_after = copied
    with pytest.raises(KeyboardInterrupt):
        rig.save(2)
    rig.writer.wait_until_finished(LIMIT_S)
    assert rig.steps() == [1]
    rig.copied.clear()
    rig.fail_after = None
    rig.save(2).wait(LIMIT_S)
    assert np.array_equal(rig.loaded(2)["a"], rig.state["a"])
