"""One table from a request to what answers it, for the unary services and for a session's calls.

Every answer follows the same steps: honour the caller's token, check that it speaks for itself, do
the one thing, say in the response which revision the caller has now seen.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from strata.coordinator.permission import check_call, hide_others
from strata.coordinator.view import floors
from strata.coordinator.view.mirror import Mirror
from strata.core.authority import Identity
from strata.errors import InvalidArgument, Refused
from strata.v1 import session_pb2

Answer = Callable[[Any], Awaitable[Any]]
"""From a request message to its response message, without the response's token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, as its session proves it."""

    job: str
    worker: str
    incarnation: int
    identity: Identity | None = None


ANYBODY: Final = None
"""The caller of a unary request: it has no session, and its identity is all that is known."""


class Calls:
    """Answers requests by name; the names are those of `Call` in session.proto."""

    def __init__(self, mirror: Mirror, *tables: Mapping[str, Answer], cluster: str) -> None:
        self._mirror = mirror
        self._cluster = cluster
        self._table: dict[str, Answer] = {name: answer for table in tables for name, answer in table.items()}

    async def answer(
        self, name: str, request: Any, caller: Caller | None, identity: Identity | None = None
    ) -> Any:
        """Return the response to one request; raises the refusal."""
        if caller is not None:
            _check(request, caller)
            identity = caller.identity
        check_call(identity, name, request, self._cluster)
        await floors.honour(self._mirror, request.token)
        response = await self._table[name](request)
        hide_others(identity, response)
        response.token.CopyFrom(floors.token(self._mirror))
        return response

    async def reply(self, call: session_pb2.Call, caller: Caller) -> session_pb2.Reply:
        """Answer a request that came on a session."""
        name = call.WhichOneof("request")
        if name is None or name not in self._table:
            raise InvalidArgument(
                "a call that this replica does not know", hint="it may be of an older version"
            )
        response = await self.answer(name, getattr(call, name), caller)
        reply = session_pb2.Reply(token=response.token)
        getattr(reply, name).CopyFrom(response)
        return reply


def _check(request: Any, caller: Caller) -> None:
    """Return if the caller speaks of its own job and for itself; a job left out is its own."""
    request.job = request.job or caller.job
    if request.job != caller.job:
        raise Refused(f"this session belongs to job {caller.job}, the request to {request.job[:128]}")
    fields = request.DESCRIPTOR.fields_by_name
    if "author" in fields and (
        request.author.worker_id != caller.worker or request.author.incarnation > caller.incarnation
    ):  # of an older incarnation of its own the decision says that it is stale
        raise Refused(
            f"this session is that of {caller.worker}, incarnation {caller.incarnation}; the request's author"
            f" is {request.author.worker_id[:128]}, incarnation {request.author.incarnation}",
            hint="a member speaks for its own ranks only",
        )
