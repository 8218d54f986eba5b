"""`Stopper`: ranks that train on while they agree, stop after one step, save it or say why not."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.handle import CheckpointInfo
from strata.client.checkpoints import CheckpointManager
from strata.core.agreement import MARGIN_STEPS
from strata.core.reshaping import CLOSING_BARRIER, LAST_BARRIER, SAVED_BARRIER
from strata.errors import Preempted, StaleGeneration
from strata.training.alike import LOADER_BARRIER
from strata.training.cadence import Pace, payload_of
from strata.training.stopping import AGREE_BARRIER, SAVE_BARRIER, Stopper
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_RESHAPE,
    StopNotice,
)
from tests.unit.training.making import make_run
from tests.unit.training.room import LIMIT_S, Room, RoomRank


class Trainer(threading.Thread):
    """One rank: a run with its own storage, which trains until its data or the world ends."""

    def __init__(
        self,
        room: Room,
        number: int,
        folder: Path,
        *,
        steps: int = 10**6,
        cost_s: float = 0.0,
        before_step: Callable[[int], None] = lambda step: None,
        save_every_steps: int = 0,
        word_s: float = LIMIT_S,
        closes: bool = False,
    ) -> None:
        super().__init__(daemon=True, name=f"rank {number}")
        self.peers: RoomRank = room.rank(number)
        self.folder = folder / str(number)
        self.run_ = make_run(
            self.peers,
            self.folder,
            state={"strata": {}, "weights": np.zeros(4)},
            wait_s=LIMIT_S,
            save_every_steps=save_every_steps or 10**9,
        )
        self.clock_s = 0.0
        self.overs = 0
        self.stopper = Stopper(
            self.run_,
            clock=lambda: self.clock_s + (time.monotonic() if word_s < LIMIT_S else 0.0),
            save_cost_s=lambda: cost_s,
            over=self._over,
            word_s=word_s,
        )
        self.run_.hooks.append(self.stopper)
        self._steps = steps
        self._closes = closes
        self._before_step = before_step
        self.ended_by: BaseException | None = None

    def _over(self) -> None:
        self.overs += 1

    def run(self) -> None:
        try:
            for number in range(self._steps):
                for _ in self.run_.steps([number], epoch=number):
                    self._before_step(number + 1)
            if self._closes:
                self.run_.close()
            self.run_.abandon("the data has ended", code=0)
        except BaseException as error:  # noqa: BLE001  # looked at by the test
            self.ended_by = error

    def saved(self) -> list[int]:
        return CheckpointManager(self.folder).all_steps()


def joined(trainers: list[Trainer]) -> list[Trainer]:
    for trainer in trainers:
        trainer.join(LIMIT_S)
        assert not trainer.is_alive(), f"{trainer.name} is stuck at step {trainer.run_.step}"
    return trainers


def training(room: Room, folder: Path, **options: Any) -> tuple[list[Trainer], threading.Barrier]:
    """Start all ranks, which meet in every step as in a collective; `met` counts the steps."""
    met = threading.Barrier(room.size)

    def collective(step: int) -> None:
        met.wait(LIMIT_S)

    trainers = [Trainer(room, n, folder, before_step=collective, **options) for n in range(room.size)]
    for trainer in trainers:
        trainer.start()
    return trainers, met


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


def saved_together(room: Room) -> bool:
    """Tell, once they have, that all ranks said that they saved."""
    with room.changed:
        return room.changed.wait_for(
            lambda: len(room.rounds.get((SAVED_BARRIER, 1), {})) == room.size, LIMIT_S
        )


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


# -- nobody waits for ever

LENGTH = b'{"v":1,"batches":1}'


def others_agree(room: Room, number: int) -> None:
    """Play a rank that says "ok" to the first step that is proposed."""
    other = room.rank(number)
    told = other.barrier(AGREE_BARRIER, b'{"v":1,"attempt":1,"begun":0}')
    step = max(json.loads(data)["begun"] for data in told.values()) + MARGIN_STEPS
    other.barrier(AGREE_BARRIER, json.dumps({"v": 1, "attempt": 1, "step": step, "ok": True}).encode())


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
    assert "no other world has followed: training goes on from step" in caplog.text


def test_who_gave_up_waiting_is_asked_to_leave_all_the_same(tmp_path: Path) -> None:
    """The ranks agree anew, for what was agreed before is over."""
    room = Room(2)
    trainers, _ = training(room, tmp_path, word_s=0.1)
    room.notice(STOP_ACTION_RESHAPE, grace_s=0.0)
    assert saved_together(room)
    for trainer in trainers:
        with trainer.stopper._changed:
            given_up = trainer.stopper._changed.wait_for(lambda it=trainer.stopper: it._given_up, LIMIT_S)  # type: ignore[misc]
            assert given_up
    room.notice(STOP_ACTION_PREEMPT)
    for trainer in joined(trainers):
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
    for barrier, payload in ((LOADER_BARRIER, LENGTH), (SAVE_BARRIER, left)):
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


@pytest.mark.parametrize("when", ["before it closes", "while it closes"])
def test_a_run_that_is_about_to_end_says_so_when_another_world_is_to_follow(
    when: str, tmp_path: Path
) -> None:
    """Its loop is over before the common step, and it waits for a rank that evaluates for long."""
    room = Room(2)
    room.rounds[LOADER_BARRIER, 1] = {1: LENGTH}
    trainer = Trainer(room, 0, tmp_path, steps=1, closes=True)
    if when == "before it closes":
        room.notice(STOP_ACTION_RESHAPE)
    trainer.start()
    with room.changed:
        assert room.changed.wait_for(lambda: (LAST_BARRIER, 1) in room.rounds, LIMIT_S)
    if when == "while it closes":
        assert (CLOSING_BARRIER, 1) not in room.rounds
        room.notice(STOP_ACTION_RESHAPE)
    with room.changed:
        assert room.changed.wait_for(lambda: (CLOSING_BARRIER, 1) in room.rounds, LIMIT_S)
    room.rank(1).barrier(LAST_BARRIER, payload_of(Pace()))
    joined([trainer])
    assert (trainer.ended_by, trainer.peers.left) == (None, (0, "the training is done"))
