"""`Preemption`: the stop that a signal requests, and when a rank obeys a signal without a request."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from strata.errors import Refused, StaleGeneration, StrataError
from strata.training.generation_exit import GenerationExit, StandaloneExit
from strata.training.loop.run import Run
from strata.training.stop.preempting import Preemption
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
)
from strata.wire.worlds import notice_record
from tests.unit.training.room import LIMIT_S, Room, RoomRank

TERM = int(signal.SIGTERM)


class Asking(RoomRank):
    """A rank whose coordinators answer a stop request as the test prescribes."""

    def __init__(self, room: Room, number: int) -> None:
        super().__init__(room, number)
        self.requests: list[StopJobRequest] = []
        self.answer: StopNotice | StrataError | None = None
        self.requested = threading.Event()

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        assert isinstance(request, StopJobRequest)
        self.requests.append(request)
        self.requested.set()
        if isinstance(self.answer, StrataError):
            raise self.answer
        return StopJobResponse(notice=self.answer)


class RunOf:
    """The attributes of a run that a preemption reads before the first step."""

    step = begun = 0

    def __init__(self, context: RoomRank) -> None:
        self.context = context
        self.checkpoints = SimpleNamespace(rewound=None)


@pytest.fixture
def room() -> Iterator[Room]:
    """Yield a world of two ranks; its end after the test releases every rank that still waits in it."""
    it = Room(2)
    yield it
    it.next_world()


def preemption(
    context: Asking,
    *,
    member_only: bool = False,
    ending: GenerationExit | None = None,
    signals: Sequence[int] = (),
) -> Preemption:
    run = cast("Run", RunOf(context))
    return Preemption(
        run,
        signals=signals,
        member_only=member_only,
        grace_s=12.0,
        clock=lambda: 0.0,
        save_cost_s=lambda: 0.0,
        ending=ending,
    )


def notice(action: Any = STOP_ACTION_PREEMPT, generation: int = 1) -> StopNotice:
    return StopNotice(generation=generation, action=action, reason="so it was", grace_ms=12_000)


@pytest.mark.parametrize(
    ("member_only", "action", "named"), [(False, STOP_ACTION_PREEMPT, []), (True, STOP_ACTION_DRAIN, ["w1"])]
)
def test_a_signal_requests_a_stop_of_all_ranks_or_of_this_member(
    room: Room, member_only: bool, action: Any, named: list[str]
) -> None:
    context = Asking(room, 1)
    context.answer = notice()
    it = preemption(context, member_only=member_only)
    assert it._signalled(TERM)
    (request,) = context.requests
    assert (request.job, request.action, list(request.worker_ids)) == ("j", action, named)
    assert (request.generation, request.grace_ms) == (1, 12_000)
    assert request.reason == "SIGTERM to rank 1 on w1"
    assert it._stopper._notice == notice_record(notice()), "the answer is enough to begin"


@pytest.mark.parametrize("answer", [None, Refused("generation 1 has ended"), notice(generation=2)])
def test_a_signal_is_obeyed_if_its_stop_request_fails(room: Room, answer: Any) -> None:
    context = Asking(room, 0)
    context.answer = answer
    assert not preemption(context)._signalled(TERM)


@pytest.mark.parametrize("member_only", [True, False])
def test_a_rank_signalled_while_others_are_drained_requests_its_own_stop(
    room: Room, member_only: bool
) -> None:
    """A generation has one notice, so the coordinators merge both requests."""
    context = Asking(room, 1)
    context.answer = notice(STOP_ACTION_DRAIN if member_only else STOP_ACTION_PREEMPT)
    context.answer.worker_ids.extend(["w0", "w1"] if member_only else [])
    it = preemption(context, member_only=member_only)
    room.notice(STOP_ACTION_DRAIN, workers=["w0"])
    assert it._signalled(TERM)
    assert len(context.requests) == 1
    assert it._stopper._notice == notice_record(context.answer)


def test_a_rank_with_less_grace_than_the_notice_reports_it(room: Room) -> None:
    context = Asking(room, 1)
    context.answer = notice()
    it = preemption(context)
    room.notice(STOP_ACTION_PREEMPT, grace_s=60.0)
    assert it._signalled(TERM)
    assert [request.grace_ms for request in context.requests] == [12_000]


def test_a_standalone_process_leaves_by_itself_when_its_generation_ends_first(room: Room) -> None:
    context = Asking(room, 1)
    context.answer = StaleGeneration("the world is generation 2")
    ending = StandaloneExit(context, detect_s=0.0, exit_process=lambda: None)
    it = preemption(context, ending=ending)
    assert not it._signalled(TERM), "it holds nothing yet: the signal ends it"
    ending.arm()
    assert it._signalled(TERM)
    room.next_world()
    assert it._signalled(TERM)
    assert len(context.requests) == 2


def test_a_rank_with_a_preemption_notice_sends_no_request(room: Room) -> None:
    context = Asking(room, 0)
    it = preemption(context)
    room.notice(STOP_ACTION_PREEMPT, grace_s=12.0)
    assert it._signalled(TERM)
    assert context.requests == []


@pytest.mark.parametrize("action", [STOP_ACTION_SCALE, STOP_ACTION_PAUSE])
def test_a_stop_without_departures_is_no_answer_to_a_signal(action: Any, room: Room) -> None:
    context = Asking(room, 0)
    context.answer = notice()
    it = preemption(context)
    room.notice(action)
    assert it._signalled(TERM)
    assert len(context.requests) == 1
    assert it._stopper._notice == notice_record(notice())


def test_a_rank_that_is_ended_with_its_generation_logs_no_preemption(
    room: Room, caplog: pytest.LogCaptureFixture
) -> None:
    """Its agent's SIGTERM may arrive before the report that the generation has ended."""
    context = Asking(room, 0)
    context.answer = StaleGeneration("this node's ranks of generation 1 are being ended")
    assert not preemption(context)._signalled(TERM)
    # a thread of an earlier test that agrees on a step may still log
    mine = [record for record in caplog.records if record.thread == threading.get_ident()]
    assert [record.message for record in mine] == []


