"""Admission at an agent's socket, and the error a rank gets after the agent ended: real sockets and processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from strata.agent.rank_process import RankProcess, admitted
from strata.agent.relay_server import serving
from strata.client.rank.shared_session import RankObserver
from strata.client.rank_session import RankSession
from strata.core.timing import Timing
from strata.errors import ConfigError, Refused, StaleGeneration, StaleIncarnation, StrataError, Unavailable
from strata.session.endpoints import Endpoint
from strata.v1.session_pb2 import RankHello
from tests.unit.agent.relay_rig import Node

RIVAL = """
import asyncio, sys
from strata.session.endpoints import Endpoint
from strata.client.rank_session import RankSession
from strata.client.rank.shared_session import RankObserver
from strata.v1.session_pb2 import RankHello
import random
hello = RankHello(job="j", worker_id="w", generation=1, rank=2)
session = RankSession(Endpoint(path=sys.argv[1]), hello, RankObserver(), rng=random.Random())
try:
    asyncio.run(session.run())
except Exception as error:
    print(type(error).__name__, error)
"""


HANGS = """
import threading
import strata
from strata.training.generation_exit import AgentExit
ending = AgentExit(strata.connect())
print("hangs", flush=True)
threading.Event().wait()
"""


def rank_session(path: Path, rank: int = 2) -> RankSession:
    hello = RankHello(job="j", worker_id="w", generation=1, rank=rank)
    return RankSession(Endpoint(path=str(path)), hello, RankObserver(), rng=random.Random(1))


@asynccontextmanager
async def an_agent(path: Path) -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as tasks:
        node = Node(tasks)
        async with serving(node.relay, path, Timing.derive(1.0)):
            yield node


@asynccontextmanager
async def attached(path: Path) -> AsyncIterator[tuple[RankSession, asyncio.Task[None]]]:
    session = rank_session(path)
    running = asyncio.create_task(session.run())
    try:
        async with asyncio.timeout(5):
            await session.wait_connected()
        yield session, running
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError, StrataError):
            await running


async def test_a_rank_attaches_and_the_agent_knows_its_process(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    async with an_agent(path) as node:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        async with attached(path) as (session, _):
            assert session.welcome is not None
            assert session.welcome.replica == "w"
            assert (own := node.relay.process(2)) is not None
            assert own.pid == os.getpid()
            async with attached(path):
                pass
            ((rank, generation, process),) = node.processes
            assert (rank, generation, process.pid) == (2, 1, os.getpid()), "told once: it is the same process"
            assert process.alive
    assert not path.exists()


async def test_another_process_is_refused_as_long_as_the_rank_lives(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    async with an_agent(path), attached(path):
        rival = await asyncio.create_subprocess_exec(
            sys.executable, "-c", RIVAL, str(path), stdout=subprocess.PIPE
        )
        output, _ = await rival.communicate()
        assert output.decode().startswith(f"Refused rank 2 is process {os.getpid()}; process {rival.pid} ")


@pytest.mark.parametrize(("pid", "uid", "why"), [(0, 0, "PID namespace"), (1, 1, "of user")])
def test_a_process_of_another_user_or_of_another_pid_namespace_is_refused(
    pid: int, uid: int, why: str
) -> None:
    with pytest.raises(Refused, match=why):
        admitted(pid, os.getuid() + uid)


def test_a_process_that_has_ended_is_not_admitted() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(Unavailable, match="cannot watch process"):
        admitted(child.pid, os.getuid())


async def test_a_client_that_does_not_return_the_nonce_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    async with an_agent(path) as node:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as wrong:
            for sock in (silent, wrong):
                sock.connect(str(path))
                sock.setblocking(False)
            await loop.sock_sendall(wrong, b"\0\0\0\x10" + bytes(16))
            for sock, why in ((wrong, b"not return the agent's nonce"), (silent, b"within 1 s")):
                received = b""
                async with asyncio.timeout(3):
                    while more := await loop.sock_recv(sock, 4096):
                        received += more
                assert why in received
        assert node.attachments == []


async def test_a_rank_detects_the_loss_of_its_agent_at_once(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    async with contextlib.AsyncExitStack() as stack:
        agent = contextlib.AsyncExitStack()
        await agent.enter_async_context(an_agent(path))
        session, running = await stack.enter_async_context(attached(path))
        await agent.aclose()
        with pytest.raises(StaleIncarnation, match="has ended, and this rank with it"):
            async with asyncio.timeout(1.5):
                await running
        with pytest.raises(StaleIncarnation):
            await session.wait_connected()


async def test_a_training_with_a_hung_main_thread_ends_soon_after_its_agent(
    tmp_path: Path,
) -> None:
    path = tmp_path / "ranks.sock"
    place = {
        "STRATA_JOB": "j",
        "STRATA_WORKER_ID": "w",
        "STRATA_GENERATION": "1",
        "RANK": "2",
        "WORLD_SIZE": "4",
    }
    async with contextlib.AsyncExitStack() as agent:
        node = await agent.enter_async_context(an_agent(path))
        hangs = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-c", HANGS),
            env={**os.environ, **place, "STRATA_SOCKET": str(path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert hangs.stdout is not None
        assert await hangs.stdout.readline() == b"hangs\n"
        assert (own := node.relay.process(2)) is not None
        assert own.pid == hangs.pid
        await agent.aclose()
        async with asyncio.timeout(1.5):
            _, output = await hangs.communicate()
        assert hangs.returncode == 1
        assert b"has ended, and this rank with it" in output


async def test_an_agent_that_does_not_answer_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "ranks.sock"
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(path))
        frozen.listen()
        session = rank_session(path)
        running = asyncio.create_task(session.run())
        await asyncio.sleep(3)
        assert not running.done()
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("turns", range(6))
async def test_a_rank_that_connects_while_its_agent_stops_gets_a_stale_error(
    tmp_path: Path, turns: int
) -> None:
    path = tmp_path / "ranks.sock"
    session = rank_session(path)
    async with an_agent(path):
        running = asyncio.create_task(session.run())
        for _ in range(turns):
            await asyncio.sleep(0)
    async with asyncio.timeout(5):
        with pytest.raises((StaleIncarnation, StaleGeneration)):
            await running


async def test_an_agent_that_cannot_watch_processes_fails_before_ranks_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_pid: int) -> int:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", denied)
    async with asyncio.TaskGroup() as tasks:
        with pytest.raises(ConfigError, match="cannot watch processes") as refused:
            async with serving(Node(tasks).relay, tmp_path / "s", Timing.derive(1.0)):
                pass
        assert "seccomp" in refused.value.hint


async def test_a_socket_that_cannot_be_made_is_a_configuration_error(tmp_path: Path) -> None:
    async with asyncio.TaskGroup() as tasks:
        relay = Node(tasks).relay
        for path in (tmp_path / ("x" * 120), tmp_path / "absent" / "s"):
            with pytest.raises(ConfigError):
                async with serving(relay, path, Timing.derive()):
                    pass


def runs(process: RankProcess) -> bool:
    return process.alive


def test_a_rank_process_is_tracked_by_its_descriptor() -> None:
    child = subprocess.Popen(["sleep", "60"])
    with RankProcess(child.pid) as process:
        assert runs(process)
        assert not os.get_inheritable(process.fileno())
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not runs(process), "though nobody has waited for it"
        child.wait()
        assert not runs(process)
        process.send_signal(signal.SIGKILL)
    process.close()
    with pytest.raises(ValueError, match="is closed"):
        process.fileno()
