"""`Preemption`: what a signal asks for, and when it is obeyed without asking."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any, cast

import pytest
from google.protobuf.message import Message

from strata.errors import Refused, StrataError
from strata.training.preempting import Preemption
from strata.training.run import Run
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
)
from tests.unit.training.room import Room, RoomRank

TERM = int(signal.SIGTERM)


class Asking(RoomRank):
    """A rank whose coordinators answer as the test says."""

    def __init__(self, room: Room, number: int) -> None:
        super().__init__(room, number)
        self.requests: list[StopJobRequest] = []
        self.answer: StopNotice | StrataError | None = None

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        assert isinstance(request, StopJobRequest)
        self.requests.append(request)
        if isinstance(self.answer, StrataError):
            raise self.answer
        return StopJobResponse(notice=self.answer)


class RunOf:
    """As much of a run as is looked at before the first step."""

    step = begun = 0

    def __init__(self, peers: RoomRank) -> None:
        self.peers = peers


@pytest.fixture
def room() -> Iterator[Room]:
    """A world of two ranks, whose end after the test ends what still waits in it."""
    it = Room(2)
    yield it
    it.next_world()


def preemption(peers: Asking, *, member_only: bool = False) -> Preemption:
    run = cast("Run", RunOf(peers))
    return Preemption(
        run, signals=(), member_only=member_only, grace_s=12.0, clock=lambda: 0.0, save_cost_s=lambda: 0.0
    )


def notice(action: Any = STOP_ACTION_PREEMPT, generation: int = 1) -> StopNotice:
    return StopNotice(generation=generation, action=action, reason="so it was", grace_ms=12_000)


@pytest.mark.parametrize(
    ("member_only", "action", "named"), [(False, STOP_ACTION_PREEMPT, []), (True, STOP_ACTION_DRAIN, ["w1"])]
)
def test_a_signal_asks_for_all_or_for_this_member(
    room: Room, member_only: bool, action: Any, named: list[str]
) -> None:
    peers = Asking(room, 1)
    peers.answer = notice()
    it = preemption(peers, member_only=member_only)
    assert it._signalled(TERM)
    (request,) = peers.requests
    assert (request.job, request.action, list(request.worker_ids)) == ("j", action, named)
    assert (request.generation, request.grace_ms) == (1, 12_000)
    assert request.reason == "SIGTERM to rank 1 on w1"
    assert it._stopper.notice == notice(), "the answer is enough to begin"


@pytest.mark.parametrize("answer", [None, Refused("generation 1 has ended"), notice(generation=2)])
def test_a_signal_that_nobody_can_be_asked_for_is_to_be_obeyed(room: Room, answer: Any) -> None:
    peers = Asking(room, 0)
    peers.answer = answer
    assert not preemption(peers)._signalled(TERM)


def test_who_was_asked_already_asks_nobody(room: Room) -> None:
    peers = Asking(room, 0)
    it = preemption(peers)
    room.notice(STOP_ACTION_PAUSE)
    assert it._signalled(TERM)
    assert peers.requests == []


def test_in_a_world_that_has_ended_a_signal_means_what_it_says(room: Room) -> None:
    peers = Asking(room, 0)
    it = preemption(peers)
    room.next_world()
    assert not it._signalled(TERM)
    assert peers.requests == []
