"""Leases: granting, renewing, revoking.

Renewals have a connection of their own, so that no large answer delays them. That connection has one stream,
with one renewal outstanding (PROTOCOLS 4.4). A renewal has `request_s` in all, and the next attempt goes to
another member. A late answer would be worth little, because the caller counts the expiry from the moment of the
request. Only a broken stream is replaced within the call.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc.aio import AioRpcError, StreamStreamCall, UnaryUnaryMultiCallable

from strata.core.kv.txn import Lease
from strata.errors import NotFound, Unavailable
from strata.etcd import errors
from strata.etcd.connection import Connection, cancelled_by_caller
from strata.etcd.endpoint import Endpoint
from strata.etcdapi import lease_pb2

RenewalCall = StreamStreamCall[lease_pb2.LeaseKeepAliveRequest, lease_pb2.LeaseKeepAliveResponse]


class Leases:
    """etcd's Lease service; `renewals` is the connection for renewals only."""

    __slots__ = ("_connection", "_lock", "_renewals", "_stream")

    def __init__(self, connection: Connection, renewals: Connection) -> None:
        self._connection = connection
        self._renewals = renewals
        self._lock = asyncio.Lock()
        self._stream: tuple[Endpoint, RenewalCall] | None = None

    async def grant(self, ttl_s: int) -> Lease:
        """Return a new lease. A lease whose answer was lost expires by itself."""
        answer = await self._connection.repeated(_grant, lease_pb2.LeaseGrantRequest(TTL=ttl_s))
        return Lease(id=answer.ID, ttl_s=answer.TTL)

    async def revoke(self, lease_id: int) -> None:
        """End the lease and delete its keys; it is not an error if the lease no longer exists."""
        try:
            await self._connection.repeated(_revoke, lease_pb2.LeaseRevokeRequest(ID=lease_id))
        except NotFound:
            return

    async def keep_alive(self, lease_id: int) -> int:
        """Renew once and return the seconds the lease now has; `NotFound` if it no longer exists."""
        async with self._lock:
            try:
                async with asyncio.timeout(self._renewals.timing.request_s):
                    ttl_s = await self._renew(lease_id)
            except TimeoutError:
                self._drop(blame=True)
                raise Unavailable(f"etcd did not renew lease {lease_id:x} in time") from None
            except BaseException:
                # the answer to this request must not be taken for the answer to the next one
                self._drop(blame=False)
                raise
        if ttl_s <= 0:
            raise NotFound(f"etcd has no lease {lease_id:x} (any more)")
        return ttl_s

    async def _renew(self, lease_id: int) -> int:
        request = lease_pb2.LeaseKeepAliveRequest(ID=lease_id)
        renewals, failures = self._renewals, 0
        while True:
            metadata = renewals.login.plain
            try:
                return await self._ask(request)
            except errors.StaleTokenError:
                self._drop(blame=False)
                await renewals.login.renew(metadata)
                failures += 1
            except Unavailable:
                self._drop(blame=True)
                failures += 1
                if renewals.closed:
                    raise
            # the caller's timeout bounds this loop
            await renewals.timing.sleep(renewals.timing.pause_s(failures))

    async def _ask(self, request: lease_pb2.LeaseKeepAliveRequest) -> int:
        renewals = self._renewals
        if self._stream is None:
            endpoint = await renewals.ready_endpoint(renewals.timing.request_s)
            call = endpoint.lease.LeaseKeepAlive(metadata=renewals.login.streams)
            self._stream = (endpoint, call)
        endpoint, call = self._stream
        floor = renewals.guard.floor
        try:
            await call.write(request)
            answer = await call.read()
        except AioRpcError as error:
            raise renewals.failed(error, endpoint) from error
        except asyncio.InvalidStateError:
            raise Unavailable(f"etcd {endpoint.name}: the renewal stream had ended") from None
        except asyncio.CancelledError:
            if cancelled_by_caller():
                raise
            raise Unavailable("the etcd client was closed during a renewal") from None
        if answer is grpc.aio.EOF or not isinstance(answer, lease_pb2.LeaseKeepAliveResponse):
            raise Unavailable(f"etcd {endpoint.name}: the renewal stream ended")
        renewals.admit(answer.header, floor, endpoint)
        if answer.ID != request.ID:
            raise Unavailable(f"etcd {endpoint.name} renewed another lease than the requested one")
        return answer.TTL

    def _drop(self, *, blame: bool) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            endpoint, call = stream
            call.cancel()
            if blame:
                self._renewals.blame(endpoint)

    def close(self) -> None:
        self._drop(blame=False)


def _grant(
    endpoint: Endpoint,
) -> UnaryUnaryMultiCallable[lease_pb2.LeaseGrantRequest, lease_pb2.LeaseGrantResponse]:
    return endpoint.lease.LeaseGrant


def _revoke(
    endpoint: Endpoint,
) -> UnaryUnaryMultiCallable[lease_pb2.LeaseRevokeRequest, lease_pb2.LeaseRevokeResponse]:
    return endpoint.lease.LeaseRevoke
