"""Outcomes of barrier rounds: any replica that has the facts ends a round, by one commit (PROTOCOLS 6.2-6.6).

The outcome is created once, on one key, so release and break exclude each other:

    known facts                                             written, if the key is absent
    ------------------------------------------------------  -------------------------------------
    every participant has arrived                           RELEASED, with the payloads
    a missing participant is dead, failed or done           BROKEN, naming the missing
    the earliest timeout of an arrival has passed           TIMED_OUT, naming the missing

Each of these writes also compares the world's head and the *floor*, the number of the last released round. A newer
head ends a round without a write. Only a release moves the floor, to its own round, and deletes the older rounds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from itertools import islice

import xxhash

from strata.core.barriers.arrivals import (
    Arrival,
    BarrierBook,
    BarrierKey,
    OpenRound,
    participants_digest,
    payload_limit,
)
from strata.core.ids import InstanceId
from strata.core.job import JobView, World
from strata.core.kv.chunks import parts_of
from strata.core.kv.keys import number
from strata.core.kv.records import (
    BarrierArrived,
    BarrierFloor,
    BarrierOutcome,
    BarrierResult,
    PayloadChunk,
    b64,
    encode,
    unb64,
)
from strata.core.kv.txn import Compare, Decision, Delete, Operation, Put, Txn, absent, refusable, unchanged
from strata.core.kv.view import Entry
from strata.core.words import first_few
from strata.errors import Refused, StaleGeneration, StrataError

__all__ = [
    "Arrival",
    "BarrierBook",
    "BarrierKey",
    "OpenRound",
    "decide_arrived",
    "decide_outcome",
    "ended",
    "outcome_payloads",
    "participants_digest",
    "payload_limit",
    "writer_delay_ms",
]

WRITER_STEP_MS = 20
MAX_INLINE_BYTES = 56 * 1024
"""The limit for payloads, as base64, in the outcome itself or in one chunk beside it."""
MAX_MISSING = 2000
"""The maximum number of missing ranks that an outcome lists; its reason has the full number."""
_NAMED = 8


def ended(job: JobView, key: BarrierKey) -> Entry[BarrierOutcome] | StrataError | None:
    """Return the round's outcome, an error if the round is out of date, or None while it may be open.

    An arrival for a round with an outcome gets that outcome, however late it is. The result is final: no newer view
    can contradict it.
    """
    path = job.keys.outcome(key.name, key.generation, key.round)
    outcome = job.view.entry(path, BarrierOutcome)
    if outcome is not None:
        return outcome
    head = job.head()
    if head is not None and head.record.generation > key.generation:
        return StaleGeneration(f"{key}: the world is generation {head.record.generation}")
    floor = job.view.record(job.keys.barrier_floor(key.name, key.generation), BarrierFloor)
    if floor is not None and floor.round >= key.round:
        why = f"{key}: rounds up to {floor.round} have ended"
        return Refused(why, hint="begin at the next round")
    return None


def outcome_payloads(job: JobView, outcome: Entry[BarrierOutcome]) -> dict[int, bytes]:
    """Return the payloads of a released round by rank; ranks without a payload are absent."""
    record = outcome.record
    texts = dict(record.payloads)
    if record.payload_chunks:
        folder = outcome.key.removesuffix("outcome") + "payloads/"
        for chunk in job.view.entries(folder, PayloadChunk):
            texts.update(chunk.record.payloads)
    return {int(rank): unb64(text) for rank, text in texts.items()}


def writer_delay_ms(key: BarrierKey, me: InstanceId, ready: Iterable[InstanceId]) -> int:
    """Return how long a replica that knows all arrivals waits for another replica to write the outcome.

    The ready replicas are in rendezvous-hash order, which differs from key to key. The first writes immediately.
    The k-th, counted from 0, writes after 20 k ms, unless it has seen the outcome by then.
    """
    text = f"\n{key.job}\n{key.name}\n{key.generation}\n{key.round}"

    def score(instance: InstanceId) -> tuple[int, str]:
        return xxhash.xxh3_64_intdigest((instance + text).encode()), instance

    mine = score(me)
    return WRITER_STEP_MS * sum(score(other) > mine for other in set(ready) if other != me)


@refusable
def decide_outcome(
    job: JobView,
    open_round: OpenRound,
    *,
    now_ms: float,
    phases: Mapping[int, str] | None = None,
) -> Decision:
    """Write the round's outcome if the facts known here decide it.

    `phases`: the ranks' last reported phases, to show what the missing ranks were doing. Refusals:
    `StaleGeneration` if a newer head ended the round, `Refused` for a round that is not above the floor.
    """
    key = open_round.key
    end = ended(job, key)
    if isinstance(end, StrataError):
        raise end
    if end is not None:
        return Decision(reason=f"{key} is {end.record.result.value}")
    world = job.world()
    if world is None or world.head.generation != key.generation:
        return Decision(reason=f"{key}: this view does not know its generation yet")
    if open_round.complete:
        return _release(job, open_round)
    missing = open_round.missing()
    arrived, expected = len(open_round.arrived), len(open_round.participants)
    counted = f"{arrived} of {expected} arrived"
    known_phases = {**open_round.phases, **(phases or {})}
    dead = _dead(job, world, missing)
    if dead:
        why = "; ".join(islice(dead.values(), _NAMED))
        reason = f"{why}; {counted}, missing {_named(missing, known_phases)}"
        return _break(job, open_round, BarrierResult.BROKEN, reason, missing)
    if open_round.deadline_ms is not None and now_ms >= open_round.deadline_ms:
        waited_s = (now_ms - open_round.since_ms) / 1000
        reason = f"timed out after {waited_s:.1f} s: {counted}, missing {_named(missing, known_phases)}"
        return _break(job, open_round, BarrierResult.TIMED_OUT, reason, missing)
    return Decision(reason=f"{counted}; waiting for {_named(missing, known_phases)}")


def decide_arrived(job: JobView, open_round: OpenRound) -> Decision:
    """Publish the missing ranks for people.

    No decision reads this record; the caller limits how often it is written.
    """
    key = open_round.key
    if ended(job, key) is not None:
        return Decision(reason=f"{key} has ended")
    path = job.keys.arrived(key.name, key.generation, key.round)
    missing = open_round.missing()
    record = BarrierArrived(
        arrived=len(open_round.arrived),
        expected=len(open_round.participants),
        missing=tuple(missing[:MAX_MISSING]),
    )
    shown = job.view.entry(path, BarrierArrived)
    if shown is not None and shown.record.arrived >= record.arrived:
        return Decision(reason=f"{key}: {shown.record.arrived} arrived, as shown")
    compares = (*_guards(job, key), unchanged(path, job.view.mod_revision(path)))
    put = Put(key=path, value=encode(record))
    reason = f"{key}: {record.arrived} of {record.expected} arrived"
    return Decision(reason=reason, txn=Txn(compares=compares, success=(put,)))


# -- transactions -----------------------------------------------------------------------------


def _guards(job: JobView, key: BarrierKey) -> tuple[Compare, ...]:
    """Compare the head and the floor, and that the round has no outcome."""
    keys, view = job.keys, job.view
    floor = keys.barrier_floor(key.name, key.generation)
    return (
        unchanged(keys.head, view.mod_revision(keys.head)),
        unchanged(floor, view.mod_revision(floor)),
        absent(keys.outcome(key.name, key.generation, key.round)),
    )


def _release(job: JobView, open_round: OpenRound) -> Decision:
    key, keys = open_round.key, job.keys
    texts = {str(rank): b64(data) for rank, data in sorted(open_round.arrived.items()) if data}
    beside = [dict(part) for part in parts_of(texts.items(), _json_bytes, most_bytes=MAX_INLINE_BYTES)]
    inline = beside.pop() if len(beside) == 1 else {}
    reason = f"all {len(open_round.participants)} arrived"
    outcome = BarrierOutcome(
        generation=key.generation,
        round=key.round,
        result=BarrierResult.RELEASED,
        digest=open_round.digest,
        reason=reason,
        payloads=inline,
        payload_chunks=len(beside),
    )
    operations: list[Operation] = [
        Put(key=keys.outcome(key.name, key.generation, key.round), value=encode(outcome)),
        Put(
            key=keys.barrier_floor(key.name, key.generation),
            value=encode(BarrierFloor(round=key.round)),
        ),
    ]
    operations += [
        Put(
            key=keys.payload_chunk(key.name, key.generation, key.round, index),
            value=encode(PayloadChunk(payloads=chunk)),
        )
        for index, chunk in enumerate(beside)
    ]
    if key.round > 1:
        # the range ends before this round's own keys, and the floor sorts after all numbers: etcd refuses
        # a transaction that both deletes and puts a key
        folder = keys.barrier_generation(key.name, key.generation)
        operations.append(Delete(key=folder + number(0), range_end=folder + number(key.round)))
    txn = Txn(compares=_guards(job, key), success=tuple(operations))
    return Decision(reason=f"{key}: {reason}", txn=txn)


def _break(
    job: JobView,
    open_round: OpenRound,
    result: BarrierResult,
    reason: str,
    missing: list[int],
) -> Decision:
    key = open_round.key
    outcome = BarrierOutcome(
        generation=key.generation,
        round=key.round,
        result=result,
        digest=open_round.digest,
        reason=reason,
        missing=tuple(missing[:MAX_MISSING]),
    )
    path = job.keys.outcome(key.name, key.generation, key.round)
    txn = Txn(compares=_guards(job, key), success=(Put(key=path, value=encode(outcome)),))
    return Decision(reason=f"{key} breaks: {reason}", txn=txn)


# -- missing ranks ----------------------------------------------------------------------------


def _json_bytes(item: tuple[str, str]) -> int:
    return len(item[0]) + len(item[1]) + 6  # quotes, colon, comma


def _dead(job: JobView, world: World, missing: Collection[int]) -> dict[int, str]:
    """Return the ranks of `missing` that cannot arrive any more, each with the reason.

    No transaction compares these facts: a `failed`, `done` or `stopped` key stays as long as the head, and a
    removed incarnation never returns.
    """
    generation = world.head.generation
    failed, done, stopped = job.failed(generation), job.done(generation), job.stopped(generation)
    waited_for = set(missing)
    dead = {
        rank: f"rank {rank} of {failed[rank].worker} failed ({failed[rank].reason[:200]})"
        for rank in sorted(waited_for & failed.keys())
    }
    dead |= {rank: f"rank {rank} is done and will not arrive" for rank in sorted(waited_for & done)}
    dead |= {
        rank: f"rank {rank} has stopped as requested and will not arrive"
        for rank in sorted(waited_for & stopped)
    }
    for member in world.members:
        own = waited_for.intersection(member.ranks) - dead.keys()
        worker = job.worker(member.worker) if own else None
        if worker is None or worker.create_revision != member.incarnation:
            dead |= {rank: f"rank {rank} was lost with {member.worker}" for rank in sorted(own)}
    return dead


def _named(ranks: Collection[int], phases: Mapping[int, str]) -> str:
    """Return the first few of the ranks with their phases, and the number of the others."""
    return first_few(
        [f"{rank} ({phases[rank][:60]})" if phases.get(rank) else str(rank) for rank in ranks], _NAMED
    )
