from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.catalog import CheckpointMetadata, SaveRequest
from strata.checkpoint.handle import CheckpointInfo
from strata.checkpoint.memory import address_of
from strata.checkpoint.reader import load
from strata.checkpoint.saving import Saver
from strata.checkpoint.snapshot import Snapshot, take_snapshot
from strata.checkpoint.writer import AsyncCheckpointWriter, WhenFull
from strata.core.records import CheckpointState
from strata.errors import CheckpointAborted, CheckpointError, ConfigError, StorageError, Unavailable
from tests.unit.checkpoint.memory_storage import MemoryStorage
from tests.unit.checkpoint.saves import local_catalog
from tests.unit.checkpoint.shared_catalog import SharedCatalog

LIMIT_S = 20


class Rig:
    """A writer whose disk can be held up and made to fail."""

    def __init__(self, **options: Any) -> None:
        self.storage = MemoryStorage()
        self.catalog = local_catalog(self.storage)
        self.go = threading.Event()
        self.go.set()
        self.waiting = threading.Event()
        self.storage.fault = self._fault
        self.full: set[int] = set()
        self.after: list[CheckpointMetadata | None] = []
        saver = Saver(storage=self.storage, catalog=self.catalog, commit_timeout_s=LIMIT_S)
        options.setdefault("after_save", self.after.append)
        self.writer = AsyncCheckpointWriter(saver, **options)

    def _fault(self, verb: str, name: str) -> None:
        if verb == "begin" and name.endswith("safetensors"):
            self.waiting.set()
            assert self.go.wait(LIMIT_S)
            if any(f"step-{step:012d}-" in name for step in self.full):
                raise StorageError("disk full")

    def write(self, step: int, state: Any = None) -> CheckpointInfo:
        return self.writer.write({"a": step} if state is None else state, SaveRequest(step=step))

    def steps(self) -> list[int]:
        return [c.step for c in self.catalog.all()]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go.set()
    rig.writer.close()


def test_write_returns_when_the_state_is_copied(rig: Rig) -> None:
    rig.go.clear()
    array = np.ones(3)
    info = rig.write(20, {"a": array})
    array[:] = 0
    assert (info.staged, info.committed, info.done) == (True, False, False)
    assert info.path.endswith("-a0"), "known before it is written"
    rig.go.set()
    assert info.wait(LIMIT_S) is info
    assert info.committed
    checkpoint = rig.catalog.all()[0]
    assert (info.path, info.id) == (checkpoint.path, checkpoint.id)
    loaded = load(
        rig.storage,
        rig.catalog.folder(checkpoint),
        manifest_digest=checkpoint.manifest_digest,
        rank=0,
    )
    assert loaded.saved.value(loaded.saved.tree)["a"].tolist() == [1, 1, 1]
    assert loaded.saved.rng is not None


def test_at_most_two_are_in_flight_then_write_blocks(rig: Rig) -> None:
    rig.go.clear()
    rig.write(20)
    rig.write(40)
    third = threading.Event()

    def write_a_third() -> None:
        rig.write(60)
        third.set()

    thread = threading.Thread(target=write_a_third)
    thread.start()
    assert rig.waiting.wait(LIMIT_S)
    assert not third.wait(0.05)
    rig.go.set()
    assert third.wait(LIMIT_S)
    thread.join(LIMIT_S)
    rig.writer.wait_until_finished(LIMIT_S)
    assert rig.steps() == [20, 40, 60]


def test_an_error_is_raised_by_the_next_write_and_only_once(rig: Rig) -> None:
    rig.full.add(20)
    info = rig.write(20)
    rig.writer.settle()
    assert isinstance(info.error, StorageError)
    with pytest.raises(StorageError, match="disk full"):
        rig.write(40)
    rig.write(40).wait(LIMIT_S)
    assert rig.steps() == [40]


def test_an_error_is_raised_by_check_for_errors_or_wait_until_finished(rig: Rig) -> None:
    rig.full |= {20, 40}
    rig.write(20)
    with pytest.raises(StorageError):
        rig.writer.wait_until_finished(LIMIT_S)
    rig.writer.check_for_errors()
    rig.write(40)
    rig.writer.settle()
    with pytest.raises(StorageError):
        rig.writer.check_for_errors()


def test_an_error_that_wait_raised_is_not_raised_again(rig: Rig) -> None:
    rig.full.add(20)
    with pytest.raises(StorageError):
        rig.write(20).wait(LIMIT_S)
    rig.writer.check_for_errors()


