"""The table of methods, one row each, for unary calls, calls on a session and the dashboard.

A row names a method and the function that answers it; `core.access.authority.RULES` defines which callers may
call the method. Most methods change one job, and consist of four functions (`change`): decode the request,
decide on the view, settle the decision, find the fields of the response. Every call takes the same steps: wait until
the view has reached the caller's token, check that the caller acts for itself only, answer, and stamp the response
with the view's revision.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from strata.coordinator.access.permission import check_call, hide_others
from strata.coordinator.context import ReplicaContext, existing_job
from strata.coordinator.view import floors
from strata.coordinator.view.mirror import Mirror
from strata.core.access.authority import RULES, Identity, call_name
from strata.core.job import JobView
from strata.core.kv.txn import Decision
from strata.errors import InvalidArgument, Refused
from strata.v1 import session_pb2

Answer = Callable[[Any, Identity | None], Awaitable[Any]]
"""Takes a request and the caller's identity; returns the response without its token."""
Decode = Callable[[Any], Any]
"""Takes a request; returns the decoded request. `InvalidArgument` if the request is invalid."""
Decide = Callable[[JobView, Any], Decision]
Find = Callable[[JobView, Any], Mapping[str, Any]]
"""Takes the view of the job after the change, and the decoded request; returns the fields of the response."""


def _services() -> dict[str, ServiceDescriptor]:
    """Return the services of `strata.v1` by name; each service has a proto file of its own."""
    names = sorted({method.partition(".")[0] for method in RULES})
    files = {"Sessions": "session"}
    return {
        name: import_module(f"strata.v1.{files.get(name, name.lower())}_pb2").DESCRIPTOR.services_by_name[
            name
        ]
        for name in names
    }


SERVICES: Final = _services()


def descriptor(method: str) -> MethodDescriptor:
    """Return the descriptor of a method, such as "Worlds.GetJob"."""
    service, _, name = method.partition(".")
    return SERVICES[service].methods_by_name[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One unary method of `strata.v1`, and the function that answers it."""

    method: str
    answer: Answer
    default_job: str = ""
    """The job of a request that names none."""
    waits: bool = True
    """Whether a replica that is behind its caller catches up first. False for answers about the replica itself."""


def change(
    context: ReplicaContext,
    method: str,
    decode: Decode,
    decide: Decide,
    find: Find = lambda _job, _wanted: {},
    *,
    exists: bool = False,
) -> Row:
    """Return the row of a method that changes the job named in the request; `exists`: the job must exist."""
    response: type[Message] = GetMessageClass(descriptor(method).output_type)

    async def answer(request: Any, _identity: Identity | None) -> Message:
        decoded = decode(request)
        if exists:
            await existing_job(context, request.job)
        job = await settled(context, request.job, lambda job: decide(job, decoded))
        return response(**find(job, decoded))

    return Row(method=method, answer=answer)


async def settled(context: ReplicaContext, name: str, decide: Callable[[JobView], Decision]) -> JobView:
    """Settle a decision about a job; return the job as the view then shows it. Raise the decision's refusal."""
    keys = context.keys.job(name)
    await context.executor.settle(lambda view: decide(JobView(view, keys)), coalesce=True)
    return context.job(name)


def as_it_is(request: Any) -> Any:
    """Return a request that needs no decoding."""
    return request


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The caller, as its session proves it."""

    job: str
    worker: str
    incarnation: int
    identity: Identity | None = None


NO_SESSION: Final = None
"""The caller of a unary request: it has no session, only an identity."""


class Calls:
    """Answers requests by name; the names are those of `Call` in session.proto."""

    def __init__(self, mirror: Mirror, *tables: Iterable[Row], cluster: str) -> None:
        self._mirror = mirror
        self._cluster = cluster
        self._rows = {call_name(row.method): row for rows in tables for row in rows}

    async def answer(
        self, name: str, request: Any, caller: Caller | None, identity: Identity | None = None
    ) -> Any:
        """Return the response to one request; raise its refusal."""
        if caller is not None:
            _check(request, caller)
            identity = caller.identity
        row = self._rows[name]
        if row.default_job:
            request.job = request.job or row.default_job
        check_call(identity, row.method, request, self._cluster)
        if row.waits:
            await floors.honour(self._mirror, request.token)
        response = await row.answer(request, identity)
        hide_others(identity, response)
        floors.stamp(response.token, self._mirror)
        return response

    async def reply(self, call: session_pb2.Call, caller: Caller) -> session_pb2.Reply:
        """Answer a request that came on a session."""
        name = call.WhichOneof("request")
        if name is None or name not in self._rows:
            raise InvalidArgument("a call that this replica does not know", hint="are both of one release?")
        response = await self.answer(name, getattr(call, name), caller)
        reply = session_pb2.Reply(token=response.token)
        getattr(reply, name).CopyFrom(response)
        return reply


def _check(request: Any, caller: Caller) -> None:
    """Return if the caller acts on its own job and for itself; a request without a job means the caller's job."""
    request.job = request.job or caller.job
    if request.job != caller.job:
        raise Refused(f"this session belongs to job {caller.job}, the request to {request.job[:128]}")
    fields = request.DESCRIPTOR.fields_by_name
    if "author" in fields and (
        request.author.worker_id != caller.worker or request.author.incarnation > caller.incarnation
    ):  # an older incarnation of the caller passes here: the decision refuses it as stale
        raise Refused(
            f"this session is that of {caller.worker}, incarnation {caller.incarnation}; the request's author"
            f" is {request.author.worker_id[:128]}, incarnation {request.author.incarnation}",
            hint="a member speaks for its own ranks only",
        )
