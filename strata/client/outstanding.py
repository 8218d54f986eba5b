"""What a session has asked for and not yet been told the end of.

All of it is sent again after every reconnect, because the replica that heard it may be gone:
arrivals with their age, calls and rank exits with the same ids and contents. Each is made to be
repeated: an arrival is a fact, a call carries its attempt or digest, an exit its rank.

Times are `loop.time()`, given by the caller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from google.protobuf.message import Message

from strata.errors import InvalidArgument, StaleGeneration, StrataError
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome

MAX_PAYLOAD_BYTES = 4096


@dataclass(frozen=True, slots=True)
class RoundKey:
    """One round of one barrier."""

    name: str
    generation: int
    round: int


@dataclass(slots=True)
class _Arrived:
    payload: bytes
    phase: str
    at: float
    sent: bool = False


@dataclass(slots=True, kw_only=True)
class _OpenRound:
    job: str
    participants: tuple[int, ...]
    timeout_ms: int
    outcome: asyncio.Future[BarrierOutcome]
    ranks: dict[int, _Arrived] = field(default_factory=dict)


class OpenArrivals:
    """The arrivals of this session's ranks whose rounds have no outcome yet."""

    def __init__(self) -> None:
        self._rounds: dict[RoundKey, _OpenRound] = {}

    def __len__(self) -> int:
        return len(self._rounds)

    def add(self, arrival: Arrival, now: float) -> asyncio.Future[BarrierOutcome]:
        """Keep the arrival until its round ends, and return the future of that end.

        Arrivals of several ranks at one round share the future; the same rank again changes
        nothing. `InvalidArgument` when the arrival contradicts itself or an earlier one.
        """
        _check(arrival)
        key = RoundKey(arrival.name, arrival.generation, arrival.round)
        open_round = self._rounds.get(key)
        if open_round is None:
            open_round = self._rounds[key] = _OpenRound(
                job=arrival.job,
                participants=tuple(arrival.participants),
                timeout_ms=arrival.timeout_ms,
                outcome=asyncio.get_running_loop().create_future(),
            )
        elif open_round.participants != tuple(arrival.participants):
            raise InvalidArgument(
                f"barrier {arrival.name!r} round {arrival.round} was begun with other participants",
                hint="give a barrier of other ranks another name",
            )
        since = now - arrival.age_ms / 1000
        for i, rank in enumerate(arrival.ranks):
            open_round.ranks.setdefault(
                rank,
                _Arrived(
                    payload=arrival.payloads[i] if arrival.payloads else b"",
                    phase=arrival.phases[i] if arrival.phases else "",
                    at=since,
                ),
            )
        return open_round.outcome

    def unsent(self, now: float) -> list[Arrival]:
        """Return, one message a round, the arrivals not sent on this connection yet."""
        messages = []
        for key, open_round in self._rounds.items():
            ranks = sorted(rank for rank, arrived in open_round.ranks.items() if not arrived.sent)
            if ranks:
                messages.append(_message(key, open_round, ranks, now))
        return messages

    def disconnected(self) -> None:
        """Take note that whoever was told may have forgotten: everything is unsent again."""
        for open_round in self._rounds.values():
            for arrived in open_round.ranks.values():
                arrived.sent = False

    def end(self, outcome: BarrierOutcome) -> None:
        """Give the round its outcome; one that is not awaited here is no error."""
        key = RoundKey(outcome.name, outcome.generation, outcome.round)
        open_round = self._rounds.pop(key, None)
        if open_round is not None and not open_round.outcome.done():
            open_round.outcome.set_result(outcome)

    def end_before(self, generation: int) -> None:
        """End the rounds of generations older than `generation` with `StaleGeneration`."""
        stale = [key for key in self._rounds if key.generation < generation]
        for key in stale:
            _fail(
                self._rounds.pop(key).outcome,
                StaleGeneration(
                    f"generation {key.generation} ended while barrier {key.name!r} was open;"
                    f" the world is at generation {generation}"
                ),
            )

    def fail(self, error: StrataError) -> None:
        """End every round with `error`: the session is over."""
        rounds, self._rounds = self._rounds, {}
        for open_round in rounds.values():
            _fail(open_round.outcome, error)


@dataclass(slots=True)
class _OpenCall:
    message: Message
    reply: asyncio.Future[Message]
    sent: bool = False


class OpenCalls:
    """Requests by id that have no reply yet, in the order they were made."""

    def __init__(self) -> None:
        self._calls: dict[int, _OpenCall] = {}

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, id_: int, message: Message) -> asyncio.Future[Message]:
        """Keep the request until `drop`; return the future of its reply."""
        reply: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._calls[id_] = _OpenCall(message, reply)
        return reply

    def drop(self, id_: int) -> None:
        """Forget the request; a reply that still comes is ignored."""
        self._calls.pop(id_, None)

    def unsent(self) -> Iterator[Message]:
        """Yield the requests that were not sent on this connection, and count them as sent."""
        for call in self._calls.values():
            if not call.sent and not call.reply.done():
                call.sent = True
                yield call.message

    def disconnected(self) -> None:
        """Take note that everything has to be sent again."""
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
        """End every request with `error`: the session is over."""
        for call in self._calls.values():
            _fail(call.reply, error)


def _fail(future: asyncio.Future[BarrierOutcome] | asyncio.Future[Message], error: StrataError) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # it may be that nobody waits (any more); that is no loss


def _message(key: RoundKey, open_round: _OpenRound, ranks: Sequence[int], now: float) -> Arrival:
    """Return one arrival for all of `ranks`, as old as the oldest, and count them as sent."""
    arrived = [open_round.ranks[rank] for rank in ranks]
    for one in arrived:
        one.sent = True
    return Arrival(
        job=open_round.job,
        name=key.name,
        generation=key.generation,
        round=key.round,
        ranks=ranks,
        payloads=[a.payload for a in arrived] if any(a.payload for a in arrived) else (),
        participants=open_round.participants,
        age_ms=max(0, round(1000 * (now - min(a.at for a in arrived)))),
        timeout_ms=open_round.timeout_ms,
        phases=[a.phase for a in arrived] if any(a.phase for a in arrived) else (),
    )


def _check(arrival: Arrival) -> None:
    def parallel(values: Iterable[object]) -> bool:
        return len(list(values)) in {0, len(arrival.ranks)}

    if not arrival.ranks or not parallel(arrival.payloads) or not parallel(arrival.phases):
        raise InvalidArgument("an arrival names its ranks, with a payload and a phase each or none")
    if arrival.participants and not set(arrival.ranks) <= set(arrival.participants):
        raise InvalidArgument(f"ranks {list(arrival.ranks)} do not take part in barrier {arrival.name!r}")
    for payload in arrival.payloads:
        if len(payload) > MAX_PAYLOAD_BYTES:
            raise InvalidArgument(
                f"a barrier payload has at most {MAX_PAYLOAD_BYTES} bytes, not {len(payload)}",
                hint="put the data into a file and pass its name",
            )
