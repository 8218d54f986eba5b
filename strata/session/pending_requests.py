"""The open requests of a session: arrivals without an outcome, calls and exits without a reply.

All of them are sent again after every reconnect, because the replica that received them may be lost: arrivals
with their age, calls and rank exits with the same ids and contents. Each is idempotent: an arrival states a
fact, a call contains its attempt or digest, and an exit names its rank.

Times are `loop.time()`, given by the caller.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple

from google.protobuf.message import Message

from strata.core.barriers.arrivals import MAX_PHASE_CHARS, payload_limit
from strata.core.ids import checked_id
from strata.errors import InvalidArgument, QuotaExceeded, StaleGeneration, StrataError
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome


class RoundKey(NamedTuple):
    """One round of one barrier of this session's job."""

    name: str
    generation: int
    round: int


@dataclass(slots=True, kw_only=True)
class _Arrived:
    payload: bytes
    phase: str
    at_s: float
    deadline_s: float
    sent: bool = False


@dataclass(slots=True, kw_only=True)
class _OpenRound:
    job: str
    participants: tuple[int, ...]
    ranks: dict[int, _Arrived] = field(default_factory=dict)
    waiting: dict[frozenset[int], asyncio.Future[BarrierOutcome]] = field(default_factory=dict)

    def fail(self, ranks: Iterable[int], error: StrataError) -> None:
        """Forget the arrivals of `ranks`, and fail the futures that wait for them."""
        removed = set(ranks)
        for rank in removed:
            self.ranks.pop(rank, None)
        for group in [group for group in self.waiting if group & removed]:
            _fail(self.waiting.pop(group), error)


class OpenArrivals:
    """The arrivals of this session's ranks whose rounds have no outcome yet."""

    def __init__(self) -> None:
        self._rounds: dict[RoundKey, _OpenRound] = {}

    @cached_property
    def _loop(self) -> asyncio.AbstractEventLoop:
        return asyncio.get_running_loop()

    def add(self, arrival: Arrival, now_s: float, size: int) -> asyncio.Future[BarrierOutcome]:
        """Keep the arrival until its round ends, and return the future of the outcome.

        Arriving again changes nothing and returns the same future. `size` is that of the world, or 0 if
        unknown. Raise `InvalidArgument` if the arrival is inconsistent in itself or contradicts an earlier
        arrival.
        """
        _check(arrival, size)
        key = RoundKey(arrival.name, arrival.generation, arrival.round)
        open_round = self._rounds.get(key)
        if open_round is None:
            open_round = _OpenRound(job=arrival.job, participants=tuple(arrival.participants))
            self._rounds[key] = open_round
        elif open_round.participants != tuple(arrival.participants):
            raise InvalidArgument(
                f"barrier {arrival.name!r} round {arrival.round} was begun with other participants",
                hint="give a barrier of other ranks another name",
            )
        at_s = now_s - arrival.age_ms / 1000
        for i, rank in enumerate(arrival.ranks):
            open_round.ranks.setdefault(
                rank,
                _Arrived(
                    payload=arrival.payloads[i] if arrival.payloads else b"",
                    phase=arrival.phases[i][:MAX_PHASE_CHARS] if arrival.phases else "",
                    at_s=at_s,
                    deadline_s=at_s + arrival.timeout_ms / 1000 if arrival.timeout_ms else math.inf,
                ),
            )
        group = frozenset(arrival.ranks)
        outcome = open_round.waiting.get(group)
        if outcome is None or outcome.done():
            outcome = open_round.waiting[group] = self._loop.create_future()
        return outcome

    def unsent(self, now_s: float) -> list[Arrival]:
        """Return the arrivals not yet sent on this connection, one message per round."""
        messages = []
        for key, open_round in self._rounds.items():
            ranks = sorted(rank for rank, arrived in open_round.ranks.items() if not arrived.sent)
            if ranks:
                messages.append(_message(key, open_round, ranks, now_s))
        return messages

    def disconnected(self) -> None:
        """Mark every arrival unsent: the replica that received it may have forgotten it."""
        for open_round in self._rounds.values():
            for arrived in open_round.ranks.values():
                arrived.sent = False

    def end(self, outcome: BarrierOutcome) -> None:
        """Give the round its outcome; an outcome that is not awaited here is no error."""
        open_round = self._rounds.pop(RoundKey(outcome.name, outcome.generation, outcome.round), None)
        for future in open_round.waiting.values() if open_round is not None else ():
            if not future.done():
                future.set_result(outcome)

    def refuse(self, key: RoundKey, ranks: Iterable[int], error: StrataError) -> None:
        """Fail the arrivals of these ranks with `error`; the round goes on without these arrivals."""
        open_round = self._rounds.get(key)
        if open_round is not None:
            open_round.fail(ranks, error)
            if not open_round.ranks:
                del self._rounds[key]

    def end_before(self, generation: int, reason: str) -> None:
        """End rounds of generations before `generation` with `StaleGeneration`; `reason` says why `generation`
        began.
        """
        for key in [key for key in self._rounds if key.generation < generation]:
            open_round = self._rounds.pop(key)
            error = StaleGeneration(
                f"generation {key.generation} ended while barrier {key.name!r} was open;"
                f" the world is at generation {generation}: {reason}"
            )
            open_round.fail(tuple(open_round.ranks), error)

    def fail(self, error: StrataError) -> None:
        """Fail every round with `error`: the session is over."""
        rounds, self._rounds = self._rounds, {}
        for open_round in rounds.values():
            open_round.fail(tuple(open_round.ranks), error)


