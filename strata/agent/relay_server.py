"""The socket at which ranks attach: a Unix socket for this user's processes whose pid the agent can see.

PROTOCOLS 5.6 has the rules:

1. The kernel names the process that connected (SO_PEERCRED). A process of another user or PID namespace is refused.
2. The agent opens that process's pidfd.
3. The agent sends random bytes, which the peer must return. Only the holder of the socket can return them. So
   if the process ends between 1 and 2 and a new process gets its pid, the new process does not pass for the
   rank.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

from strata.agent.rank_process import RankProcess, peer_of
from strata.agent.relay import Relay
from strata.core.timing import Timing
from strata.errors import ConfigError, Refused, StrataError, Unavailable
from strata.session.framed import FramedLink, challenged, newest_down
from strata.session.served import serve
from strata.v1.session_pb2 import Down, Up

_MAX_PATH_BYTES: Final = 107
_BACKLOG: Final = 1024
_STOP_GRACE_S: Final = 1.5
"""How long the links of a stopping agent may take to end: a bit longer than `framed.FLUSH_S`."""


@asynccontextmanager
async def serving(relay: Relay, socket: Path, timing: Timing) -> AsyncIterator[None]:
    """Serve ranks at `socket` inside the block.

    A process that does not answer within `detect_s` is refused. `ConfigError` if the socket cannot be made.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        raise ConfigError(
            f"the agent cannot watch processes: pidfd_open: {error.strerror}",
            hint="it needs Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        ) from error
    if len(str(socket).encode()) > _MAX_PATH_BYTES:
        raise ConfigError(f"{socket} is too long for a Unix socket", hint="set TMPDIR to a shorter folder")
    stopping = False
    served: dict[asyncio.Task[None], FramedLink[Up, Down]] = {}

    def opened(link: FramedLink[Up, Down]) -> None:
        if stopping:  # the loop accepted the connection just before the stop
            link.close(Unavailable("the agent stops", hint=""))
            return
        task = asyncio.create_task(_serve(relay, link, timing.detect_s), name="rank")
        served[task] = link
        task.add_done_callback(served.pop)

    server = await asyncio.get_running_loop().create_unix_server(
        lambda: FramedLink(Up, newest_down, opened=opened), sock=_listening(socket), backlog=_BACKLOG
    )
    try:
        yield
    finally:
        stopping = True
        relay.set_place(None)
        server.close()
        socket.unlink(missing_ok=True)  # noqa: ASYNC240  # one system call
        for link in served.values():
            link.close(Unavailable("the agent stops", hint=""))
        serving_yet = tuple(served)
        if serving_yet:
            await asyncio.wait(serving_yet, timeout=_STOP_GRACE_S)
            for task in serving_yet:  # a handler that waits for the coordinators' answer
                task.cancel()
            await asyncio.wait(serving_yet)


def _listening(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before it listens
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot serve ranks at {path}: {error}") from error
    return listener


async def _serve(relay: Relay, link: FramedLink[Up, Down], limit_s: float) -> None:
    try:
        process = await _process_of(link, limit_s)
        await serve(link, partial(relay.accept, process=process))
    except StrataError as error:
        link.close(error)
    finally:
        link.close()
        await link.wait_closed()


async def _process_of(link: FramedLink[Up, Down], limit_s: float) -> RankProcess:
    """Return the process that connected and has the socket open; else raise `Refused` or `Unavailable`."""
    process = peer_of(link.transport.get_extra_info("socket"))
    try:
        async with asyncio.timeout(limit_s):
            if await challenged(link):
                return process
    except TimeoutError:
        raise Unavailable(
            f"process {process.pid} did not return the agent's nonce within {limit_s:g} s"
        ) from None
    raise Refused(f"process {process.pid} did not return the agent's nonce")