def test_a_signal_in_an_ended_world_is_obeyed_without_a_request(room: Room) -> None:
    context = Asking(room, 0)
    it = preemption(context)
    room.next_world()
    assert not it._signalled(TERM)
    assert context.requests == []


@pytest.mark.parametrize("received", [True, False])
def test_a_rank_that_is_ended_with_its_generation_finishes_the_common_save(
    room: Room, received: bool
) -> None:
    """The leader writes the next head at the commit.

    At this time the commit marker may still be on its way to storage.
    """
    context = Asking(room, 0)
    context.answer = StaleGeneration("the world is generation 2")
    it = preemption(context)
    it._stopper.saving = True
    if received:
        room.next_world()
    assert it._signalled(TERM)
    it._stopper.saving = False
    assert not it._signalled(TERM)


@pytest.fixture
def usr1() -> Iterator[Callable[[], None]]:
    """Return a function that sends SIGUSR1 to this process, which survives it."""
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    yield lambda: os.kill(os.getpid(), signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def test_a_handled_signal_is_not_obeyed_if_the_world_ends_after_the_run_closed(
    room: Room, usr1: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The report of the world's end arrives in the session's thread, which is slower than the run."""
    context = Asking(room, 0)
    context.answer = notice()
    it = preemption(context, signals=(signal.SIGUSR1,))
    assert it._signals is not None
    obeyed: list[int] = []
    monkeypatch.setattr(it._signals, "_obey", obeyed.append)
    usr1()
    assert context.requested.wait(LIMIT_S)
    it.closed()
    it._world_ended()  # the report arrives after the run has closed
    assert obeyed == []


def test_a_run_that_fails_to_start_restores_the_signal_handlers(room: Room, usr1: Callable[[], None]) -> None:
    mine = signal.getsignal(signal.SIGUSR1)
    room.next_world()
    with pytest.raises(StaleGeneration):
        preemption(Asking(room, 0), signals=(signal.SIGUSR1,))
    assert signal.getsignal(signal.SIGUSR1) is mine


@pytest.mark.parametrize("leaving", [False, True])
def test_an_ended_run_restores_signal_handlers_unless_it_is_leaving(
    leaving: bool, room: Room, usr1: Callable[[], None]
) -> None:
    mine = signal.getsignal(signal.SIGUSR1)
    it = preemption(Asking(room, 0), signals=(signal.SIGUSR1,))
    assert signal.getsignal(signal.SIGUSR1) is not mine
    it._stopper.leaving = leaving
    it.closed()
    assert (signal.getsignal(signal.SIGUSR1) is mine) == (not leaving)
    assert it._signals is not None
    it._signals.close()
