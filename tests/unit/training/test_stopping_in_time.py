"""Nobody waits for ever at a common step, nor beyond its grace."""

from __future__ import annotations

import logging
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.handle import CheckpointInfo
from strata.core.reshaping import CLOSING_BARRIER
from strata.errors import Preempted
from strata.training import saves
from strata.training.alike import LOADER_BARRIER
from strata.training.cadence import Pace, payload_of
from strata.training.stopping import AGREE_BARRIER, SAVE_BARRIER
from strata.v1.worlds_pb2 import (
    STOP_ACTION_PREEMPT,
    STOP_ACTION_RESHAPE,
)
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import LENGTH, Trainer, joined, others_agree, saved_together, training


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="strata.training")


@pytest.mark.parametrize("how", ["it is done", "nobody hears of it any more", "it never answers"])
def test_who_waits_for_another_world_trains_on_when_none_follows(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank is done with its loop before the common step, or all coordinators are lost."""
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path, steps=3000, word_s=0.1)
    room.notice(STOP_ACTION_RESHAPE, grace_s=0.5)
    if how == "it never answers":
        room.rank(1).barrier(AGREE_BARRIER, b'{"v":1,"attempt":1,"begun":0}')
        with room.changed:
            assert room.changed.wait_for(lambda: (AGREE_BARRIER, 2) in room.rounds, LIMIT_S)
    else:
        others_agree(room, 1)
        with trainer.stopper._changed:
            assert trainer.stopper._changed.wait_for(lambda: trainer.stopper._agreement.agreed, LIMIT_S)
    threading.Thread(target=room.rank(1).barrier, args=(LOADER_BARRIER, LENGTH), daemon=True).start()
    trainer.start()
    if how == "it is done":
        room.leave(1)
    joined([trainer])
    assert (trainer.ended_by, trainer.run_.step) == (None, 3000)
    assert "training goes on from step" in caplog.text


def test_who_gave_up_waiting_is_asked_to_leave_all_the_same(tmp_path: Path) -> None:
    """The ranks agree anew, for what was agreed before is over."""
    room = Room(2)
    trainers, _ = training(room, tmp_path, word_s=0.1)
    room.notice(STOP_ACTION_RESHAPE, grace_s=0.0)
    assert saved_together(room)
    for trainer in trainers:
        with trainer.stopper._changed:
            given_up = trainer.stopper._changed.wait_for(
                lambda it=trainer.stopper: it._agreement.agreed is None,  # type: ignore[misc]
                LIMIT_S,
            )
            assert given_up
    room.notice(STOP_ACTION_PREEMPT)
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, Preempted)
        assert trainer.saved()[-1:] == [trainer.run_.step]


def test_who_is_asked_to_leave_just_as_it_gives_up_waiting_does_so(tmp_path: Path) -> None:
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path, word_s=0.1)
    has_to_leave = trainer.stopper._has_to_leave

    def asked_then(step: int) -> bool:
        leaves = has_to_leave(step)
        if not leaves:
            room.notice(STOP_ACTION_PREEMPT)
        return leaves

    trainer.stopper._has_to_leave = asked_then  # type: ignore[method-assign]  # to know when it gives up
    room.notice(STOP_ACTION_RESHAPE)
    trainer.start()
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.saved()[-1:] == [trainer.run_.step]


def test_ranks_that_do_not_come_to_the_save_in_time_are_waited_for_no_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One of them hangs after all had met at the common step."""
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path, word_s=1.0)
    room.notice(STOP_ACTION_PREEMPT, grace_s=1.0)
    others_agree(room, 1)
    left = b'{"v":1,"attempt":0,"left_ms":1000,"cost_ms":0}'
    for barrier, payload in ((LOADER_BARRIER, LENGTH), (f"{SAVE_BARRIER}.1", left)):
        threading.Thread(target=room.rank(1).barrier, args=(barrier, payload), daemon=True).start()
    trainer.start()
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert f"THE SAVE OF STEP {trainer.run_.step} IS SKIPPED: strata.save: missing" in caplog.text
    assert trainer.peers.left == (75, "a test asks")


def test_a_storage_that_hangs_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the common save, for which there is no room, nor the end waits for a save that never ends."""
    room = Room(1)
    hangs, over = threading.Event(), threading.Event()

    def held(info: CheckpointInfo) -> None:
        hangs.set()
        over.wait()

    def asked_in_the_second_step(step: int) -> None:
        if step == 2:
            assert hangs.wait(LIMIT_S)
            trainer.run_.saves.plan = replace(trainer.run_.saves.plan, step=10**9)
            room.notice(STOP_ACTION_PREEMPT, grace_s=0.5)
            with trainer.stopper._changed:
                assert trainer.stopper._changed.wait_for(lambda: trainer.stopper._agreement.agreed, LIMIT_S)

    trainer = Trainer(room, 0, tmp_path, word_s=1.0, save_every_steps=1, before_step=asked_in_the_second_step)
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
    assert "IS SKIPPED: 1 saves are not done after" in caplog.text
    assert trainer.peers.left == (75, "a test asks")


@pytest.mark.parametrize("act", ["save_state", "close"])
def test_whatever_a_save_fails_of_who_is_to_leave_leaves_with_75(
    act: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of memory, say: the scheduler is to hear of the preemption all the same."""
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path)

    def fails(*arguments: Any, **more: Any) -> None:
        raise MemoryError("out of pinned memory")

    monkeypatch.setattr(trainer.run_.checkpoints, act, fails)
    room.notice(STOP_ACTION_PREEMPT)
    trainer.start()
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.peers.left == (75, "a test asks")
    lost = (
        f"the save of step {trainer.run_.step} failed" if act == "save_state" else "a save was lost as well"
    )
    assert [record.message for record in caplog.records if record.exc_info] == [lost]
    assert (f"THE SAVE OF STEP {trainer.run_.step} IS SKIPPED" in caplog.text) == (act == "save_state")


def test_that_a_run_ends_is_said_before_its_session_ends(tmp_path: Path) -> None:
    """Its process may evaluate after `close()`, and its supervisor hears of nothing until that is over."""
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path, steps=1, closes=True, save_every_steps=1)
    left, order = threading.Event(), []
    barrier, close = trainer.peers.barrier, trainer.peers.close

    def slow(name: str, *arguments: Any, **more: Any) -> Any:
        if name == CLOSING_BARRIER:
            left.wait(0.2)
            order.append("said")
        return barrier(name, *arguments, **more)

    def closed(**told: Any) -> None:
        order.append("left")
        left.set()
        close(**told)

    trainer.peers.barrier, trainer.peers.close = slow, closed  # type: ignore[method-assign]
    trainer.start()
    joined([trainer])
    assert (trainer.ended_by, order) == (None, ["said", "left"])


def test_a_process_that_ends_and_has_no_new_threads_closes_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(Room(1), 0, tmp_path)
    trainer.run_.step_done()

    def none(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread at interpreter shutdown")

    monkeypatch.setattr("strata.training.stopping.threading.Thread.start", none)
    trainer.run_.close()
    assert trainer.peers.left == (0, "the training is done")
    assert trainer.saved() == [1]


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_that_is_about_to_end_says_so(saved: bool, tmp_path: Path) -> None:
    """A rank that waits for another, which evaluates for long: no world is to follow, whenever one could."""
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
    assert (trainer.ended_by, trainer.peers.left) == (None, (0, "the training is done"))