CALLS_AT_ONCE: Final = 128
"""The most requests that may await their reply on one connection: half of the other side's limit, because the
other side may still work on requests that this side has dropped. An agent sends requests for up to a thousand
ranks."""


@dataclass(slots=True)
class _OpenCall:
    message: Message
    reply: asyncio.Future[Message]
    sent: bool = False


class OpenCalls:
    """Requests by id that have no reply yet, in the order they were made."""

    def __init__(self) -> None:
        self._calls: dict[int, _OpenCall] = {}

    def add(self, id_: int, message: Message) -> asyncio.Future[Message]:
        """Keep the request until `drop`; return the future of its reply."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[id_] = _OpenCall(message, reply)
        return reply

    def drop(self, id_: int) -> None:
        """Forget the request; a reply that still comes is ignored."""
        self._calls.pop(id_, None)

    def unsent(self) -> Iterator[Message]:
        """Yield the requests that may be sent on this connection now, and count them as sent.

        Further requests may be sent once a reply has come or a request is dropped.
        """
        waiting = [call for call in self._calls.values() if not call.reply.done()]
        free = CALLS_AT_ONCE - sum(call.sent for call in waiting)
        for call in waiting:
            if free <= 0:
                return
            if not call.sent:
                call.sent = True
                free -= 1
                yield call.message

    def disconnected(self) -> None:
        """Mark every request unsent."""
        for call in self._calls.values():
            call.sent = False

    def answer(self, id_: int, result: Message | StrataError) -> None:
        """Give the request its reply."""
        call = self._calls.get(id_)
        if call is None or call.reply.done():
            return
        if isinstance(result, StrataError):
            call.reply.set_exception(result)
        else:
            call.reply.set_result(result)

    def fail(self, error: StrataError) -> None:
        """Fail every request with `error`: the session is over."""
        for call in self._calls.values():
            _fail(call.reply, error)


def _fail(future: asyncio.Future[BarrierOutcome] | asyncio.Future[Message], error: StrataError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # mark the error as retrieved: perhaps nobody waits for it any more


def _message(key: RoundKey, open_round: _OpenRound, ranks: Sequence[int], now_s: float) -> Arrival:
    """Return one arrival for all of `ranks`, and count them as sent.

    The message's age is that of the oldest arrival; its timeout follows the earliest deadline.
    """
    arrived = [open_round.ranks[rank] for rank in ranks]
    for one in arrived:
        one.sent = True
    since_s = min(a.at_s for a in arrived)
    deadline_s = min(a.deadline_s for a in arrived)
    return Arrival(
        job=open_round.job,
        name=key.name,
        generation=key.generation,
        round=key.round,
        ranks=ranks,
        payloads=[a.payload for a in arrived] if any(a.payload for a in arrived) else (),
        participants=open_round.participants,
        age_ms=max(0, round(1000 * (now_s - since_s))),
        timeout_ms=0 if deadline_s == math.inf else max(1, round(1000 * (deadline_s - since_s))),
        phases=[a.phase for a in arrived] if any(a.phase for a in arrived) else (),
    )


def _check(arrival: Arrival, size: int) -> None:
    """Refuse an arrival that is too large for a stream or inconsistent: a replica would not notice once the round
    has ended.
    """
    checked_id("barrier", arrival.name)
    count = len(arrival.ranks)
    if not count or len(arrival.payloads) not in {0, count} or len(arrival.phases) not in {0, count}:
        raise InvalidArgument("an arrival names its ranks, with a payload and a phase each or none")
    if arrival.participants and not set(arrival.ranks) <= set(arrival.participants):
        raise InvalidArgument(f"ranks {list(arrival.ranks)} do not take part in barrier {arrival.name!r}")
    limit = payload_limit(len(arrival.participants) or size)
    for payload in arrival.payloads:
        if len(payload) > limit:
            raise QuotaExceeded(
                f"a payload of {len(payload)} bytes at barrier {arrival.name!r}: the limit of a rank is {limit}",
                hint="put the data into a file and pass its name",
            )