def test_two_errors_are_told_together(rig: Rig) -> None:
    rig.full |= {20, 40}
    rig.go.clear()
    rig.write(20)
    rig.write(40)
    rig.go.set()
    with pytest.raises(StorageError) as caught:
        rig.writer.wait_until_finished(LIMIT_S)
    assert "step 40 failed as well" in caught.value.__notes__[0]
    rig.writer.check_for_errors()


def test_close_waits_and_raises() -> None:
    rig = Rig()
    rig.full.add(40)
    rig.write(20)
    rig.write(40)
    with pytest.raises(StorageError):
        rig.writer.close()
    rig.writer.close()
    assert rig.steps() == [20]
    with pytest.raises(ConfigError, match="closed"):
        rig.write(60)


def test_a_failed_step_may_be_saved_again(rig: Rig) -> None:
    rig.full.add(20)
    with pytest.raises(StorageError):
        rig.write(20).wait(LIMIT_S)
    rig.full.clear()
    rig.write(20).wait(LIMIT_S)
    assert rig.steps() == [20]
    assert [saved.step if saved else None for saved in rig.after] == [None, 20]


def test_what_cannot_be_saved_is_an_error_at_once_and_costs_no_arena(rig: Rig) -> None:
    for _ in range(5):
        with pytest.raises(CheckpointError, match="key"):
            rig.write(20, {"key": object()})
    rig.write(20).wait(LIMIT_S)


def test_a_save_can_be_cancelled_while_it_is_written(rig: Rig) -> None:
    rig.go.clear()
    info = rig.write(20, {"a": np.ones(1000)})
    assert rig.waiting.wait(LIMIT_S)
    assert info.cancel()
    rig.go.set()
    with pytest.raises(CheckpointAborted, match="cancelled"):
        info.wait(LIMIT_S)
    assert rig.steps() == []
    done = rig.write(40)
    done.wait(LIMIT_S)
    assert not done.cancel()


def test_waiting_has_a_limit(rig: Rig) -> None:
    rig.go.clear()
    info = rig.write(20)
    with pytest.raises(Unavailable, match="step 20 is not done"):
        info.wait(0.01)
    with pytest.raises(Unavailable, match="1 saves"):
        rig.writer.wait_until_finished(0.01)
    rig.go.set()
    info.wait(LIMIT_S)


def test_an_error_of_what_follows_a_save_is_raised_too() -> None:
    def broken(saved: CheckpointMetadata | None) -> None:
        raise StorageError("old checkpoints cannot be removed")

    rig = Rig(after_save=broken)
    info = rig.write(20)
    with pytest.raises(StorageError, match="cannot be removed"):
        rig.writer.wait_until_finished(LIMIT_S)
    assert info.committed
    rig.write(40)
    with pytest.raises(StorageError):
        rig.writer.close()
    assert rig.steps() == [20, 40]


def test_an_error_of_another_kind_is_told_as_one_of_ours(rig: Rig) -> None:
    def broken(info: CheckpointInfo) -> None:
        raise ZeroDivisionError("in a progress callback")

    info = rig.writer.write({"a": np.ones(1)}, SaveRequest(step=20), progress=broken)
    with pytest.raises(CheckpointError, match="in a progress callback") as caught:
        info.wait(LIMIT_S)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_program_that_fails_waits_no_longer_than_it_may() -> None:
    rig = Rig(failing_patience_s=0.05)
    rig.go.clear()
    rig.write(20)
    with pytest.raises(Unavailable, match="left unfinished"):
        rig.writer.close(failing=True)
    rig.go.set()


def test_a_forked_child_is_refused(rig: Rig) -> None:
    rig.write(20).wait(LIMIT_S)
    child = os.fork()
    if child == 0:
        try:
            rig.write(40)
        except ConfigError as error:
            os._exit(0 if "forked" in str(error) else 3)
        os._exit(4)
    assert os.waitpid(child, 0)[1] == 0


# -- when two are in flight already -----------------------------------------------------------


def full(**options: Any) -> tuple[Rig, CheckpointInfo, CheckpointInfo]:
    """Return a rig with one save that is being written, and one that waits."""
    rig = Rig(**options)
    rig.go.clear()
    first = rig.write(20)
    assert rig.waiting.wait(LIMIT_S)
    return rig, first, rig.write(40)


