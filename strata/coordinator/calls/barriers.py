"""Barriers for clients without a session: a WaitBarrier call is the arrival (PROTOCOLS 5.8).

The arrival is forwarded and recorded like any other. So the client may call any replica, even one that stops
before the round ends. Only the answer depends on that replica: the call ends with `Unavailable` after `WAIT_S`, or
when the replica stops. The client then repeats the call for the same round until the round ends. An arrival for a
finished round receives its outcome.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from strata.coordinator.barriers.rounds import Barriers
from strata.coordinator.calls.pages import PAGE_BYTES, fill, page
from strata.coordinator.calls.table import Row
from strata.coordinator.context import ReplicaContext, existing_job
from strata.coordinator.view.rank_indexes import RankIndexes
from strata.core.access.authority import Identity
from strata.core.barriers.outcomes import Arrival, BarrierKey
from strata.core.job import JobView
from strata.core.kv.records import BarrierOutcome
from strata.core.kv.view import Entry
from strata.errors import NotFound, Refused, StaleIncarnation, StrataError, Unavailable
from strata.v1 import barriers_pb2 as pb
from strata.wire import barriers as wire

WAIT_S: Final = 30.0
"""How long one call waits. The wait is bounded for two reasons: a client or proxy that disappears silently would
leave its call behind, and a client without an answer cannot distinguish a long barrier from a lost answer."""


class _Call:
    """One WaitBarrier call, as a waiter of its round."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[pb.BarrierOutcome] = asyncio.get_running_loop().create_future()

    def outcome(self, key: BarrierKey, message: pb.BarrierOutcome) -> None:
        if not self.ended.done():
            self.ended.set_result(message)

    def refused(self, key: BarrierKey, ranks: tuple[int, ...], error: StrataError) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)


class BarrierCalls:
    """Answers the methods of `Barriers`."""

    def __init__(self, context: ReplicaContext, ranks: RankIndexes, barriers: Barriers) -> None:
        self._context = context
        self._ranks = ranks
        self._barriers = barriers
        self._waiting: dict[_Call, BarrierKey] = {}

    def rows(self) -> Iterator[Row]:
        yield Row(method="Barriers.WaitBarrier", answer=self.wait)
        yield Row(method="Barriers.ListBarriers", answer=self.list)

    def part(self) -> None:
        """End every waiting call with `Unavailable`: this replica stops, and the client then calls another."""
        for call, key in self._waiting.items():
            call.refused(key, (), Unavailable("this replica stops", hint=_AGAIN))

    async def wait(
        self, request: pb.WaitBarrierRequest, _identity: Identity | None
    ) -> pb.WaitBarrierResponse:
        """Return the outcome once the round is released; raise an error for any other result.

        Raise `Unavailable` if the round is still open after `WAIT_S`. The arrival of a client that disconnects
        still counts.
        """
        arrival = wire.arrival(request.arrival)
        await self._check(request, arrival)
        call = _Call()
        self._waiting[call] = arrival.key
        self._barriers.arrive(arrival, call)
        try:
            async with asyncio.timeout(WAIT_S):
                outcome = await call.ended
        except TimeoutError:
            raise Unavailable(f"{arrival.key} is still open", hint=_AGAIN) from None
        finally:
            del self._waiting[call]
            self._barriers.forget(call, arrival.job)
        wire.check_released(outcome)
        return _released(outcome, request.page_token)

    async def _check(self, request: pb.WaitBarrierRequest, arrival: Arrival) -> None:
        """Return if the caller may arrive for these ranks; otherwise raise a refusal from a fresh view (2.2)."""
        if self._refusal(request, arrival) is not None:
            await self._context.mirror.fresh()
            refusal = self._refusal(request, arrival)
            if refusal is not None:
                raise refusal

    def _refusal(self, request: pb.WaitBarrierRequest, arrival: Arrival) -> StrataError | None:
        worker, incarnation = request.worker_id, request.incarnation
        job = self._context.job(arrival.job)
        if not job.exists:
            return NotFound(f"no job {arrival.job} exists", hint="a job begins with its first member")
        index = self._ranks.of(arrival.job)
        if index is None or index.head.generation < arrival.generation:
            return Refused(f"{arrival.key}: there is no such generation yet", hint="read the world first")
        if index.head.generation > arrival.generation:
            return None  # the caller receives the round's outcome, or that its generation has ended
        mine = index.ranks(worker, incarnation)
        if all(rank in mine for rank in arrival.ranks):
            return None
        entry = job.worker(worker)
        if entry is None:
            return NotFound(f"{worker[:128]} is not registered (any more)", hint="register again")
        if entry.create_revision != incarnation:
            return StaleIncarnation(
                f"{worker[:128]} is incarnation {entry.create_revision} now, not {incarnation}"
            )
        return Refused(
            f"{worker[:128]} does not run all of these ranks: {arrival.ranks}",
            hint="a member arrives for its own ranks only",
        )

    async def list(
        self, request: pb.ListBarriersRequest, _identity: Identity | None
    ) -> pb.ListBarriersResponse:
        now_ms = asyncio.get_running_loop().time() * 1000
        job = await existing_job(self._context, request.job)
        open_rounds = [
            (_name(round_.key, ended=False), round_) for round_ in self._barriers.open(request.job)
        ]
        ended = [(_name(key, ended=True), (key, outcome)) for key, outcome in outcomes(job)]

        def part(one: tuple[str, Any]) -> pb.ListBarriersResponse:
            if isinstance(one[1], tuple):
                return pb.ListBarriersResponse(recent=[_ended(job, *one[1])])
            return pb.ListBarriersResponse(open=[wire.open_message(one[1], now_ms)])

        answer = pb.ListBarriersResponse()
        fill(answer, [*open_rounds, *ended], key=lambda one: one[0], part=part, request=request)
        return answer


