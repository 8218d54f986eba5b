"""A rank has trained on past the step at which another one, who was told so in time, has stopped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from strata.errors import Preempted, StaleGeneration
from strata.training.stopping import AGREE_BARRIER
from strata.v1.worlds_pb2 import STOP_ACTION_PREEMPT, STOP_ACTION_RESHAPE
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import Trainer, joined, saved_together


def parted(room: Room, folder: Path) -> tuple[list[Trainer], threading.Event, threading.Event]:
    """Have rank 0 hear what was agreed only when the second event is set; the first: it has trained on."""
    met = threading.Barrier(room.size)
    gave_up, went_on, word = threading.Event(), threading.Event(), threading.Event()

    def collective(step: int) -> None:
        if threading.current_thread() is cut_off and gave_up.is_set():
            went_on.set()
        met.wait(LIMIT_S)

    cut_off = Trainer(room, 0, folder, before_step=collective, word_s=0.1)
    told = Trainer(room, 1, folder, before_step=collective)
    barrier, train_on = cut_off.peers.barrier, cut_off.stopper._train_on
    rounds = []

    def late(name: str, *arguments: Any, **more: Any) -> Any:
        rounds.append(name)
        outcome = barrier(name, *arguments, **more)
        if rounds.count(AGREE_BARRIER) == 2:
            assert word.wait(LIMIT_S)
        return outcome

    def gives_up(step: int) -> None:
        train_on(step)
        gave_up.set()

    cut_off.peers.barrier = late  # type: ignore[method-assign]  # its coordinators are away for a while
    cut_off.stopper._train_on = gives_up  # type: ignore[method-assign]  # to know when it does
    return [cut_off, told], went_on, word


@pytest.mark.parametrize("leave", [False, True])
def test_all_go_on_and_stop_together_later(leave: bool, tmp_path: Path) -> None:
    room = Room(2)
    trainers, went_on, word = parted(room, tmp_path)
    for trainer in trainers:
        trainer.start()
    room.notice(STOP_ACTION_RESHAPE)
    assert went_on.wait(LIMIT_S)
    told = trainers[1].stopper
    with told._changed:
        assert told._changed.wait_for(lambda: told._agreement.agreed, LIMIT_S)
    first = told._agreement.agreed
    if leave:
        trainers[0].stopper._word_s = LIMIT_S  # they come back for good
        room.notice(STOP_ACTION_PREEMPT)
    word.set()
    if not leave:
        trainers[0].stopper._word_s = LIMIT_S
        assert saved_together(room)
        room.next_world()
    steps = {trainer.run_.step for trainer in joined(trainers)}
    assert len(steps) == 1
    assert first is not None
    assert steps.pop() > first
    for trainer in trainers:
        assert isinstance(trainer.ended_by, Preempted if leave else StaleGeneration)
        assert trainer.saved() == [trainer.run_.step]
