"""One rank's process of a simulated training, and the sessions through which the rank and its agent report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from typing import Any, Final, cast

from strata.client.event_loop import BackgroundLoop
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, RankPlace, SharedSession
from strata.session.client_session import Session
from strata.training.loop.clock import Clock
from strata.training.loop.compute_timer import ComputeTimer
from strata.v1.members_pb2 import RankProgress

JOB: Final = "job"
GENERATION: Final = 1
PACE_S: Final = 0.1
"""How long an agent's session gathers progress before it sends."""


class _Time:
    """The clocks of one rank's process."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.used_s = 0.0
        self.clock = Clock(
            monotonic_s=lambda: self.now_s, unix_s=lambda: self.now_s, thread_s=lambda: self.used_s
        )


class _InLoop:
    """Stands in for a client's background thread."""

    def at_stop(self, act: object) -> None:
        pass

    def now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def soon(self, callback: Any) -> None:
        callback()


class Upward:
    """A session that gathers progress for `pace_s`, keeps the newest of each rank, and delivers it with its age."""

    def __init__(self, deliver: Any, *, pace_s: float = PACE_S) -> None:
        self._pace_s = pace_s
        self.error = self.world = None
        self._deliver = deliver
        self._newest: dict[int, tuple[RankProgress, float]] = {}
        self._due = False

    def progress(self, generation: int, ranks: Iterable[RankProgress]) -> None:
        loop = asyncio.get_running_loop()
        for one in ranks:
            self._newest[one.rank] = (one, loop.time() - one.age_ms / 1000)
        if not self._due:
            self._due = True
            loop.call_later(self._pace_s, self._flush)

    def _flush(self) -> None:
        self._due = False
        now_s = asyncio.get_running_loop().time()
        copies = []
        for one, since_s in self._newest.values():
            copy = RankProgress()
            copy.CopyFrom(one)
            copy.age_ms = round(1000 * (now_s - since_s))
            copies.append(copy)
        self._newest.clear()
        self._deliver(copies)


class Rank:
    """One rank's process."""

    def __init__(self, number: int, deliver: Any, chance: random.Random, *, size: int, jitter: float) -> None:
        self.number = number
        self.time = _Time()
        self.timer = ComputeTimer(self.time.clock)
        place = RankPlace(
            job=JOB,
            worker_id="",
            generation=GENERATION,
            rank=number,
            world_size=size,
            restore_point=None,
        )
        # the session does not gather progress, because the client does
        session = cast("Session", Upward(deliver, pace_s=0.0))
        shared_session = SharedSession(
            session=session, watcher=RankObserver(), place=place, owns_member=False
        )
        self.client = RankClient(shared_session, cast("BackgroundLoop", _InLoop()))
        self.likes = chance.gauss(1.0, jitter)
        self.wait_s = 0.0
        self._batches = self.timer.waiting(self._loader())

    def _loader(self) -> Iterator[int]:
        while True:
            self.time.now_s += self.wait_s
            yield 0

    def measure(self, wait_s: float, compute_s: float, idle_s: float) -> None:
        """Run one step: wait for the batch, compute, wait for the other ranks."""
        self.wait_s = wait_s
        next(self._batches)
        self.timer.begins()
        self.time.used_s += compute_s
        self.time.now_s += compute_s + idle_s
        self.timer.completed()

    def report(self, step: int, phase: str) -> None:
        timer = self.timer
        self.client.progress(step, phase, own_s=timer.last_s, data_wait_s=timer.last_data_wait_s)
