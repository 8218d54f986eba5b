"""A member's database as a stream of bytes (etcd's Maintenance.Snapshot).

etcd sends the database file unchanged, then its SHA-256, 32 bytes. A stream that ends without error may still
be short, so its reader must check the SHA-256. The stream has no time limit, since a large database takes
minutes. Only its silence is limited.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Final

from grpc.aio import AioRpcError

from strata.errors import Unavailable
from strata.etcd import errors
from strata.etcd.connection import Connection, cancelled_by_caller
from strata.etcd.endpoint import Endpoint
from strata.etcdapi import maintenance_pb2

IDLE_S: Final = 30.0
"""How long a member may send nothing: before the first byte the member commits pending writes."""


async def stream(connection: Connection, endpoint: Endpoint, *, idle_s: float) -> AsyncGenerator[bytes, None]:
    """Yield the member's database and its SHA-256, in the pieces in which they arrive.

    `Refused` if etcd has users and this user lacks the role `root`. `Unavailable` if the stream broke or was silent
    for `idle_s`.
    """
    used = connection.login.plain
    try:
        async for piece in _attempt(connection, endpoint, idle_s):
            yield piece
    except errors.StaleTokenError as stale:
        if not connection.login.possible:
            raise stale.meaning from None
    else:
        return
    # etcd rejects a stale token before the first byte: log in again, and send the request once more
    await connection.login.renew(used)
    try:
        async for piece in _attempt(connection, endpoint, idle_s):
            yield piece
    except errors.StaleTokenError as stale:
        raise stale.meaning from None


async def _attempt(connection: Connection, endpoint: Endpoint, idle_s: float) -> AsyncGenerator[bytes, None]:
    request = maintenance_pb2.SnapshotRequest()
    call = endpoint.maintenance.Snapshot(request, metadata=connection.login.plain)
    try:
        while True:
            try:
                async with asyncio.timeout(idle_s):
                    answer = await call.read()
            except TimeoutError:
                connection.blame(endpoint)
                raise Unavailable(
                    f"etcd {endpoint.name} sent nothing of its snapshot for {idle_s:g} s",
                    hint="is that member's disk or network stuck? try again: another member may be chosen",
                ) from None
            except AioRpcError as error:
                raise connection.failed(error, endpoint) from error
            except asyncio.CancelledError:
                if cancelled_by_caller():
                    raise
                raise Unavailable("the etcd client was closed during the snapshot", hint="") from None
            if not isinstance(answer, maintenance_pb2.SnapshotResponse):  # grpc.aio.EOF
                return
            yield answer.blob
    finally:
        call.cancel()
