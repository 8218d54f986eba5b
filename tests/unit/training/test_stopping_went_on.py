"""A rank has trained on past the step at which another one, who was told so in time, has stopped."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.client.rank import LOCAL_SLACK_S
from strata.core.agreement import TimeLeft
from strata.errors import BarrierTimeout, Preempted, StaleGeneration, Unavailable
from strata.training import stopping
from strata.training.alike import LOADER_BARRIER
from strata.training.saves import SLACK_S
from strata.training.stopping import AGREE_BARRIER, SAVE_BARRIER
from strata.v1.worlds_pb2 import STOP_ACTION_PREEMPT, STOP_ACTION_RESHAPE
from tests.unit.training.room import LIMIT_S, Room
from tests.unit.training.trainers import LENGTH, Trainer, joined, others_agree, saved_together


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
    barrier, train_on = cut_off.peers.barrier, cut_off.stopper._hold_no_longer
    rounds = []

    def late(name: str, *arguments: Any, **more: Any) -> Any:
        rounds.append(name)
        outcome = barrier(name, *arguments, **more)
        # a first attempt may come too late for both: what is held back is the word that they stop
        if name == AGREE_BARRIER and rounds.count(name) % 2 == 0:
            agreement = cut_off.stopper._agreement.conclude(outcome, ranks=room.size)
            if agreement.agreed is not None or agreement.went_on:
                assert word.wait(LIMIT_S)
        return outcome

    def gives_up(step: int) -> None:
        train_on(step)
        gave_up.set()

    cut_off.peers.barrier = late  # type: ignore[method-assign]  # its coordinators are away for a while
    cut_off.stopper._hold_no_longer = gives_up  # type: ignore[method-assign]  # to know when it does
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


@pytest.mark.parametrize("heard", [True, False])
@pytest.mark.parametrize("leave", [False, True])
def test_all_agree_anew_when_the_meeting_is_over_before_one_says_that_it_went_on(
    leave: bool, heard: bool, tmp_path: Path
) -> None:
    """They wait as long for the word as for each other; who came first may not even hear that it is over."""
    room = Room(2)
    trainers, went_on, word = parted(room, tmp_path)
    told = trainers[1]
    barrier, over = told.peers.barrier, threading.Event()

    def timed_out(name: str, *arguments: Any, **more: Any) -> Any:
        try:
            return barrier(name, *arguments, **more)
        except BarrierTimeout:
            if name.startswith(SAVE_BARRIER):
                over.set()
                if not heard:
                    raise Unavailable("no outcome came in time") from None
            raise

    told.peers.barrier = timed_out  # type: ignore[method-assign]  # to know when it is
    told.stopper._word_s = trainers[0].stopper._word_s
    for trainer in trainers:
        trainer.start()
    room.notice(STOP_ACTION_RESHAPE)
    assert went_on.wait(LIMIT_S)
    assert over.wait(LIMIT_S)
    for trainer in trainers:
        trainer.stopper._word_s = LIMIT_S  # they come back for good
    if leave:
        room.notice(STOP_ACTION_PREEMPT)
    word.set()
    if not leave:
        assert saved_together(room)
        room.next_world()
    steps = {trainer.run_.step for trainer in joined(trainers)}
    assert len(steps) == 1
    for trainer in trainers:
        assert isinstance(trainer.ended_by, Preempted if leave else StaleGeneration)
        assert trainer.saved() == [trainer.run_.step]


def test_who_does_not_learn_whether_it_was_heard_agrees_anew_as_well(tmp_path: Path) -> None:
    """Its coordinators are away again when it says that it went on, and the others have heard that."""
    room = Room(2)
    trainers, went_on, word = parted(room, tmp_path)
    cut_off = trainers[0]
    barrier = cut_off.peers.barrier
    said: list[str] = []

    def unheard(name: str, *arguments: Any, **more: Any) -> Any:
        outcome = barrier(name, *arguments, **more)
        if name.startswith(SAVE_BARRIER) and not said:
            said.append(name)
            raise Unavailable("no outcome came in time")
        return outcome

    cut_off.peers.barrier = unheard  # type: ignore[method-assign]  # its coordinators are away
    for trainer in trainers:
        trainer.start()
    room.notice(STOP_ACTION_RESHAPE)
    assert went_on.wait(LIMIT_S)
    cut_off.stopper._word_s = LIMIT_S
    word.set()
    assert saved_together(room)
    room.next_world()
    assert len({trainer.run_.step for trainer in joined(trainers)}) == 1
    for trainer in trainers:
        assert isinstance(trainer.ended_by, StaleGeneration)
        assert trainer.saved() == [trainer.run_.step]
    assert said


@pytest.mark.parametrize("action", [STOP_ACTION_RESHAPE, STOP_ACTION_PREEMPT])
def test_where_nobody_leaves_an_outcome_may_be_as_late_as_the_client_waits_for_it(
    action: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else ranks would part: one hears it after its coordinator was lost, another one no longer listens."""
    room = Room(1)
    trainer = Trainer(room, 0, tmp_path)
    barrier = trainer.peers.barrier
    times_s: list[float] = []
    limits_s: list[float] = []

    def noted(*arguments: Any, **more: Any) -> Any:
        times_s.append(more["timeout_s"])
        return barrier(*arguments, **more)

    def unbounded(limit_s: float, act: Callable[[], Any], **more: Any) -> Any:
        limits_s.append(limit_s)
        return act()

    trainer.stopper._agreement = replace(trainer.stopper._agreement, begun=3, attempt=1, agreed=3)
    trainer.peers.barrier = noted  # type: ignore[method-assign]  # to know how long it waits
    monkeypatch.setattr(stopping, "within", unbounded)
    room.notice(action, grace_s=10.0)
    trainer.stopper._meet()
    more_s = limits_s[0] - times_s[0]
    assert more_s > LOCAL_SLACK_S if action == STOP_ACTION_RESHAPE else more_s == pytest.approx(SLACK_S)


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("hears", ["a timeout", "nothing"])
def test_who_is_preempted_at_a_meeting_does_as_who_was_before_when_not_all_come(
    hears: str, in_time: bool, tmp_path: Path
) -> None:
    """Rank 0 does not come. While there is time both agree anew, else both leave; never one of them only."""
    room = Room(3)
    room.deaf = {0, 2}
    trainers = [Trainer(room, number, tmp_path, word_s=0.1) for number in (1, 2)]
    for trainer in trainers:
        trainer.stopper._agreement = replace(trainer.stopper._agreement, begun=3, attempt=1, agreed=3)
    room.notice(STOP_ACTION_RESHAPE)
    here, preempted = threading.Event(), threading.Event()
    barrier = trainers[0].peers.barrier

    def early(*arguments: Any, **more: Any) -> Any:
        here.set()
        assert preempted.wait(LIMIT_S)
        try:
            return barrier(*arguments, **more)
        except BarrierTimeout:
            if hears == "nothing":
                raise Unavailable("no outcome came in time") from None
            raise

    trainers[0].peers.barrier = early  # type: ignore[method-assign]  # it hears of more while it is there
    with ThreadPoolExecutor() as threads:
        first = threads.submit(trainers[0].stopper._save, 3)
        assert here.wait(LIMIT_S)
        room.deaf = {0}
        room.notice(STOP_ACTION_PREEMPT)
        if not in_time:
            for trainer in trainers:
                trainer.clock_s += 30.0
        second = threads.submit(trainers[1].stopper._save, 3)
        preempted.set()
        stop = [first.result(LIMIT_S), second.result(LIMIT_S)]
    assert stop == [not in_time, not in_time]


