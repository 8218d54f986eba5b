"""Barriers at one replica: arrivals in memory, forwarded to peers, and one outcome in etcd (PROTOCOLS 6).

    member ──arrival──▶ book ────────▶ every ready peer's book
                          │
                 full, late or hopeless? ──after 20 k ms──▶ outcome in etcd ──view──▶ waiters

No replica owns a round. Each replica stores the arrivals that it receives, and forwards those of its own members
repeatedly until it sees the outcome. Any replica that can decide a round writes its outcome; the others find the
outcome in their view. Waiters are answered from the view only, never from the result of the write. So it does not
matter which replica wrote the outcome, or whether that replica is still alive. A round is *hopeless* if a participant
that has not arrived is dead, failed or done. `k` is the number of replicas before this one in the order of the
outcome's writers.

`BarrierBook` stores the open rounds that this replica knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from strata.coordinator.barriers.counters import Counters
from strata.coordinator.barriers.forwarding import Forwarding
from strata.coordinator.context import ReplicaContext
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.core.access.rate_limits import Seldom
from strata.core.barriers.outcomes import (
    Arrival,
    BarrierBook,
    BarrierKey,
    OpenRound,
    decide_outcome,
    ended,
    writer_delay_ms,
)
from strata.core.ids import InstanceId
from strata.core.job import JobView
from strata.core.kv.records import PoisonRecord
from strata.core.kv.txn import Decision
from strata.core.kv.view import View
from strata.errors import Refused, StaleGeneration, StrataError, Unavailable
from strata.observe import get_logger
from strata.v1 import barriers_pb2
from strata.wire import barriers as wire

log = get_logger()


REFUSALS_S: Final = 60.0
"""The shortest time between two log lines about a peer's refused arrivals."""
LATE_POLL_S: Final = 0.05
"""How long after its timeout a round may stay open before it is checked."""


class Waiter(Protocol):
    """A session or a call that waits for the end of a round."""

    def outcome(self, key: BarrierKey, message: barriers_pb2.BarrierOutcome) -> None:
        """Receive the outcome of a round at which this waiter arrived."""
        ...

    def refused(self, key: BarrierKey, ranks: tuple[int, ...], error: StrataError) -> None:
        """Receive the refusal of an arrival that does not count, or that has ceased to count."""
        ...


