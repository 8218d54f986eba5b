"""All ranks act on a preemption from the same step on, whichever rank receives the notice first."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from strata.client.rank.preemption import PreemptionPoint
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.errors import BarrierBroken, Unavailable
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
    StopNotice,
)

LIMIT_S = 20.0


class Ranks:
    """The sessions of a world's ranks, with the calls that a `PreemptionPoint` uses."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.printed: dict[int, bytes] = {}
        self.round: dict[int, bytes] = {}
        """The payloads of the newest round that all ranks reached; a fast rank may already send a payload for the
        next round."""
        self.meeting = threading.Barrier(size, action=self._close)
        self.broken = False
        self.each = [Rank(self, rank) for rank in range(size)]

    def _close(self) -> None:
        self.round = dict(self.printed)


class Rank:
    generation = 7

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self.rank = rank
        self.supports_graceful_stop = False
        self.begun = threading.Event()
        self.on_world: Callable[[WorldUpdate], None] | None = None

    def support_graceful_stop(self) -> None:
        self.supports_graceful_stop = True

    def observe_world(self, on_world: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        self.on_world = on_world
        return lambda: setattr(self, "on_world", None)

    def has_met(self, name: str) -> bool:
        return False

    def barrier(self, name: str, payload: bytes = b"", *, timeout_s: float = LIMIT_S) -> dict[int, bytes]:
        if name == BEGIN_BARRIER:
            self.begun.set()
            return {}
        assert name.startswith("strata.")
        if self.ranks.broken:
            raise BarrierBroken("rank 1 died")
        self.ranks.printed[self.rank] = payload
        self.ranks.meeting.wait(timeout_s)
        return self.ranks.round

    def on_progress(self, action: int = STOP_ACTION_PREEMPT, generation: int = 7) -> None:
        notice = StopNotice(action=action, generation=generation, grace_ms=20_000)  # type: ignore[arg-type]
        assert self.on_world is not None
        self.on_world(WorldUpdate(notice=notice))


@pytest.mark.parametrize("seed", range(8))
def test_all_ranks_stop_behind_the_same_step(seed: int) -> None:
    rng = random.Random(seed)
    ranks = Ranks(3)
    points = [PreemptionPoint(rank, storage_uri="file:///x") for rank in ranks.each]
    collective = threading.Barrier(3)

    def train(rank: int) -> int:
        for step in itertools.count(0, 2):
            collective.wait(LIMIT_S)  # no rank is more than a step ahead of another
            if points[rank].reached(step):
                return step
            if step == 0:  # the notice reaches each rank, wherever it waits for the others
                threading.Timer(rng.random() / 100, ranks.each[rank].on_progress).start()
        raise AssertionError("nobody stopped")

    with ThreadPoolExecutor(3) as pool:
        stopped = set(pool.map(train, range(3)))
    assert len(stopped) == 1
    assert ranks.each[0].supports_graceful_stop
    assert ranks.each[0].begun.wait(LIMIT_S), "or the leader would end the generation at once"


def test_a_notice_of_another_generation_or_of_a_scale_is_ignored() -> None:
    (rank,) = Ranks(1).each
    point = PreemptionPoint(rank, storage_uri="x")
    assert not point.reached(1)
    rank.on_progress(generation=6)
    assert not point.reached(2)
    rank.on_progress(STOP_ACTION_SCALE)
    assert not point.reached(3), "the ranks of a world of another size do not leave with 75 before it"
    rank.on_progress()
    assert point.reached(4)
    assert not point.reached(3)
    point.close()
    assert rank.on_world is None


@pytest.mark.parametrize("broken", [False, True])
def test_each_generation_agrees_on_a_stop_separately(broken: bool) -> None:
    """This holds whether or not the previous generation agreed, and for a notice that arrived before the rejoin."""
    ranks = Ranks(1)
    (rank,) = ranks.each
    point = PreemptionPoint(rank, storage_uri="x")
    assert not point.reached(10)
    ranks.broken = broken
    rank.on_progress()
    assert point.reached(11) is not broken

    ranks.broken = False
    rank.generation = 8
    assert not point.reached(3), "it goes on from an older step, and nobody asks it to stop"
    assert not point.reached(12)
    rank.on_progress(generation=9)
    assert not point.reached(13)
    rank.generation = 9
    assert point.reached(4)


def test_a_client_without_a_world_is_never_preempted() -> None:
    class Bare:
        generation = 1

        def barrier(self, *_: Any) -> None:
            raise Unavailable("never asked")

    assert not PreemptionPoint(Bare(), storage_uri="x").reached(1)
