"""A standalone process: no agent started it, so it starts its own agent as a child (`strata.agent.standalone`).

The two processes communicate over a socket pair. The agent is the member of the job. This process uses that member's
session through the agent, and imports no grpc.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import strata
from strata.client.event_loop import BackgroundLoop
from strata.client.rank.inspection import Inspection
from strata.client.rank.shared_session import RankObserver, SharedSession, connected, placed, running
from strata.config import Credentials
from strata.errors import ConfigError, StaleIncarnation, StrataError, Unavailable
from strata.session.client_session import Session
from strata.session.endpoints import Endpoint, Route
from strata.session.framed import dialled, paired
from strata.session.link import Link
from strata.session.terms import Dial, Pace, member_hello
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import AgentStart, Down, Up

log: Final = logging.getLogger("strata.client")

SPARED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that the agent ignores: they are sent to all processes of a group, but meant for the user's program."""
SAY_S: Final = 10.0
"""Seconds after which a standalone process that waits for a world logs a message."""
ROOT: Final = str(Path(strata.__file__).parent.parent)
PROGRAM: Final = """
import sys
root, descriptor = sys.argv[1:]
sys.path.insert(next((i for i, path in enumerate(sys.path) if path.endswith("-packages")), 0), root)
from strata.agent.standalone import main
main(int(descriptor))
"""
"""Runs the agent from this process's own copy of Strata, with the standard library before that copy on `sys.path`."""


def start_of(endpoints: Sequence[str], detect_s: float, own: Credentials) -> AgentStart:
    """Return the agent's settings as a message and not as arguments: other users can read a command line."""
    return AgentStart(
        endpoints=endpoints,
        detect_s=detect_s,
        ca_file=str(own.ca_file or ""),
        cert_file=str(own.cert_file or ""),
        key_file=str(own.key_file or ""),
        token_file=str(own.token_file or ""),
        insecure=own.insecure,
    )


async def join(
    background: BackgroundLoop, start: AgentStart, registration: Registration, timeout_s: float | None
) -> SharedSession:
    """Register as a member with one rank, and wait for a world that has a place for it.

    Without `timeout_s` only the wait for the first coordinator has a limit: the world may wait a day for its members.
    """
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    watcher = RankObserver()
    session = Session(
        introduce=member_hello(registration),
        route=Route((Endpoint(path=f"agent of process {os.getpid()}"),), random.Random()),
        dial=own_agent(start),
        observer=watcher,
        # `ProgressReports` already coalesces; the agent sends nothing until a coordinator answers, and its exit
        # closes the socket immediately
        pace=Pace(progress_s=0.0, handshake_s=math.inf),
    )
    session.on_request = Inspection(
        session.evidence, own_stacks, lambda _rank: (), log=_LibraryLog()
    ).on_request
    waits = "waiting for a world with a place for %s in job %s"
    saying = asyncio.get_running_loop().call_later(
        SAY_S, log.warning, waits, registration.worker_id, registration.job
    )
    serving = running(background, session)
    serving.add_done_callback(watcher.on_ended)
    try:
        await connected(session, timeout_s, "any coordinator")
        async with asyncio.timeout_at(deadline):
            place = await placed(
                session, watcher, job=registration.job, worker_id=registration.worker_id, after=0
            )
    except TimeoutError:
        await session.leave("no world came about in time")
        last_error = session.last_error.message if session.last_error is not None else ""
        why = session.world.world.reason if session.world is not None else last_error
        raise Unavailable(
            f"no world with a place for this member within {timeout_s:g} s" + (f": {why}" if why else ""),
            hint="the job waits for more members, or has as many as it takes: see `strata members`",
        ) from None
    except BaseException:
        serving.cancel()  # the agent then leaves, since a coordinator may be registering this member
        raise
    finally:
        saying.cancel()
    return SharedSession(session=session, watcher=watcher, place=place, owns_member=True)


def own_agent(start: AgentStart) -> Dial:
    """Start this process's agent; return the dial function, whose first call connects to it and whose later calls fail.

    The session limits the time of a dial, and on a busy machine the start of a process takes longer.
    """
    ours = [spawned()]
    why = ""

    @asynccontextmanager
    async def dial(_endpoint: Endpoint) -> AsyncIterator[Link[Down, Up]]:
        nonlocal why
        if not ours:
            raise StaleIncarnation(
                f"the agent of this process has ended, and its member with it: {why}",
                hint="start the program again; if its agent could not start, standard error says why,"
                " and `strata run` starts none",
            )
        try:
            async with dialled(ours.pop(), "the agent of this process", challenged=False) as link:
                link.put(start.SerializeToString())
                yield link
        except StrataError as error:
            why = error.message
            raise

    return dial


def spawned() -> socket.socket:
    """Start an agent as a child of this process; return this end of the socket pair between the two."""
    if not sys.executable or getattr(
        sys, "frozen", False
    ):  # a frozen program (PyInstaller): sys.executable is the program itself
        raise _cannot_start("sys.executable names no interpreter")
    ours, theirs = paired()
    with theirs, _without_signals():
        try:
            process = subprocess.Popen(  # our own module
                [sys.executable, "-P", "-c", PROGRAM, ROOT, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
            )
        except OSError as error:
            ours.close()
            raise _cannot_start(str(error)) from error
    threading.Thread(
        target=process.wait, name="strata-agent", daemon=True
    ).start()  # reaps it, so that no zombie stays
    return ours


def _cannot_start(why: str) -> ConfigError:
    return ConfigError(
        f"this process cannot start its agent: {why}",
        hint="run the program by a python, or under `strata run`",
    )


@contextlib.contextmanager
def _without_signals() -> Iterator[None]:
    """Block the `SPARED` signals in this thread: the child inherits the mask, and soon ignores the signals itself."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SPARED)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def own_stacks(_rank: int) -> str | None:
    """Return the stacks of this process's threads, in faulthandler's format."""
    descriptor = os.memfd_create("stacks")
    try:
        faulthandler.dump_traceback(descriptor, all_threads=True)
        size = os.lseek(descriptor, 0, os.SEEK_CUR)
        return os.pread(descriptor, size, 0).decode(errors="replace") or None
    finally:
        os.close(descriptor)


class _LibraryLog:
    """Writes events to Python's own log, as the library always does in a user's process."""

    def info(self, event: str, **facts: Any) -> None:
        log.info("%s: %s", event, facts)

    def warning(self, event: str, **facts: Any) -> None:
        log.warning("%s: %s", event, facts)