_AGAIN: Final = "call again with the same round, at any replica"


def _name(key: BarrierKey, *, ended: bool) -> str:
    """Return the key by which rounds are listed: open rounds first."""
    return f"{int(ended)}/{key.name}/{key.generation:020d}/{key.round:020d}"


def _ended(job: JobView, key: BarrierKey, outcome: Entry[BarrierOutcome]) -> pb.BarrierOutcome:
    """Return an outcome for a list, without its payloads (up to half a megabyte) if it is larger than half a page."""
    message = wire.outcome_message(job, key, outcome)
    if message.ByteSize() > PAGE_BYTES // 2:
        message.ClearField("payloads")
    return message


def _released(outcome: pb.BarrierOutcome, token: str) -> pb.WaitBarrierResponse:
    """Return the outcome of a released round, or its payloads after `token`."""
    if not token and outcome.ByteSize() <= PAGE_BYTES:
        return pb.WaitBarrierResponse(outcome=outcome)
    answer = pb.WaitBarrierResponse()
    head = answer.outcome
    if not token:
        head.MergeFrom(outcome)
        head.ClearField("payloads")
    head.job, head.name, head.result = outcome.job, outcome.name, outcome.result
    head.generation, head.round = outcome.generation, outcome.round
    payloads, answer.next_page_token = page(
        outcome.payloads.items(),
        key=lambda one: f"{one[0]:010d}",
        make=lambda one: pb.BarrierOutcome(payloads=dict([one])),
        size=0,
        token=token,
        page_bytes=PAGE_BYTES - head.ByteSize(),
    )
    for each in payloads:
        head.MergeFrom(each)
    return answer


def outcomes(job: JobView) -> Iterator[tuple[BarrierKey, Entry[BarrierOutcome]]]:
    """Yield the stored outcomes of every barrier and generation."""
    for name in job.view.names(job.keys.barriers):
        for generation in job.view.names(job.keys.barrier_name(name)):
            for round_ in job.view.names(job.keys.barrier_generation(name, int(generation))):
                if not round_.isdecimal():
                    continue  # this key is the floor, not a round
                key = BarrierKey(job.keys.name, name, int(generation), int(round_))
                path = job.keys.outcome(name, key.generation, key.round)
                outcome = job.view.entry(path, BarrierOutcome)
                if outcome is not None:
                    yield key, outcome
