"""Barriers as messages: arrivals (in both directions), outcomes and open rounds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from strata.core.barriers.outcomes import Arrival, BarrierKey, OpenRound, outcome_payloads
from strata.core.job import JobView
from strata.core.kv.chunks import parts_of
from strata.core.kv.records import BarrierOutcome
from strata.core.kv.view import Entry
from strata.errors import BarrierBroken, BarrierTimeout, Refused, StrataError
from strata.v1 import barriers_pb2, session_pb2
from strata.wire.enums import RESULTS
from strata.wire.errors import pack

BATCH_BYTES: Final = 1 << 20


def batches(arrivals: Iterable[barriers_pb2.Arrival]) -> Iterator[list[barriers_pb2.Arrival]]:
    """Divide arrivals so that no message that carries them is too large for a stream."""
    return parts_of(arrivals, barriers_pb2.Arrival.ByteSize, most_bytes=BATCH_BYTES)


def arrival(message: barriers_pb2.Arrival) -> Arrival:
    return Arrival(
        job=message.job,
        name=message.name,
        generation=message.generation,
        round=message.round,
        ranks=tuple(message.ranks),
        payloads=tuple(message.payloads),
        participants=tuple(message.participants),
        age_ms=message.age_ms,
        timeout_ms=message.timeout_ms,
        phases=tuple(message.phases),
    )


def arrival_message(arrival: Arrival) -> barriers_pb2.Arrival:
    return barriers_pb2.Arrival(
        job=arrival.job,
        name=arrival.name,
        generation=arrival.generation,
        round=arrival.round,
        ranks=arrival.ranks,
        payloads=arrival.payloads,
        participants=arrival.participants,
        age_ms=arrival.age_ms,
        timeout_ms=arrival.timeout_ms,
        phases=arrival.phases,
    )


def outcome_message(
    job: JobView, key: BarrierKey, outcome: Entry[BarrierOutcome]
) -> barriers_pb2.BarrierOutcome:
    """Return the outcome of a round, with all payloads."""
    record = outcome.record
    return barriers_pb2.BarrierOutcome(
        job=key.job,
        name=key.name,
        generation=record.generation,
        round=record.round,
        result=RESULTS[record.result],
        reason=record.reason,
        missing=record.missing,
        payloads=outcome_payloads(job, outcome),
        revision=outcome.mod_revision,
    )


def check_released(outcome: barriers_pb2.BarrierOutcome) -> None:
    """Raise the round's error, with the missing ranks, unless the round was released."""
    missing = [f"rank {rank}" for rank in outcome.missing]
    match outcome.result:
        case x if x == barriers_pb2.BARRIER_RESULT_RELEASED:
            return
        case x if x == barriers_pb2.BARRIER_RESULT_TIMED_OUT:
            raise BarrierTimeout(f"barrier {outcome.name!r}: {outcome.reason}", missing=missing)
        case x if x == barriers_pb2.BARRIER_RESULT_BROKEN:
            raise BarrierBroken(f"barrier {outcome.name!r}: {outcome.reason}", missing=missing)
        case _:
            raise Refused(f"barrier {outcome.name!r} ended in a way this version does not know")


def refused_message(
    key: BarrierKey, ranks: tuple[int, ...], error: StrataError
) -> session_pb2.ArrivalRefused:
    """Return the answer to an arrival that does not count."""
    return session_pb2.ArrivalRefused(
        job=key.job,
        name=key.name,
        generation=key.generation,
        round=key.round,
        ranks=ranks,
        error=pack(error),
    )


def open_message(open_round: OpenRound, now_ms: float) -> barriers_pb2.OpenBarrier:
    """Return an open round for display."""
    return barriers_pb2.OpenBarrier(
        name=open_round.key.name,
        generation=open_round.key.generation,
        round=open_round.key.round,
        arrived=len(open_round.arrived),
        expected=len(open_round.participants),
        missing=open_round.missing(),
        age_ms=max(0, int(now_ms - open_round.since_ms)),
    )