def test_a_newer_save_takes_the_place_of_the_one_that_has_not_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, first, second = full(when_full=WhenFull.DROP)
    third = rig.write(60)
    assert second.dropped
    with pytest.raises(CheckpointAborted, match="dropped to make room: step 60 took its place"):
        second.wait(LIMIT_S)
    rig.go.set()
    rig.writer.close()
    assert first.committed
    assert third.committed
    assert rig.steps() == [20, 60]
    assert "the save of step 40 was dropped" in caplog.text


def test_a_dropped_save_is_no_failure_for_the_next_one_to_raise() -> None:
    rig, _, second = full(when_full=WhenFull.DROP)
    rig.write(60)
    assert second.done
    rig.writer.check_for_errors()
    rig.go.set()
    rig.writer.wait_until_finished(LIMIT_S)
    rig.write(40).wait(LIMIT_S)
    rig.writer.close()
    assert rig.steps() == [20, 40, 60]


def test_a_save_may_fail_instead_of_waiting() -> None:
    rig, *_ = full(when_full=WhenFull.FAIL)
    with pytest.raises(CheckpointError, match="step 60 is not saved: 2 saves are in flight") as caught:
        rig.write(60)
    assert "save less often" in caught.value.hint
    rig.go.set()
    rig.writer.close()
    assert rig.steps() == [20, 40]


class Pair:
    """Two ranks with a writer each; rank 0's storage can be held up."""

    def __init__(self, when_full: WhenFull) -> None:
        self.shared = SharedCatalog(2)
        self.rigs = [Rig(when_full=when_full) for _ in range(2)]
        self.writers = []
        storage = self.rigs[0].storage
        for rank, rig in enumerate(self.rigs):
            saver = Saver(storage=storage, catalog=self.shared.of(rank), commit_timeout_s=LIMIT_S)
            self.writers.append(AsyncCheckpointWriter(saver, when_full=when_full))
            rig.writer.close()

    def state_of(self, step: int) -> CheckpointState:
        return self.shared.records[step].state


@pytest.mark.parametrize("when_full", [WhenFull.DROP, WhenFull.FAIL])
def test_what_one_rank_does_not_save_is_given_up_for_all(when_full: WhenFull) -> None:
    pair = Pair(when_full)
    slow, quick = pair.writers
    held = pair.rigs[0]
    held.go.clear()
    infos = {(0, step): slow.write({"a": step}, SaveRequest(step=step)) for step in (20, 40)}
    assert held.waiting.wait(LIMIT_S)
    if when_full is WhenFull.DROP:
        infos[0, 60] = slow.write({"a": 60}, SaveRequest(step=60))
        lost, kept = 40, 60
    else:
        with pytest.raises(CheckpointError, match="not saved"):
            slow.write({"a": 60}, SaveRequest(step=60))
        lost, kept = 60, 40
    assert pair.state_of(lost) is CheckpointState.ABORTED, "on record before anything is freed"
    held.go.set()
    for step in (20, 40, 60):
        infos[1, step] = quick.write({"a": step}, SaveRequest(step=step))
        quick.settle()
    slow.settle()
    assert infos[1, lost].dropped
    for rank in (0, 1):
        assert infos[rank, 20].committed
        assert infos[rank, kept].committed
    quick.close()
    slow.close()


