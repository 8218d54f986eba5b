"""Calls to whichever etcd member can answer, with failover.

One endpoint is current and takes every call. A call without a clear answer blames its endpoint, and the next call
goes to the ready endpoint that was blamed longest ago. There are two kinds of calls:

- `once`: takes effect at most once (a transaction). The request is sent again only if the first request certainly
  was not sent, or was rejected for a stale token.
- `repeated`: may be sent any number of times (reads, and writes that are idempotent). Each attempt gets
  `request_s`; all attempts together get `read_s`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from grpc.aio import AioRpcError, Metadata, UnaryUnaryMultiCallable

from strata.errors import NotFound, StrataError, Unavailable
from strata.etcd import errors
from strata.etcd.endpoint import Endpoint, Health
from strata.etcd.guard import Floor, Guard, Header
from strata.etcd.login import Login
from strata.etcd.options import Address, Timing, TlsConfig


class Answer(Protocol):
    """An answer of etcd; every answer has a header."""

    @property
    def header(self) -> Header: ...


Request = TypeVar("Request")
AnswerT = TypeVar("AnswerT", bound=Answer)
Method = Callable[[Endpoint], UnaryUnaryMultiCallable[Request, AnswerT]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """The state that all connections of one store share."""

    addresses: Sequence[Address]
    tls: TlsConfig | None
    timing: Timing
    login: Login
    guard: Guard = field(default_factory=Guard)
    health: defaultdict[str, Health] = field(default_factory=lambda: defaultdict(Health))


class Connection:
    """A channel to every endpoint, one of them current."""

    def __init__(self, shared: Shared, *, purpose: str) -> None:
        self.timing = timing = shared.timing
        self.guard = shared.guard
        self.login = shared.login
        # the ring starts at a random endpoint, so that the clients of one cluster spread over its members
        start = int(timing.chance() * len(shared.addresses))
        self.endpoints = [
            Endpoint(address, shared.tls, shared.health[address.target])
            for address in (*shared.addresses[start:], *shared.addresses[:start])
        ]
        self._current = self.endpoints[0]
        self._reported = asyncio.Event()
        self.closed = False
        self._tasks = [
            asyncio.create_task(endpoint.keep_connected(self._report), name=f"etcd-{purpose}-{endpoint.name}")
            for endpoint in self.endpoints
        ]

    async def close(self) -> None:
        """Drop every connection; calls in flight end with `Unavailable`. Idempotent."""
        self.closed = True
        self._reported.set()
        for endpoint in self.endpoints:
            await endpoint.close()
        # Closing ends the calls that the tasks wait for, unless a traceback still references a failed call. If
        # the tasks were cancelled here, gRPC would later send an event to an event loop that may be closed by
        # then.
        _, late = await asyncio.wait(self._tasks, timeout=0.2)
        for task in late:
            task.cancel()

    # -- choosing -------------------------------------------------------------------------------

    def _report(self, endpoint: Endpoint, *, lost: bool) -> None:
        """Record that the state of a channel changed, and wake the waiters for a ready endpoint."""
        if lost:
            # a member that comes back is no better than the members that stayed connected
            endpoint.health.blamed_at = self.timing.now()
        self._choose()
        self._reported.set()
        self._reported = asyncio.Event()

    def blame(self, endpoint: Endpoint) -> None:
        """Send the next calls to another endpoint, if another one is ready."""
        endpoint.health.blamed_at = self.timing.now()
        self._choose()

    def _choose(self) -> Endpoint | None:
        """Make current the ready endpoint that was blamed longest ago; among equals, the first."""
        ready = [endpoint for endpoint in self.endpoints if endpoint.ready]
        if not ready:
            return None
        self._current = min(ready, key=lambda endpoint: endpoint.health.blamed_at)
        return self._current

    def named(self, name: str) -> Endpoint:
        """Return the endpoint called `name`; `NotFound` if there is none."""
        for endpoint in self.endpoints:
            if endpoint.name == name:
                return endpoint
        raise NotFound(f"{name} is not one of the etcd endpoints")

    async def ready_endpoint(self, timeout_s: float) -> Endpoint:
        """Return an endpoint that is connected; `Unavailable` if none is connected within `timeout_s`."""
        if self._current.ready:
            return self._current
        try:
            async with asyncio.timeout(timeout_s):
                while not self.closed:
                    if (chosen := self._choose()) is not None:
                        return chosen
                    await self._reported.wait()
        except TimeoutError:
            names = ", ".join(endpoint.name for endpoint in self.endpoints)
            raise Unavailable(f"no etcd endpoint accepts connections: {names}") from None
        raise Unavailable("the etcd client is closed", hint="")

    # -- calling --------------------------------------------------------------------------------

    async def once(
        self,
        method: Method[Request, AnswerT],
        request: Request,
        *,
        timeout_s: float | None = None,
        at: Endpoint | None = None,
        linearizable: bool = False,
    ) -> AnswerT:
        """Return the answer to a request that is sent at most once: to the current endpoint, or to `at`."""
        metadata = self.login.plain
        try:
            return await self._send(method, request, metadata, timeout_s, at, linearizable)
        except errors.StaleTokenError as stale:
            if not self.login.possible:
                raise stale.meaning from None
        # rejected before anything was written: log in again, and send the request with the new token
        await self.login.renew(metadata)
        try:
            return await self._send(method, request, self.login.plain, timeout_s, at, linearizable)
        except errors.StaleTokenError as stale:
            raise stale.meaning from None

    async def _send(
        self,
        method: Method[Request, AnswerT],
        request: Request,
        metadata: Metadata | None,
        timeout_s: float | None,
        at: Endpoint | None = None,
        linearizable: bool = False,
    ) -> AnswerT:
        if timeout_s is None:
            timeout_s = self.timing.request_s
        endpoint = at or self._current
        if not endpoint.ready and at is None:
            endpoint = await self.ready_endpoint(timeout_s)
        floor = self.guard.floor
        try:
            answer = await method(endpoint)(request, timeout=timeout_s, metadata=metadata)
        except AioRpcError as error:
            raise self.failed(error, endpoint) from error
        except asyncio.CancelledError:
            if cancelled_by_caller():
                raise
            raise Unavailable("the etcd client was closed during the call", hint="") from None
        self.admit(answer.header, floor, endpoint, linearizable=linearizable)
        return answer

    async def repeated(
        self,
        method: Method[Request, AnswerT],
        request: Request,
        *,
        anonymous: bool = False,
        linearizable: bool = False,
    ) -> AnswerT:
        """Return the answer to a request that may be sent any number of times.

        An `anonymous` request has no token, and cannot cause a login.
        """
        timing = self.timing
        deadline = timing.now() + timing.read_s
        failures = 0
        while True:
            timeout_s = min(timing.request_s, max(0.01, deadline - timing.now()))
            try:
                if anonymous:
                    return await self._send(method, request, None, timeout_s)
                return await self.once(method, request, timeout_s=timeout_s, linearizable=linearizable)
            except Unavailable:
                failures += 1
                # every endpoint is tried without delay before the first pause
                pause_s = timing.pause_s(failures - len(self.endpoints) + 1)
                if self.closed or timing.now() + pause_s >= deadline:
                    raise
            if pause_s:
                await timing.sleep(pause_s)

    def failed(self, error: AioRpcError, endpoint: Endpoint) -> Exception:
        """Return the meaning of a failed call, and blame the endpoint if the outcome is unknown."""
        meaning = errors.translate(error, endpoint.name)
        if errors.is_stale_token(error):
            return errors.StaleTokenError(meaning)
        if isinstance(meaning, Unavailable):
            self.blame(endpoint)
        return meaning

    def admit(self, header: Header, floor: Floor, endpoint: Endpoint, *, linearizable: bool = False) -> None:
        """Have the guard check an answer; blame the endpoint if the guard rejects it."""
        try:
            self.guard.admit(header, floor, endpoint.name, linearizable=linearizable)
        except StrataError:
            self.blame(endpoint)
            raise


def cancelled_by_caller() -> bool:
    """Tell a cancellation of this task from a `CancelledError` of grpc.aio.

    grpc.aio raises a `CancelledError` too when a call or its channel is closed under the task.
    """
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0