class Barriers:
    """All barriers, as this replica sees them. `run` owns the writers of outcomes."""

    def __init__(
        self,
        context: ReplicaContext,
        ranks: RankIndexes,
        *,
        forward: Callable[[list[barriers_pb2.Arrival]], None],
        ready: Callable[[], Iterable[InstanceId]],
        phases: Callable[[str, int], dict[int, str]],
        served: Callable[[str], Iterable[int]],
    ) -> None:
        """`forward` sends to every ready peer; `ready` returns the ready peers' instances, without this replica's own.

        `served` returns the ranks of a job's world that have a session at this replica.
        """
        self._context = context
        self._ranks = ranks
        self._ready = ready
        self._phases = phases
        self._served = served
        self._book = BarrierBook()
        self.forwarding = Forwarding(self._book, forward)
        self._counters = Counters(context, self._book, ready)
        self._waiters: dict[BarrierKey, dict[Waiter, None]] = {}
        """The waiters of each open round, in the order of their arrival."""
        self._writers: dict[BarrierKey, asyncio.Task[None]] = {}
        measures = context.measures
        self._from_members = measures.arrivals.child("member")
        self._from_peers = measures.arrivals.child("peer")
        self._round_seconds = measures.round_seconds.child()
        self._refusals = Seldom(REFUSALS_S)
        self._tasks: asyncio.TaskGroup | None = None

    # -- arrivals

    def arrive(self, arrival: Arrival, waiter: Waiter | None) -> None:
        """Record an arrival. `waiter` receives the outcome; None for an arrival that a peer forwarded."""
        try:
            self._arrive(arrival, waiter)
        except StrataError as error:
            if waiter is not None:
                waiter.refused(arrival.key, arrival.ranks, error)
            else:
                # Routine if this view and the peer's differ in age: the peer resends every arrival each second.
                routine = isinstance(error, Refused | StaleGeneration)
                if not routine and self._refusals.due(self._now_ms() / 1000) is not None:
                    log.warning("forwarded_arrival_refused", barrier=str(arrival.key), error=str(error))

    def _arrive(self, arrival: Arrival, waiter: Waiter | None) -> None:
        key = arrival.key
        (self._from_peers if waiter is None else self._from_members).add(len(arrival.ranks))
        opened = self._book.get(key) is None
        index = self._ranks.of(key.job)
        if opened:
            job = self._context.job(key.job)
            end = ended(job, key)
            if isinstance(end, StrataError):
                raise end
            if end is not None:
                if waiter is not None:
                    waiter.outcome(key, wire.outcome_message(job, key, end))
                return
        if index is None or key.generation > index.head.generation:
            # A member knows its world from this replica's view. A peer's view may be ahead, and the peer
            # forwards the arrival again.
            raise Refused(f"{key}: there is no such generation yet")
        entry = self._book.add(arrival, size=index.head.size, now_ms=self._now_ms())
        if waiter is not None:
            self._waiters.setdefault(key, {})[waiter] = None
            self.forwarding.add(key, arrival.ranks, partial(self._served_of, entry))
        if entry.complete:
            self._write_soon(key)
        elif opened and index.wounded:
            self._reconsider(entry)

    def forget(self, waiter: Waiter, job: str) -> None:
        """Send `waiter` nothing more about the job's rounds; its arrivals still count."""
        for open_round in self._book.open(job):
            self._waiters.get(open_round.key, {}).pop(waiter, None)

    def open(self, job: str) -> Iterator[OpenRound]:
        """Yield the rounds of a job that this replica knows to be open."""
        return self._book.open(job)

    # -- changes of the view

    def on_round(self, key: BarrierKey) -> None:
        """Close a round whose outcome was written."""
        if self._book.get(key) is not None:
            self._end_if_ended(key)

    def on_release(self, job: str, name: str, generation: int) -> None:
        """Close ended rounds of a barrier whose floor (its last released round) moved; events of their outcomes
        may be lost.
        """
        for open_round in self._book.open(job):
            if (open_round.key.name, open_round.key.generation) == (name, generation):
                self._end_if_ended(open_round.key)

    def on_change(self, job: str) -> None:
        """Check all open rounds of a job: its head changed, or a member or rank was lost."""
        for open_round in self._book.open(job):
            if not self._end_if_ended(open_round.key):
                self._reconsider(open_round)

    def _end_if_ended(self, key: BarrierKey) -> bool:
        job = self._context.job(key.job)
        end = ended(job, key)
        if end is None:
            return False
        self._note_time(key)
        self._book.drop(key)
        waiters = self._waiters.pop(key, {})
        self.forwarding.drop(key)
        if not waiters:
            return True
        if isinstance(end, StrataError):
            for waiter in waiters:
                waiter.refused(key, (), end)
        else:
            message = wire.outcome_message(job, key, end)
            for waiter in waiters:
                waiter.outcome(key, message)
        return True

    # -- writing outcomes

    def _reconsider(self, open_round: OpenRound) -> None:
        """Write the round's outcome if it is late or hopeless."""
        try:
            decision = self._decide(open_round.key, self._context.mirror.view)
        except PoisonRecord as error:
            log.warning("barrier_undecidable", barrier=str(open_round.key), error=error.message)
            return
        if decision.txn is not None:
            self._write_soon(open_round.key)

    def _write_soon(self, key: BarrierKey) -> None:
        if key not in self._writers and self._tasks is not None:
            self._writers[key] = self._tasks.create_task(self._write(key), name=f"writer of {key}")

    async def _write(self, key: BarrierKey) -> None:
        """Write the outcome when it is this replica's turn, unless a peer wrote it; retry until the round has ended."""
        delay_ms = writer_delay_ms(key, self._context.instance, self._ready())
        if delay_ms:
            await asyncio.sleep(delay_ms / 1000)
        try:
            while self._book.get(key) is not None:
                try:
                    await self._context.executor.settle(partial(self._decide, key))
                except Unavailable as error:
                    log.warning("outcome_delayed", barrier=str(key), error=error.message)
                else:
                    return
        except StrataError as error:
            # a refusal means that the round has ended, and the view shows that too; any other error means an
            # unreadable record
            log.warning("outcome_not_written", barrier=str(key), error=error.message)
        except Exception:
            # a bug that one round triggers must not end the replica, which serves all others
            log.exception("writer_failed", barrier=str(key))
        finally:
            del self._writers[key]
            self.on_round(key)

    def _decide(self, key: BarrierKey, view: View) -> Decision:
        open_round = self._book.get(key)
        if open_round is None:
            return Decision(reason=f"{key} has ended")
        return decide_outcome(
            JobView(view, self._context.keys.job(key.job)),
            open_round,
            now_ms=self._now_ms(),
            phases=self._phases(key.job, key.generation),
        )

    # -- in the background

    async def run(self) -> None:
        """Write outcomes and counters, and repeat all open work each second, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                tasks.create_task(self._counters.run(), name="barrier counters")
                tasks.create_task(self._check_deadlines(), name="barrier deadlines")
                for job in {open_round.key.job for open_round in self._book.open()}:
                    self.on_change(job)
                while True:
                    await asyncio.sleep(self._context.timing.arrivals_again_s)
                    self._repeat()
            finally:
                self._tasks = None  # no writer starts from here on

    async def _check_deadlines(self) -> None:
        """Check each round whose deadline has passed."""
        while True:
            await asyncio.sleep(LATE_POLL_S)
            now_ms = self._now_ms()
            for open_round in self._book.open():
                late = open_round.deadline_ms is not None and open_round.deadline_ms <= now_ms
                if late and open_round.key not in self._writers:
                    self._reconsider(open_round)

    def _repeat(self) -> None:
        """Repeat the work of every open round, in case a message or a write was lost."""
        self.forwarding.again()
        for open_round in self._book.open():
            self._reconsider(open_round)

    # -- helpers

    def _note_time(self, key: BarrierKey) -> None:
        if (open_round := self._book.get(key)) is not None:
            seconds = max(0.0, self._now_ms() - open_round.since_ms) / 1000
            self._round_seconds.observe(seconds)
            self._context.charts.round_ended(key.job, seconds)

    def _served_of(self, open_round: OpenRound) -> int:
        """Return the number of a round's participants that have a session at this replica."""
        return sum(rank in open_round.participants for rank in self._served(open_round.key.job))

    @staticmethod
    def _now_ms() -> float:
        return asyncio.get_running_loop().time() * 1000