@pytest.mark.parametrize("fails", ["copy", "earlier", "device"])
def test_a_save_that_does_not_begin_on_one_rank_is_given_up_for_all(
    monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    pair = Pair(WhenFull.BLOCK)
    broken, sound = pair.writers
    other = sound.write({"a": 1}, SaveRequest(step=20))
    if fails == "device":
        bad = SimpleNamespace(wait=lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
        monkeypatch.setattr("strata.checkpoint.writer.take_snapshot", _with_pending(bad))
        broken.write({"a": 1}, SaveRequest(step=20))
        said = "rank 0: device lost"
    elif fails == "copy":
        with pytest.raises(CheckpointError, match="unsavable"):
            broken.write({"unsavable": object()}, SaveRequest(step=20))
        said = "rank 0: unsavable"
    else:
        broken._untold.trouble(StorageError("no room to tidy"))
        with pytest.raises(StorageError, match="no room"):
            broken.write({"a": 1}, SaveRequest(step=20))
        said = "dropped: rank 0 was told of an earlier error: no room to tidy"
    with pytest.raises(CheckpointAborted, match=said):
        other.wait(LIMIT_S)
    assert other.dropped is (fails == "earlier"), "it is no failure of its own"
    broken.settle()
    monkeypatch.undo()
    again = [writer.write({"a": 1}, SaveRequest(step=20)) for writer in _told(broken, sound)]
    for info in again:
        info.wait(LIMIT_S)
    for writer in pair.writers:
        writer.close()


def _told(*writers: AsyncCheckpointWriter) -> tuple[AsyncCheckpointWriter, ...]:
    """Return writers whose errors have been raised."""
    for writer in writers:
        with contextlib.suppress(CheckpointError):
            writer.check_for_errors()
    return writers


def _with_pending(pending: Any) -> Callable[..., Snapshot]:
    return lambda *args, **named: dataclasses.replace(take_snapshot(*args, **named), pending=pending)


def test_nothing_is_freed_while_nobody_takes_note_of_the_drop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for it, so it is saved after all, and the newer one waits."""
    rig, _, second = full(when_full=WhenFull.DROP)

    def nobody(self: Saver, request: SaveRequest, reason: str) -> None:
        rig.go.set()
        raise Unavailable("nobody is there")

    monkeypatch.setattr(Saver, "give_up", nobody)
    third = rig.write(60)
    rig.writer.close()
    assert second.committed
    assert third.committed


# -- little memory ----------------------------------------------------------------------------


def test_with_little_memory_write_returns_when_the_state_is_written() -> None:
    rig = Rig(low_memory=True)
    rig.go.clear()
    array, returned = np.arange(100_000.0), threading.Event()
    infos = []

    def write() -> None:
        infos.append(rig.write(20, {"a": array, "strided": array[::2], "raw": b"bytes", "none": array[:0]}))
        array[:] = 0
        returned.set()

    thread = threading.Thread(target=write)
    thread.start()
    assert rig.waiting.wait(LIMIT_S)
    assert not returned.wait(0.05)
    rig.go.set()
    assert returned.wait(LIMIT_S)
    thread.join(LIMIT_S)
    infos[0].wait(LIMIT_S)
    (checkpoint,) = rig.catalog.all()
    folder, proof = rig.catalog.folder(checkpoint), checkpoint.manifest_digest
    saved = load(rig.storage, folder, manifest_digest=proof, rank=0).saved
    state = saved.value(saved.tree)
    assert np.array_equal(state["a"], np.arange(100_000.0))
    assert np.array_equal(state["strided"], np.arange(100_000.0)[::2])
    assert (state["raw"], state["none"].shape) == (b"bytes", (0,))
    rig.writer.close()


def test_with_little_memory_an_error_ends_the_wait() -> None:
    rig = Rig(low_memory=True)
    rig.full.add(20)
    info = rig.write(20)
    assert isinstance(info.error, StorageError)
    with pytest.raises(StorageError, match="disk full"):
        rig.writer.close()


def test_memory_can_be_ready_before_the_first_save(rig: Rig) -> None:
    state = {"a": np.ones(1 << 20)}
    rig.writer.prepare(state)
    before = [arena.take(1) for arena in rig.writer._arenas]
    addresses = {address_of(view) for view in before}
    rig.write(20, state).wait(LIMIT_S)
    assert {address_of(arena.take(8 << 20)) for arena in rig.writer._arenas} == addresses


def test_an_error_that_each_rank_is_told_later_fails_no_save_after_it() -> None:
    pair = Pair(WhenFull.BLOCK)
    one, other = pair.writers

    def write(writer: AsyncCheckpointWriter, step: int, value: Any = 1) -> CheckpointInfo:
        return writer.write({"a": value}, SaveRequest(step=step))

    with pytest.raises(CheckpointError, match="cannot be saved"):
        write(one, 20, object())
    one.settle()
    write(other, 20)
    other.settle()
    with pytest.raises(CheckpointAborted, match="cannot be saved"):
        write(other, 40)
    other.settle()
    dropped = write(one, 40)
    one.settle()
    assert dropped.dropped
    for info in [write(writer, 60) for writer in (one, other)]:
        info.wait(LIMIT_S)
    one.close()
    other.close()


def test_where_no_thread_can_be_started_for_a_while_errors_are_raised_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    rig.full.add(20)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert rig.write(10).committed
        info = rig.write(20)
    assert info.done
    with pytest.raises(StorageError, match="disk full"):
        rig.write(30)
    assert capsys.readouterr().err == ""
    rig.write(40).wait(LIMIT_S)
    assert rig.steps() == [10, 40]
