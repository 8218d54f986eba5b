"""`Stopper`: ranks that train on while they agree, stop after one step, save it or say why not."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.handle import CheckpointInfo
from strata.errors import Preempted, StaleGeneration
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_RESHAPE,
    StopNotice,
)
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import Trainer, joined, saved_together, training


@pytest.fixture(autouse=True)
def _told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="strata.training")


@pytest.mark.parametrize("action", [STOP_ACTION_PREEMPT, STOP_ACTION_PAUSE])
def test_all_ranks_stop_after_one_step_save_it_and_leave_with_75(action: Any, tmp_path: Path) -> None:
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(action)
    steps = {trainer.run_.step for trainer in joined(trainers)}
    assert len(steps) == 1
    step = steps.pop()
    for trainer in trainers:
        assert isinstance(trainer.ended_by, Preempted)
        assert (trainer.ended_by.code, trainer.ended_by.message) == (
            75,
            f"stopped after step {step}: a test asks",
        )
        assert trainer.saved() == [step]
        assert trainer.peers.left == (75, "a test asks")
        assert trainer.stopper.leaving


def test_a_step_that_is_saved_anyhow_is_not_saved_again_and_is_waited_for(tmp_path: Path) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path, save_every_steps=1)
    room.notice(STOP_ACTION_PREEMPT)
    joined(trainers)
    assert all(trainer.saved()[-1] == trainer.run_.step for trainer in trainers)


def test_a_rank_that_hears_late_stops_where_the_others_do(tmp_path: Path) -> None:
    """While it is deaf the others train on: nobody waits before there is a step to hold at."""
    room = Room(2)
    room.deaf = {1}
    trainers, met = training(room, tmp_path)
    notice = room.notice(STOP_ACTION_PREEMPT)
    heard_at = trainers[0].run_.step
    reached = threading.Event()

    def far() -> None:
        if trainers[0].run_.step > heard_at + 50:
            reached.set()

    met._action = far  # type: ignore[attr-defined]  # called in each step, by the last to come
    assert reached.wait(LIMIT_S)
    room.hear(1, notice)
    joined(trainers)
    assert trainers[0].run_.step == trainers[1].run_.step > heard_at + 50
    assert all(trainer.saved() == [trainer.run_.step] for trainer in trainers)


@pytest.mark.parametrize(
    ("grace_s", "cost_s", "said"),
    [(30.0, 31.0, "a save takes about 31.0 s, and 30.0 s are left"), (0.0, 0.0, "no time is left to save")],
)
def test_a_save_that_cannot_be_done_in_time_is_skipped_aloud(
    grace_s: float, cost_s: float, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path, cost_s=cost_s)
    room.notice(STOP_ACTION_PREEMPT, grace_s=grace_s)
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, Preempted)
        assert trainer.saved() == []
        assert f"THE SAVE OF STEP {trainer.run_.step} IS SKIPPED: {said}" in caplog.text
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2


def test_all_skip_the_save_that_one_has_no_time_for(tmp_path: Path) -> None:
    room = Room(2)
    room.deaf = {0}
    trainers, _ = training(room, tmp_path)
    notice = room.notice(STOP_ACTION_PREEMPT, grace_s=10.0)
    trainers[1].clock_s = 11.0
    room.hear(0, notice)
    joined(trainers)
    assert [trainer.saved() for trainer in trainers] == [[], []]


def test_a_save_that_does_not_commit_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its commit is held up until somebody gives it up: nobody but the stop does."""
    room = Room(1)
    (trainer,) = trainers = [Trainer(room, 0, tmp_path)]

    def held(info: CheckpointInfo) -> None:
        assert info.cancelled.wait(LIMIT_S)

    save_state = trainer.run_.checkpoints.save_state

    def slow(state: Any, **more: Any) -> CheckpointInfo:
        trainer.clock_s = 29.95  # the grace is nearly over
        return save_state(state, progress=held, **more)

    monkeypatch.setattr(trainer.run_.checkpoints, "save_state", slow)
    trainer.start()
    trainer.stopper.asked(room.notice(STOP_ACTION_PREEMPT, grace_s=30.0))
    joined(trainers)
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.saved() == []
    assert "IS SKIPPED: the save of step" in caplog.text


def test_only_who_is_drained_leaves_and_the_others_wait_for_the_next_world(tmp_path: Path) -> None:
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_DRAIN, workers=["w1"])
    trainers[1].join(LIMIT_S)
    assert isinstance(trainers[1].ended_by, Preempted)
    assert all(trainer.is_alive() for trainer in (trainers[0], trainers[2]))
    room.next_world()
    joined(trainers)
    for trainer in (trainers[0], trainers[2]):
        assert isinstance(trainer.ended_by, StaleGeneration)
        assert trainer.run_.step == trainers[1].run_.step
        assert not trainer.stopper.leaving
        assert trainer.saved() == [trainer.run_.step]


