"""`Stopper`: ranks train on while they agree on a step, stop after it, and save it or report why not."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.save.handle import CheckpointInfo
from strata.core.stop.last_step import STOP_BARRIER, Agreement
from strata.errors import Preempted, StaleGeneration
from strata.training.save import saves
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
    StopNotice,
)
from tests.polling import until
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import (
    Trainer,
    decided,
    holding,
    in_first_step,
    joined,
    others_agree,
    proposes,
    training,
)


@pytest.fixture(autouse=True)
def _reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="strata.training")


def test_all_ranks_stop_after_one_step_save_it_and_leave_with_75(tmp_path: Path) -> None:
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_PREEMPT)
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
        assert trainer.context.left == (75, "a test asks")
        assert trainer.stopper.leaving


def test_a_stop_at_a_step_with_a_due_save_awaits_that_save(tmp_path: Path) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path, save_every_steps=1)
    room.notice(STOP_ACTION_PREEMPT)
    joined(trainers)
    assert all(trainer.saved()[-1] == trainer.run_.step for trainer in trainers)


def test_a_rank_that_receives_the_notice_late_stops_at_the_common_step(tmp_path: Path) -> None:
    """While rank 1 does not get the notice, rank 0 trains on: no rank waits before a step to wait at is known."""
    room = Room(2)
    room.deaf = {1}
    trainers, met = training(room, tmp_path)
    notice = room.notice(STOP_ACTION_PREEMPT)
    received_at = trainers[0].run_.step
    reached = threading.Event()

    def far() -> None:
        if trainers[0].run_.step > received_at + 50:
            reached.set()

    met._action = far  # type: ignore[attr-defined]  # the last rank to arrive calls it in each step
    assert reached.wait(LIMIT_S)
    room.hear(1, notice)
    joined(trainers)
    assert trainers[0].run_.step == trainers[1].run_.step > received_at + 50
    assert all(trainer.saved() == [trainer.run_.step] for trainer in trainers)


@pytest.mark.parametrize(
    ("grace_s", "cost_s", "printed"),
    [(30.0, 31.0, "a save takes longer than the time that is left")],
)
def test_a_save_that_exceeds_the_grace_is_skipped_with_an_error(
    grace_s: float, cost_s: float, printed: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path, cost_s=cost_s)
    room.notice(STOP_ACTION_PREEMPT, grace_s=grace_s)
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, Preempted)
        assert trainer.saved() == []
        assert f"THE SAVE OF STEP {trainer.run_.step} IS SKIPPED: {printed}" in caplog.text
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 2
    assert room.rounds.keys() & {("strata.save", 1)} == set(), "none of them comes to a save"


@pytest.mark.parametrize(
    "brings", [{"left_ms": 4000, "cost_ms": 5000}, {"can_save": False}], ids=["no time", "it cannot"]
)
def test_all_ranks_skip_a_save_that_one_rank_cannot_make(brings: Any, tmp_path: Path) -> None:
    """The save may contain a collective of all ranks: if one rank alone skipped it, the other ranks would hang."""
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(STOP_ACTION_DRAIN, workers=["w1"], grace_s=1000.0)
    other, agreement = room.rank(1), Agreement(begun=1)
    _, answer = agreement.answer(other.barrier(STOP_BARRIER, agreement.propose(**brings)), ranks=2)
    other.barrier(STOP_BARRIER, answer)
    assert decided(trainer) == 1
    end.set()
    time.sleep(0.3)
    room.next_world()
    joined([trainer])
    assert (trainer.run_.step, trainer.saved()) == (1, [])
    assert ("strata.save", 1) not in room.rounds


def test_a_save_that_does_not_commit_in_time_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit waits until the save is cancelled, and only the stop cancels it."""
    room = Room(1)
    trainer, end = in_first_step(room, tmp_path)

    def held(info: CheckpointInfo) -> None:
        trainer.clock_s = 30.0  # the grace is over
        assert info.cancelled.wait(LIMIT_S)

    save_state = trainer.run_.checkpoints.save_state

    def slow(state: Any, **more: Any) -> CheckpointInfo:
        return save_state(state, progress=held, **more)

    monkeypatch.setattr(trainer.run_.checkpoints, "save_state", slow)
    room.notice(STOP_ACTION_PREEMPT, grace_s=30.0)
    end.set()
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)
    assert trainer.saved() == []
    assert "IS SKIPPED: Unavailable: waiting for the save" in caplog.text


