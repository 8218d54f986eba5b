"""One table from a request to what answers it, for unary calls, the calls of a session and the dashboard.

A row names a method and what answers it; who may call it stands in `core.access.authority.RULES`. Most methods change one
job, and are four functions (`change`): decode the request, decide on the view, settle, find what to show. Every
answer follows the same steps: honour the caller's token, check that it speaks for itself, do the one thing, say in
the response which revision the caller has now seen.
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
from strata.coordinator.calls.lookups import existing_job
from strata.coordinator.context import ReplicaContext
from strata.coordinator.view import floors
from strata.coordinator.view.mirror import Mirror
from strata.core.access.authority import RULES, Identity, call_name
from strata.core.job import JobView
from strata.core.kv.txn import Decision
from strata.errors import InvalidArgument, Refused
from strata.v1 import session_pb2

Answer = Callable[[Any, Identity | None], Awaitable[Any]]
"""From a request, and who makes it, to the response without its token."""
Decode = Callable[[Any], Any]
"""From a request to what it wants; `InvalidArgument` if that cannot be."""
Decide = Callable[[JobView, Any], Decision]
Find = Callable[[JobView, Any], Mapping[str, Any]]
"""From the job as the view shows it afterwards, and what was wanted, to the fields of the response."""


def _services() -> dict[str, ServiceDescriptor]:
    """Return the services of `strata.v1` by their names; each has the file of its name."""
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
    """Return what the protos say of a method, "Worlds.GetJob"."""
    service, _, name = method.partition(".")
    return SERVICES[service].methods_by_name[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One unary method of `strata.v1`, and what answers it."""

    method: str
    answer: Answer
    default_job: str = ""
    """The job that a request means which names none."""
    waits: bool = True
    """Whether a replica that is behind its caller catches up first. What it says of itself, it says as it is."""


def change(
    context: ReplicaContext,
    method: str,
    decode: Decode,
    decide: Decide,
    find: Find = lambda _job, _wanted: {},
    *,
    exists: bool = False,
) -> Row:
    """Return the row of a method that changes the job which its request names; with `exists` there must be one."""
    response: type[Message] = GetMessageClass(descriptor(method).output_type)

    async def answer(request: Any, _identity: Identity | None) -> Message:
        wanted = decode(request)
        if exists:
            await existing_job(context, request.job)
        job = await settled(context, request.job, lambda job: decide(job, wanted))
        return response(**find(job, wanted))

    return Row(method=method, answer=answer)


async def settled(context: ReplicaContext, name: str, decide: Callable[[JobView], Decision]) -> JobView:
    """Carry a decision about a job out; return the job as the view then shows it. Raises the decision's refusal."""
    keys = context.keys.job(name)
    await context.executor.settle(lambda view: decide(JobView(view, keys)), coalesce=True)
    return context.job(name)


def as_it_is(request: Any) -> Any:
    """Decode a request whose fields are what it wants."""
    return request


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

    def __init__(self, mirror: Mirror, *tables: Iterable[Row], cluster: str) -> None:
        self._mirror = mirror
        self._cluster = cluster
        self._rows = {call_name(row.method): row for rows in tables for row in rows}

    async def answer(
        self, name: str, request: Any, caller: Caller | None, identity: Identity | None = None
    ) -> Any:
        """Return the response to one request; raises the refusal."""
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
