"""A save that begins while two others are in flight (`when_full`), and its reports to the other ranks."""

import contextlib
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from strata.checkpoint.catalog.protocol import SaveRequest
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.save.writer import AsyncCheckpointWriter, WhenFull
from strata.checkpoint.snapshot.snapshot import Snapshot, take_snapshot
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointAborted, CheckpointError, StorageError, Unavailable
from tests.unit.checkpoint.writer_rig import LIMIT_S, Pair, full


def test_a_newer_save_replaces_the_one_that_has_not_begun(
    caplog: pytest.LogCaptureFixture,
) -> None:
    rig, first, second = full(when_full=WhenFull.DROP)
    third = rig.write(60)
    assert second.dropped
    with pytest.raises(CheckpointAborted, match="dropped to make room: step 60 took its place"):
        second.wait(LIMIT_S)
    rig.go.set()
    rig.writer.wait_until_finished(LIMIT_S)  # a dropped save is no failure: nothing is raised
    assert first.committed
    assert third.committed
    assert rig.steps() == [20, 60]
    rig.write(40)
    rig.writer.close()
    assert rig.steps() == [20, 40, 60]
    assert "the save of step 40 was dropped" in caplog.text


def test_a_save_may_fail_instead_of_waiting() -> None:
    rig, *_ = full(when_full=WhenFull.FAIL)
    with pytest.raises(CheckpointError, match="step 60 is not saved: 2 saves are in flight"):
        rig.write(60)
    rig.go.set()
    rig.writer.close()
    assert rig.steps() == [20, 40]


@pytest.mark.parametrize("when_full", [WhenFull.DROP, WhenFull.FAIL])
def test_a_save_that_one_rank_drops_or_refuses_is_aborted_for_all(when_full: WhenFull) -> None:
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
    if fails == "earlier":
        pair.rigs[0].storage.fault = _full_for_rank_0  # both ranks' parts go to that storage
        for writer in pair.writers:
            writer.write({"a": 1}, SaveRequest(step=10))
        for writer in pair.writers:
            writer.settle(LIMIT_S)
        _reported(sound)
    other = sound.write({"a": 1}, SaveRequest(step=20))
    if fails == "device":
        bad = SimpleNamespace(wait=lambda: (_ for _ in ()).throw(RuntimeError("device lost")))
        monkeypatch.setattr("strata.checkpoint.save.writer.take_snapshot", _with_pending(bad))
        broken.write({"a": 1}, SaveRequest(step=20))
        message = "rank 0: device lost"
    elif fails == "copy":
        with pytest.raises(CheckpointError, match="unsavable"):
            broken.write({"unsavable": object()}, SaveRequest(step=20))
        message = "rank 0: unsavable"
    else:
        with pytest.raises(StorageError, match="disk full"):
            broken.write({"a": 1}, SaveRequest(step=20))
        message = "dropped: rank 0 reported an earlier error: .*disk full"
    with pytest.raises(CheckpointAborted, match=message):
        other.wait(LIMIT_S)
    assert other.dropped is (fails == "earlier"), "it is no failure of its own"
    broken.settle()
    monkeypatch.undo()
    again = [writer.write({"a": 1}, SaveRequest(step=20)) for writer in _reported(broken, sound)]
    for info in again:
        info.wait(LIMIT_S)
    for writer in pair.writers:
        writer.close()


def _full_for_rank_0(verb: str, name: str) -> None:
    if verb == "begin" and "step-000000000010-" in name and name.endswith("rank-00000.safetensors"):
        raise StorageError("disk full")


def _reported(*writers: AsyncCheckpointWriter) -> tuple[AsyncCheckpointWriter, ...]:
    """Raise and suppress each writer's pending errors; return the writers."""
    for writer in writers:
        with contextlib.suppress(CheckpointError):
            writer.check_for_errors()
    return writers


def _with_pending(pending: Any) -> Callable[..., Snapshot]:
    return lambda *args, **named: dataclasses.replace(take_snapshot(*args, **named), pending=pending)


def test_a_save_is_not_dropped_if_the_drop_cannot_be_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks would wait for the dropped save. So the save is made after all, and the newer save waits."""
    rig, _, second = full(when_full=WhenFull.DROP)

    def nobody(self: Saver, request: SaveRequest, reason: str) -> None:
        rig.go.set()
        raise Unavailable("nobody is there")

    monkeypatch.setattr(Saver, "give_up", nobody)
    third = rig.write(60)
    rig.writer.close()
    assert second.committed
    assert third.committed


def test_an_error_that_reaches_each_rank_later_fails_no_save_after_it() -> None:
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