def test_who_is_told_just_as_it_gives_up_its_hold_stops_like_the_others(tmp_path: Path) -> None:
    room = Room(2)
    stopper = Trainer(room, 0, tmp_path).stopper
    room.deaf = {1}
    room.notice(STOP_ACTION_RESHAPE)
    stopper._agreement = replace(stopper._agreement, begun=3, hold=3)

    def told_meanwhile(since_s: float) -> bool:
        with stopper._changed:
            stopper._agreement = replace(stopper._agreement, hold=None, agreed=3)
        return True

    class Stopped(Exception):
        pass

    def stops(step: int) -> None:
        raise Stopped

    stopper._heard_nothing = told_meanwhile  # type: ignore[method-assign]  # it had heard nothing until then
    stopper._stop = stops  # type: ignore[method-assign]  # what follows is another test's
    with pytest.raises(Stopped):
        stopper.completed(3)
    assert stopper._agreement.begun == 3
    room.next_world()


def test_a_thread_that_ends_late_keeps_nobody_from_agreeing_anew(tmp_path: Path) -> None:
    """It has concluded the agreement, and the trainer was faster to stop and to hear that not all do."""
    room = Room(2)
    trainer = Trainer(room, 0, tmp_path)
    anew, ended = threading.Event(), threading.Event()
    attempt, agree, agree_anew = (
        trainer.stopper._attempt,
        trainer.stopper._agree,
        trainer.stopper._agree_anew,
    )

    def late() -> bool:
        concluded = attempt()
        if concluded:
            assert anew.wait(LIMIT_S)
        return concluded

    def first_to_end() -> None:
        agree()
        ended.set()

    def begins_anew(step: int) -> None:
        agree_anew(step)
        anew.set()

    trainer.stopper._attempt = late  # type: ignore[method-assign]  # it is slow to end
    trainer.stopper._agree = first_to_end  # type: ignore[method-assign]  # to know when it does
    trainer.stopper._agree_anew = begins_anew  # type: ignore[method-assign]
    room.notice(STOP_ACTION_RESHAPE)
    others_agree(room, 1)
    on = TimeLeft(went_on=True).encode()
    for name, payload in ((LOADER_BARRIER, LENGTH), (f"{SAVE_BARRIER}.1", on)):
        threading.Thread(target=room.rank(1).barrier, args=(name, payload), daemon=True).start()
    trainer.start()
    assert ended.wait(LIMIT_S)
    with room.changed:
        assert room.changed.wait_for(lambda: (AGREE_BARRIER, 3) in room.rounds, LIMIT_S)
    room.next_world()
    (trainer,) = joined([trainer])
    assert isinstance(trainer.ended_by, StaleGeneration)
