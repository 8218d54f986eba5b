"""The relay's door: a gRPC server on a Unix socket that only this user can reach."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio

from strata.agent.relay import Relay
from strata.core.timing import Timing
from strata.errors import ConfigError
from strata.session.link import Link
from strata.session.served import serve
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsServicer, add_SessionsServicer_to_server
from strata.wire.streams import serve_stream

_MAX_PATH_BYTES = 107
_STOP_GRACE_S = 0.5


class _Sessions(SessionsServicer):
    def __init__(self, relay: Relay, tasks: asyncio.TaskGroup) -> None:
        self._relay = relay
        self._tasks = tasks

    async def Session(  # type: ignore[override]  # noqa: N802  # grpc's name; it reads and writes by its context
        self, request_iterator: Any, context: Any
    ) -> None:
        async def logic(link: Link[Up, Down]) -> None:
            await serve(link, self._relay.accept)

        await serve_stream(context, logic, self._tasks.create_task)


@asynccontextmanager
async def serving(relay: Relay, socket: Path, timing: Timing) -> AsyncIterator[None]:
    """Serve ranks at `socket` inside the block.

    Pings find a frozen rank within `detect_s`. `ConfigError` when the socket cannot be made.
    """
    if len(str(socket).encode()) > _MAX_PATH_BYTES:
        raise ConfigError(f"{socket} is too long for a Unix socket", hint="set TMPDIR to a shorter folder")
    async with asyncio.TaskGroup() as tasks:
        server = grpc.aio.server(options=list(timing.server_options()))
        add_SessionsServicer_to_server(_Sessions(relay, tasks), server)
        try:
            server.add_insecure_port(f"unix:{socket}")
        except RuntimeError as error:
            raise ConfigError(f"cannot serve ranks at {socket}: {error}") from error
        await server.start()
        socket.chmod(0o600)  # noqa: ASYNC240  # one system call, before anybody is served
        try:
            yield
        finally:
            await server.stop(_STOP_GRACE_S)
