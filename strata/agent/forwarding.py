"""`Carrier`: takes arrivals and calls from a session that an agent serves, and sends them unchanged to coordinators.

The handlers of a rank's session and of a standalone process's session derive from it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from google.protobuf.message import Message

from strata.errors import InvalidArgument, StrataError
from strata.session.served import Session
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.common_pb2 import Token
from strata.v1.session_pb2 import ArrivalRefused, Call, Down, Reply
from strata.wire.errors import pack


class Upstream(Protocol):
    """The part of the session with the coordinators that a carrier needs."""

    @property
    def token(self) -> Token:
        """The newest revision seen."""
        ...

    def arrive(self, arrival: Arrival) -> asyncio.Future[BarrierOutcome]:
        """Arrive on behalf of ranks; the future ends with the outcome or the rejection."""
        ...

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to `request`, which must be of a kind that a session carries."""
        ...


class Carrier:
    """The part of a `session.served.Handler` that forwards arrivals and calls to the coordinators.

    This class sends rejections to the rank. Outcomes reach the rank through the observer of the coordinators' session.
    """

    session: Session
    upstream: Upstream

    def check_arrival(self, arrival: Arrival) -> None:
        """Raise an error if this session may not make this arrival."""

    def arrivals(self, arrivals: Sequence[Arrival]) -> None:
        for arrival in arrivals:
            try:
                self.check_arrival(arrival)
                outcome = self.upstream.arrive(arrival)
            except StrataError as error:
                self._refuse(arrival, error)
            else:
                outcome.add_done_callback(partial(self._ended_round, arrival))

    def _ended_round(self, arrival: Arrival, outcome: asyncio.Future[BarrierOutcome]) -> None:
        if not outcome.cancelled() and isinstance(error := outcome.exception(), StrataError):
            self._refuse(arrival, error)

    def _refuse(self, arrival: Arrival, error: StrataError) -> None:
        refused = ArrivalRefused(
            job=arrival.job,
            name=arrival.name,
            generation=arrival.generation,
            round=arrival.round,
            ranks=arrival.ranks,
            error=pack(error),
        )
        self.session.send(Down(arrival_refused=refused))

    async def call(self, call: Call) -> Reply:
        name = call.WhichOneof("request")
        if name is None:
            raise InvalidArgument("a call without a request, or one of a newer version")
        response: Any = await self.upstream.call(getattr(call, name), timeout_s=None)
        return Reply(token=self.upstream.token, **{name: response})