def test_only_the_drained_rank_leaves_and_the_others_wait_for_the_next_world(tmp_path: Path) -> None:
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


def test_only_a_remaining_rank_waits_out_an_outage_in_the_common_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, reported = Room(2), dict[int, list[bool]]()
    trainers, _ = training(room, tmp_path)
    for trainer in trainers:
        stood = reported[trainer.context.rank] = []
        monkeypatch.setattr(
            trainer.run_.checkpoints, "stand", lambda stands, stood=stood: stood.append(stands())
        )
    room.notice(STOP_ACTION_DRAIN, workers=["w1"])
    trainers[1].join(LIMIT_S)
    room.next_world()
    joined(trainers)
    assert reported == {0: [True, False], 1: [False, False]}


def test_a_rank_that_waits_for_the_common_save_reports_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that reports nothing for longer than its steps take would count as stalled and be evicted."""
    monkeypatch.setattr(saves, "REPORT_S", 0.0)
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(STOP_ACTION_SCALE)
    others_agree(room, 1)
    assert decided(trainer) == 1
    end.set()
    until(lambda: "save 0 s" in trainer.context.phases)
    room.next_world()
    joined([trainer])
    assert isinstance(trainer.ended_by, StaleGeneration)


def test_the_stopper_reports_the_common_save_until_it_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, saving = Room(1), list[bool]()
    trainer, end = in_first_step(room, tmp_path)
    wait = CheckpointInfo.wait

    def waits(info: CheckpointInfo, timeout_s: float | None = None) -> CheckpointInfo:
        saving.append(trainer.stopper.saving)
        return wait(info, timeout_s)

    monkeypatch.setattr(CheckpointInfo, "wait", waits)
    room.notice(STOP_ACTION_SCALE)
    assert decided(trainer) == 1
    end.set()
    assert saved_by_all([trainer], 1)
    room.next_world()
    joined([trainer])
    assert saving[0]
    assert not trainer.stopper.saving


def test_a_rank_drained_while_it_waits_for_the_next_world_leaves(tmp_path: Path) -> None:
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_DRAIN, workers=["w1"])
    trainers[1].join(LIMIT_S)
    room.notice(STOP_ACTION_DRAIN, workers=["w1", "w2"])
    room.hear(2, StopNotice(generation=1, action=STOP_ACTION_DRAIN, worker_ids=["w1"]))  # a late notice
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
        (STOP_ACTION_PAUSE, [], 30.0, False),
        (STOP_ACTION_DRAIN, ["w0"], 30.0, True),
        (STOP_ACTION_DRAIN, ["w1"], 30.0, False),
        (STOP_ACTION_SCALE, [], 30.0, False),
    ],
)
def test_a_notice_covers_a_request_if_this_rank_leaves_within_its_grace(
    action: Any, workers: list[str], grace_s: float, covers: bool, tmp_path: Path
) -> None:
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path)
    assert not trainer.stopper.covers(grace_s=30.0)
    room.notice(action, workers=workers, grace_s=grace_s)
    assert trainer.stopper.covers(grace_s=30.0) is covers
    room.next_world()


@pytest.mark.parametrize("action", [STOP_ACTION_SCALE, STOP_ACTION_PAUSE])
def test_ranks_that_stay_save_and_wait_in_place_for_the_next_world(action: Any, tmp_path: Path) -> None:
    """torchrun would treat an exit as a failure, and with an in-place restart the process must live on."""
    room = Room(3)
    trainers, _ = training(room, tmp_path)
    room.notice(action)
    step = decided(trainers[0])
    assert saved_by_all(trainers, step)
    assert all(trainer.is_alive() for trainer in trainers)
    room.next_world()
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, StaleGeneration)
        assert (trainer.run_.step, trainer.saved()) == (step, [step])
        assert not trainer.stopper.leaving


def saved_by_all(trainers: list[Trainer], step: int) -> bool:
    """Wait until all ranks have saved that step; return whether they did so in time."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        if all(trainer.saved() == [step] for trainer in trainers):
            return True
        time.sleep(0.02)
    return False


def test_a_save_before_another_world_has_all_the_time_it_takes(tmp_path: Path) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path, cost_s=600.0)
    room.notice(STOP_ACTION_SCALE, grace_s=60.0)
    trainers[0].clock_s = 100.0
    assert saved_by_all(trainers, decided(trainers[0]))
    room.next_world()
    joined(trainers)


