"""Barriers for clients without a session: WaitBarrier is the arrival (PROTOCOLS 5.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.calls.dispatch import Answer
from strata.coordinator.calls.lookups import existing_job
from strata.coordinator.context import ReplicaContext
from strata.coordinator.members.ranks import RankIndexes
from strata.core.barriers import BarrierKey
from strata.core.job import JobView
from strata.core.records import BarrierOutcome
from strata.errors import Refused, StrataError
from strata.v1 import barriers_pb2 as pb
from strata.wire import barriers as wire


class _Call:
    """One WaitBarrier as a waiter."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[pb.BarrierOutcome] = asyncio.get_running_loop().create_future()

    def outcome(self, key: BarrierKey, message: pb.BarrierOutcome) -> None:
        if not self.ended.done():
            self.ended.set_result(message)

    def refused(self, key: BarrierKey, ranks: tuple[int, ...], error: StrataError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class BarrierCalls:
    """Answers what `Barriers` offers."""

    def __init__(self, context: ReplicaContext, ranks: RankIndexes, barriers: Barriers) -> None:
        self._context = context
        self._ranks = ranks
        self._barriers = barriers

    def table(self) -> Mapping[str, Answer]:
        return {"wait_barrier": self.wait, "list_barriers": self.list}

    async def wait(self, request: pb.WaitBarrierRequest) -> pb.WaitBarrierResponse:
        """Return the outcome, whatever it is. A caller that goes away has arrived all the same."""
        arrival = wire.arrival(request.arrival)
        index = self._ranks.of(arrival.job)
        if index is not None and index.head.generation == arrival.generation:
            mine = index.ranks(request.worker_id, request.incarnation)
            if not all(rank in mine for rank in arrival.ranks):
                raise Refused(f"{request.worker_id[:128]} does not run all of these ranks: {arrival.ranks}")
        call = _Call()
        self._barriers.arrive(arrival, call)
        try:
            return pb.WaitBarrierResponse(outcome=await call.ended)
        finally:
            self._barriers.forget(call, arrival.job)

    async def list(self, request: pb.ListBarriersRequest) -> pb.ListBarriersResponse:
        now_ms = asyncio.get_running_loop().time() * 1000
        job = await existing_job(self._context, request.job)
        return pb.ListBarriersResponse(
            open=[wire.open_message(open_round, now_ms) for open_round in self._barriers.open(request.job)],
            recent=list(_outcomes(job)),
        )


def _outcomes(job: JobView) -> Iterator[pb.BarrierOutcome]:
    """Yield the outcomes that are still kept, of every barrier and generation."""
    for name in job.view.names(job.keys.barriers):
        for generation in job.view.names(job.keys.barrier_name(name)):
            for round_ in job.view.names(job.keys.barrier_generation(name, int(generation))):
                if not round_.isdecimal():
                    continue  # the floor
                key = BarrierKey(job.keys.name, name, int(generation), int(round_))
                path = job.keys.outcome(name, key.generation, key.round)
                outcome = job.view.entry(path, BarrierOutcome)
                if outcome is not None:
                    yield wire.outcome_message(job, key, outcome)
