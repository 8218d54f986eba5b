"""No rank may wait forever at a common step, or longer than its grace."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.save.handle import CheckpointInfo
from strata.core.stop.last_step import CLOSING_BARRIER
from strata.errors import CheckpointAborted, Preempted, StaleGeneration
from strata.training.save import saves
from strata.training.save.cadence import Pace, payload_of
from strata.training.settings_agreement import LOADER_BARRIER
from strata.training.stop.stopper import HELD_S
from strata.v1.worlds_pb2 import (
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
)
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import (
    LENGTH,
    Trainer,
    decided,
    holding,
    in_first_step,
    joined,
    others_agree,
    proposes,
)


@pytest.fixture(autouse=True)
def _reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="strata.training")


@pytest.mark.parametrize("agreed", [False, True])
def test_a_leaving_rank_exits_at_its_deadline_even_if_other_ranks_are_missing(
    agreed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The other ranks or all coordinators are lost: the rank waits for their answer, or waits at the save."""
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(STOP_ACTION_PREEMPT, grace_s=30.0)
    if agreed:
        others_agree(room, 1)
        decided(trainer)
    else:
        proposes(room, 1)
        holding(trainer)
    end.set()
    trainer.clock_s = 29.5
    assert reported(caplog, "the grace is nearly over")
    assert trainer.is_alive()
    trainer.clock_s = 30.0
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert f"THE SAVE OF STEP {trainer.run_.step} IS SKIPPED" in caplog.text
    assert trainer.context.left == (75, "a test asks")


def test_a_process_stuck_in_a_step_is_ended_soon_after_its_deadline(
    tmp_path: Path,
) -> None:
    """The trainer evaluates, or hangs in a collective with a departed rank, and may have no agent that would end it."""
    room = Room(1)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(STOP_ACTION_PREEMPT, grace_s=30.0)
    trainer.clock_s = 30.0 + HELD_S - 1.0
    assert not trainer.left_now.wait(0.6)
    trainer.clock_s = 30.0 + HELD_S
    assert trainer.left_now.wait(LIMIT_S)
    end.set()
    joined([trainer])


def reported(caplog: pytest.LogCaptureFixture, text: str) -> bool:
    deadline = time.monotonic() + LIMIT_S
    while text not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    return text in caplog.text


def test_the_shortest_grace_of_several_notices_applies(tmp_path: Path) -> None:
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(STOP_ACTION_SCALE, grace_s=60.0)
    others_agree(room, 1)
    decided(trainer)
    end.set()
    trainer.clock_s = 1000.0
    room.notice(STOP_ACTION_PREEMPT, grace_s=600.0)
    room.notice(STOP_ACTION_PREEMPT, grace_s=10.0)
    time.sleep(0.3)
    assert trainer.is_alive()
    trainer.clock_s = 1010.0
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)


def test_a_failed_common_save_fails_the_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank fails so that the other ranks need not wait for its part.

    If it gave up the step instead, the leader would detect it.
    """
    room = Room(1)
    trainer, end = in_first_step(room, tmp_path)

    def fails(*arguments: Any, **more: Any) -> None:
        raise MemoryError("out of pinned memory")

    monkeypatch.setattr(trainer.run_.checkpoints, "save_state", fails)
    room.notice(STOP_ACTION_SCALE)
    end.set()
    joined([trainer])
    assert isinstance(trainer.ended_by, MemoryError)


def test_a_remaining_rank_whose_save_is_aborted_waits_for_the_next_world(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(1)
    trainer, end = in_first_step(room, tmp_path)

    def aborted(*arguments: Any, **more: Any) -> None:
        raise CheckpointAborted("another rank gave it up")

    monkeypatch.setattr(trainer.run_.checkpoints, "save_state", aborted)
    room.notice(STOP_ACTION_SCALE)
    end.set()
    assert reported(caplog, "IS SKIPPED: another rank gave it up")
    assert trainer.is_alive()
    room.next_world()
    joined([trainer])
    assert isinstance(trainer.ended_by, StaleGeneration)


def test_a_hanging_storage_does_not_delay_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the common save, which has no buffer, nor the end of the run waits for a save that never ends."""
    room = Room(1)
    hangs, over = threading.Event(), threading.Event()

    def held(info: CheckpointInfo) -> None:
        hangs.set()
        over.wait()

    def requested_in_the_second_step(step: int) -> None:
        if step == 2:
            assert hangs.wait(LIMIT_S)
            trainer.run_.saves.plan = replace(trainer.run_.saves.plan, step=10**9)
            room.notice(STOP_ACTION_PREEMPT, grace_s=0.5)
            decided(trainer)
            threading.Timer(0.5, lambda: setattr(trainer, "clock_s", 1.0)).start()

    trainer = Trainer(room, 0, tmp_path, save_every_steps=1, before_step=requested_in_the_second_step)
    save_state = trainer.run_.checkpoints.save_state
    monkeypatch.setattr(
        trainer.run_.checkpoints, "save_state", lambda state, **more: save_state(state, progress=held, **more)
    )
    trainer.start()
    try:
        joined([trainer])
    finally:
        over.set()
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.saved() == []
    assert "IS SKIPPED: Unavailable: saves in flight" in caplog.text
    assert trainer.context.left == (75, "a test asks")