def test_who_is_drained_while_it_waits_for_the_next_world_leaves_as_well(tmp_path: Path) -> None:
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_DRAIN, workers=["w1"])
    trainers[1].join(LIMIT_S)
    room.notice(STOP_ACTION_DRAIN, workers=["w1", "w2"])
    room.hear(2, StopNotice(generation=1, action=STOP_ACTION_DRAIN, worker_ids=["w1"]))  # it comes late
    trainers[2].join(LIMIT_S)
    assert isinstance(trainers[2].ended_by, Preempted)
    assert trainers[2].stopper.leaving
    assert trainers[2].run_.step == trainers[1].run_.step
    assert trainers[0].is_alive()
    room.notice(STOP_ACTION_PREEMPT)
    joined(trainers)
    assert isinstance(trainers[0].ended_by, Preempted)


@pytest.mark.parametrize(
    ("action", "workers", "grace_s", "covers"),
    [
        (STOP_ACTION_PREEMPT, [], 20.0, True),
        (STOP_ACTION_PREEMPT, [], 31.0, False),
        (STOP_ACTION_PAUSE, [], 30.0, True),
        (STOP_ACTION_DRAIN, ["w0"], 30.0, True),
        (STOP_ACTION_DRAIN, ["w1"], 30.0, False),
        (STOP_ACTION_RESHAPE, [], 30.0, False),
    ],
)
def test_whether_a_notice_is_all_that_could_be_asked_for(
    action: Any, workers: list[str], grace_s: float, covers: bool, tmp_path: Path
) -> None:
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path)
    assert not trainer.stopper.covers(grace_s=30.0)
    room.notice(action, workers=workers, grace_s=grace_s)
    assert trainer.stopper.covers(grace_s=30.0) is covers
    room.next_world()


def test_before_a_world_of_another_size_all_save_and_wait_for_it(tmp_path: Path) -> None:
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_RESHAPE)
    assert saved_together(room)
    assert all(trainer.is_alive() for trainer in trainers)
    room.next_world()
    steps = {trainer.run_.step for trainer in joined(trainers)}
    assert len(steps) == 1
    for trainer in trainers:
        assert isinstance(trainer.ended_by, StaleGeneration)
        assert trainer.saved() == list(steps)
        assert not trainer.stopper.leaving


def test_that_nothing_could_be_saved_is_said_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The world that follows is not held up by a save that nobody makes."""
    room = Room(2)
    trainers, _ = training(room, tmp_path, cost_s=61.0)
    room.notice(STOP_ACTION_RESHAPE, grace_s=60.0)
    assert saved_together(room)
    room.next_world()
    assert [trainer.saved() for trainer in joined(trainers)] == [[], []]
    assert "IS SKIPPED: a save takes about 61.0 s" in caplog.text


@pytest.mark.parametrize("when", ["before the step", "after the save"])
def test_who_is_preempted_while_a_world_is_to_follow_leaves(when: str, tmp_path: Path) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_RESHAPE)
    if when == "after the save":
        assert saved_together(room)
    room.notice(STOP_ACTION_PREEMPT)
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, Preempted)
        assert trainer.saved() == [trainer.run_.step]
        assert trainer.peers.left == (75, "a test asks")


def test_data_that_ends_before_the_common_step_ends_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(2)
    trainers = [Trainer(room, n, tmp_path, steps=1) for n in range(2)]
    room.notice(STOP_ACTION_PREEMPT)
    for trainer in trainers:
        trainer.start()
    for trainer in joined(trainers):
        assert (trainer.ended_by, trainer.run_.step) == (None, 1)


def test_a_rank_that_dies_while_others_agree_lets_them_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path, steps=2000)
    trainer.start()
    room.notice(STOP_ACTION_PREEMPT)
    room.leave(1)
    joined([trainer])
    assert (trainer.ended_by, trainer.run_.step) == (None, 2000)
    assert "no common step to stop at" in caplog.text


def test_who_holds_when_the_world_ends_is_told_so(tmp_path: Path) -> None:
    """It said "ok" and waits; the other one never answers, and the leader ends the generation."""
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path)
    trainer.start()
    room.notice(STOP_ACTION_PREEMPT)
    room.rank(1).barrier("strata.stop", b'{"v":1,"attempt":1,"begun":0}')
    with room.changed:
        held = room.changed.wait_for(lambda: ("strata.stop", 2) in room.rounds, LIMIT_S)
    assert held
    if trainer.run_.step == trainer.stopper._agreement.hold:
        assert trainer.is_alive()
    room.next_world()
    joined([trainer])
    assert isinstance(trainer.ended_by, StaleGeneration)
    assert trainer.overs == 1


def test_a_notice_of_another_generation_is_nothing(tmp_path: Path) -> None:
    room = Room(1)
    (trainer,) = [Trainer(room, 0, tmp_path, steps=3)]
    room.generation = 2
    room.notice(STOP_ACTION_PREEMPT)
    trainer.start()
    joined([trainer])
    assert (trainer.ended_by, trainer.stopper.notice) == (None, None)