@pytest.mark.parametrize("when", ["before the step", "after the save"])
def test_after_a_scale_notice_a_preemption_keeps_the_agreed_stop_step(when: str, tmp_path: Path) -> None:
    room = Room(2)
    trainers, _ = training(room, tmp_path)
    room.notice(STOP_ACTION_SCALE)
    if when == "after the save":
        assert saved_by_all(trainers, decided(trainers[0]))
    room.notice(STOP_ACTION_PREEMPT)
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, Preempted)
        assert trainer.saved() == [trainer.run_.step] == [decided(trainers[0])]
        assert trainer.context.left == (75, "a test asks")


def test_a_leaving_rank_leaves_even_if_the_next_world_forms_first(tmp_path: Path) -> None:
    """The leader ends the generation at the commit."""
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path)
    save_common = trainer.run_.save_common

    def superseded(**more: Any) -> Any:
        info = save_common(**more)
        assert info is not None
        info.wait(LIMIT_S)
        room.next_world()
        return info

    trainer.run_.save_common = superseded  # type: ignore[method-assign]  # so the test knows when the save commits
    room.notice(STOP_ACTION_PREEMPT)
    trainer.start()
    joined([trainer])
    assert isinstance(trainer.ended_by, Preempted)


def test_data_that_ends_before_the_common_step_ends_the_training(tmp_path: Path) -> None:
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path, steps=2)
    room.notice(STOP_ACTION_PREEMPT)
    other = room.rank(1)
    agreement = Agreement(begun=3)  # the other rank has more data than this rank
    _, answer = agreement.answer(other.barrier(STOP_BARRIER, agreement.propose()), ranks=2)
    other.barrier(STOP_BARRIER, answer)
    assert decided(trainer) == 3
    end.set()
    joined([trainer])
    assert (trainer.ended_by, trainer.run_.step) == (None, 2)


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


@pytest.mark.parametrize("action", [STOP_ACTION_SCALE, STOP_ACTION_PREEMPT])
def test_a_rank_holds_until_it_receives_the_outcome_of_round_1(action: Any, tmp_path: Path) -> None:
    """The coordinators fail while the outcome is on its way. However long they are down, no rank trains on."""
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(action, grace_s=1e6)
    other, _, answer = proposes(room, 1)
    step = holding(trainer)
    end.set()
    trainer.clock_s = 1e5
    time.sleep(0.6)
    assert (trainer.run_.step, trainer.run_.begun) == (step, step)
    assert trainer.is_alive()
    threading.Thread(target=other.barrier, args=(STOP_BARRIER, answer), daemon=True).start()
    assert decided(trainer) == step
    room.next_world()
    joined([trainer])


def test_a_holding_rank_ends_with_its_generation(tmp_path: Path) -> None:
    """The rank answered "ok" and waits. The other rank never answers, and the leader ends the generation."""
    room = Room(2)
    trainer, end = in_first_step(room, tmp_path)
    room.notice(STOP_ACTION_SCALE)
    proposes(room, 1)
    holding(trainer)
    end.set()
    room.next_world()
    joined([trainer])
    assert isinstance(trainer.ended_by, StaleGeneration)
    assert trainer.overs == 1


def test_a_step_that_is_longer_than_the_rounds_is_the_last_one(tmp_path: Path) -> None:
    """SIGTERM with 30 s of grace, and steps of 12 s: there is no time for another step."""
    room = Room(2)
    begun, go_on = threading.Barrier(3), threading.Event()

    def long_step(step: int) -> None:
        begun.wait(LIMIT_S)
        assert go_on.wait(LIMIT_S)

    trainers = [Trainer(room, n, tmp_path, before_step=long_step) for n in range(2)]
    for trainer in trainers:
        trainer.start()
    begun.wait(LIMIT_S)
    room.notice(STOP_ACTION_PREEMPT, grace_s=30.0)
    assert [decided(trainer) for trainer in trainers] == [1, 1]
    go_on.set()
    for trainer in joined(trainers):
        assert isinstance(trainer.ended_by, Preempted)
        assert (trainer.run_.step, trainer.saved()) == (1, [1])


def test_a_notice_of_another_generation_is_ignored(tmp_path: Path) -> None:
    room = Room(1)
    (trainer,) = [Trainer(room, 0, tmp_path, steps=3)]
    room.generation = 2
    room.notice(STOP_ACTION_PREEMPT)
    trainer.start()
    joined([trainer])
    assert (trainer.ended_by, trainer.stopper._notice) == (None, None)