@pytest.mark.parametrize("act", ["save_state", "close"])
def test_a_leaving_rank_exits_with_75_even_if_its_save_fails(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The save may fail for lack of memory, say: the scheduler must still see the exit code of a preemption."""
    room = Room(1)
    trainer, end = in_first_step(room, tmp_path)

    def fails(*arguments: Any, **more: Any) -> None:
        raise MemoryError("out of pinned memory")

    monkeypatch.setattr(trainer.run_.checkpoints, act, fails)
    room.notice(STOP_ACTION_PREEMPT)
    decided(trainer)
    end.set()
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.context.left == (75, "a test asks")
    lost = (
        f"the save of step {trainer.run_.step} failed" if act == "save_state" else "a save was lost as well"
    )
    assert [record.message for record in caplog.records if record.exc_info] == [lost]
    assert (f"THE SAVE OF STEP {trainer.run_.step} IS SKIPPED" in caplog.text) == (act == "save_state")


def test_the_end_of_a_run_is_reported_before_its_session_ends(tmp_path: Path) -> None:
    """The process may evaluate after `close()`. Until the process ends, its agent gets no further report."""
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path, steps=1, closes=True, save_every_steps=1)
    left, order = threading.Event(), []
    barrier, close = trainer.context.barrier, trainer.context.close

    def slow(name: str, *arguments: Any, **more: Any) -> Any:
        if name == CLOSING_BARRIER:
            left.wait(0.2)
            order.append("said")
        return barrier(name, *arguments, **more)

    def closed(**reported: Any) -> None:
        order.append("left")
        left.set()
        close(**reported)

    trainer.context.barrier, trainer.context.close = slow, closed  # type: ignore[method-assign]
    trainer.start()
    joined([trainer])
    assert (trainer.ended_by, order) == (None, ["said", "left"])


def test_a_process_that_can_start_no_threads_at_exit_still_closes_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(Room(1), 0, tmp_path)
    trainer.run_.step_done()

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr("strata.training.stop.stopper.threading.Thread.start", none)
    trainer.run_.close()
    assert trainer.context.left == (0, "the training is done")
    assert trainer.saved() == [1]


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_about_to_end_announces_it(saved: bool, tmp_path: Path) -> None:
    """This rank waits for a rank that evaluates for long; meanwhile the leader must form no other world."""
    room = Room(2)
    room.rounds[LOADER_BARRIER, 1] = {1: LENGTH}
    trainer = Trainer(room, 0, tmp_path, steps=1, closes=True, save_every_steps=int(saved))
    if saved:
        room.rounds[saves.SAVE_BARRIER, 1] = {1: payload_of(Pace())}
    trainer.start()
    with room.changed:
        assert room.changed.wait_for(lambda: (CLOSING_BARRIER, 1) in room.rounds, LIMIT_S)
    if not saved:
        room.rank(1).barrier(saves.SAVE_BARRIER, payload_of(Pace()))
    joined([trainer])
    assert (trainer.ended_by, trainer.context.left) == (None, (0, "the training is done"))
