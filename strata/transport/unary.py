"""Unary calls that find an answering coordinator.

One channel to one endpoint is kept open. If a call fails with a retryable error or a refusal of our credentials,
another replica may answer the call. So the same request is sent to the next endpoint, until the call's time is up.
That is safe because every request of ours is idempotent: a request identifies its subject by an id that the caller
chose, or only reads.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from strata.config import Credentials
from strata.core.restore.lineage import is_restored
from strata.errors import (
    ClusterRestored,
    ConfigError,
    InvalidArgument,
    StrataError,
    Unauthenticated,
    Unavailable,
)
from strata.session import fork
from strata.session.endpoints import Endpoint, Route
from strata.session.terms import another_cluster
from strata.transport.channel import Connection, connected
from strata.v1 import (
    admin_pb2,
    barriers_pb2,
    checkpoints_pb2,
    datasets_pb2,
    members_pb2,
    recovery_pb2,
    worlds_pb2,
)
from strata.v1.common_pb2 import Token
from strata.wire.status import translated

_WHERE: Final = (
    "check the endpoints (--endpoints or STRATA_ENDPOINTS), and that coordinators and a majority of etcd run:"
    " strata doctor checks both"
)
ATTEMPT_S: Final = 3.0
"""Seconds one replica has for an ordinary call before another replica is tried."""


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    response: type[Message]


_SERVICES: Final = (
    admin_pb2.DESCRIPTOR,
    barriers_pb2.DESCRIPTOR,
    checkpoints_pb2.DESCRIPTOR,
    datasets_pb2.DESCRIPTOR,
    members_pb2.DESCRIPTOR,
    recovery_pb2.DESCRIPTOR,
    worlds_pb2.DESCRIPTOR,
)
METHODS: Final[dict[type[Message], Method]] = {
    GetMessageClass(method.input_type): Method(
        f"/{service.full_name}/{method.name}", GetMessageClass(method.output_type)
    )
    for file in _SERVICES
    for service in file.services_by_name.values()
    for method in service.methods
}
"""Every unary method by the class of its request; no two methods share a class."""


@dataclass(slots=True)
class _Line:
    """A channel in use, and the stack that closes it once no call uses it."""

    endpoint: Endpoint
    connection: Connection
    stack: AsyncExitStack
    users: int = 0


class UnaryClient:
    """Calls any of our unary methods at any endpoint that answers. For one event loop."""

    def __init__(
        self, endpoints: Sequence[Endpoint], rng: random.Random, credentials: Credentials | None = None
    ) -> None:
        fork.allow_grpc()
        self._credentials = credentials
        self._route = Route(endpoints, rng)
        self._line: _Line | None = None
        self._dial_lock = asyncio.Lock()
        self.token = Token()

    async def call(self, request: Message, *, timeout_s: float, attempt_s: float = ATTEMPT_S) -> Any:
        """Return the response to `request`; try the next replica after `attempt_s` without an answer.

        Raise `Unavailable` if no replica answered within `timeout_s`: the request may have taken effect.
        """
        method = METHODS.get(type(request))
        if method is None:
            raise InvalidArgument(f"no call takes a {type(request).__name__}")
        # messages, not errors: an error's traceback would keep this frame, and with it the failed connections
        failures: dict[str, str] = {}
        refusals = 0
        restored = False
        try:
            deadline = asyncio.get_running_loop().time() + timeout_s
            async with asyncio.timeout_at(deadline):
                while True:
                    try:
                        line = await self._connect(deadline)
                        request.token.CopyFrom(self.token)  # type: ignore[attr-defined]  # every request has one
                        return await self._attempt(line, method, request, attempt_s)
                    except ClusterRestored:
                        if restored:
                            raise
                        restored = True  # once per call: raised again, it ends the call
                        self.token = Token()
                    except StrataError as error:
                        refusals = 0 if error.retryable else refusals + 1
                        # Refusals count only in a row, because a replica that is down may serve later. One more
                        # refusal than there are replicas is needed, because the first refusal may be of a
                        # credential that was renewed since.
                        if _answers_for_all(error) or refusals > self._route.count:
                            raise
                        failures[str(self._route.current)] = error.message
        except TimeoutError:
            reasons = "; ".join(failures.values()) or "no connection was established"
            raise Unavailable(
                f"no coordinator answered within {timeout_s:g} s: {reasons}", hint=_WHERE
            ) from None

    async def close(self) -> None:
        """Close the channel once the calls on it are done; a later call opens another channel."""
        line, self._line = self._line, None
        if line is not None:
            await self._close_if_unused(line)

    async def _attempt(self, line: _Line, method: Method, request: Message, attempt_s: float) -> Any:
        line.users += 1
        try:
            invoke: Any = line.connection.channel.unary_unary(
                method.path,
                request_serializer=type(request).SerializeToString,
                response_deserializer=method.response.FromString,
            )
            with translated(str(line.endpoint)):
                response = await invoke(request, timeout=attempt_s, metadata=line.connection.metadata)
            self._take_token(response.token)
        except (StrataError, asyncio.CancelledError) as error:
            if self._line is line and not (isinstance(error, StrataError) and _answers_for_all(error)):
                self._line = None  # this endpoint gave no answer: the next attempt tries another
            raise
        finally:
            line.users -= 1
            await self._close_if_unused(line)
        self._route.reached()
        return response

    async def _close_if_unused(self, line: _Line) -> None:
        """Close a line that is no longer current, once no call uses it."""
        if line is not self._line and not line.users:
            await line.stack.aclose()

    def _take_token(self, token: Token) -> None:
        if not token.uid:
            return
        if is_restored(self.token.uid, token.uid):
            self.token = Token()  # revisions of the cluster before its restore mean nothing now
        if self.token.uid and self.token.uid != token.uid:
            raise another_cluster(self.token.uid, token.uid, str(self._route.current))
        self.token = Token(uid=token.uid, revision=max(token.revision, self.token.revision))

    async def _connect(self, deadline: float) -> _Line:
        """Return the line in use, or a new one to the next endpoint.

        The pause before dialling uses at most half of a call's remaining time, so that every call makes a try
        before it fails.
        """
        async with self._dial_lock:
            if self._line is None:
                endpoint, delay_s = self._route.next()
                left_s = deadline - asyncio.get_running_loop().time()
                await asyncio.sleep(min(delay_s, left_s / 2))
                async with AsyncExitStack() as stack:
                    connection = await stack.enter_async_context(
                        connected(endpoint, credentials=self._credentials)
                    )
                    self._line = _Line(endpoint, connection, stack.pop_all())
            return self._line


def _answers_for_all(error: StrataError) -> bool:
    """Return whether every replica would give the same error.

    A single replica may have another certificate than the others, or an older list of tokens.
    """
    return not (error.retryable or isinstance(error, ConfigError | Unauthenticated))
