"""A process with a session may fork: no process crashes, and the death of the parent is still detected."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from strata.session.served import End
from tests.integration.coordinator.session_server import serving

ROOT = Path(__file__).resolve().parents[3]


class Program:
    """A running program of `fork_programs`, and its output."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._printed: list[dict[str, Any]] = []

    async def says(self, key: str, limit_s: float = 40.0) -> dict[str, Any]:
        """Return the next line that has `key`; keep other lines for later calls."""
        for earlier in self._printed:
            if key in earlier:
                self._printed.remove(earlier)
                return earlier
        assert self.process.stdout is not None
        async with asyncio.timeout(limit_s):
            while line := await self.process.stdout.readline():
                event: dict[str, Any] = json.loads(line)
                if key in event:
                    return event
                self._printed.append(event)
        raise AssertionError(f"it ended ({await self.process.wait()}) without saying {key!r}")

    async def ended(self, limit_s: float = 30.0) -> int:
        """Return the program's exit code."""
        async with asyncio.timeout(limit_s):
            return await self.process.wait()


@asynccontextmanager
async def program(*arguments: str, stderr: bool = False) -> AsyncIterator[Program]:
    """Run a program of `fork_programs` until the end of the block."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.integration.client.fork_programs",
        *arguments,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE if stderr else None,
        env=os.environ,
    )
    try:
        yield Program(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("torch_installed")
async def test_15_epochs_with_forked_dataloader_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # with a short limit, late answers to pings on a busy machine would end the stream
    monkeypatch.setenv("STRATA_DETECT_S", "60")
    async with serving(detect_s=60) as server, program("loader", server.address, "15") as run:
        for epoch in range(15):
            assert await run.says("epoch", limit_s=80) == {"epoch": epoch, "seen": 64, "connected": True}
        assert await run.ended() == 0
        end, _ = await (await server.session()).end(5)
        assert end is End.LEFT
        assert len(server.sessions) == 1, "no reconnect"


async def kill_parent(endpoint: str, how: End) -> float:
    """SIGKILL a parent whose forked child lives on; return the seconds until its session ended as `how`."""
    async with serving(endpoint) as server, program("parent", server.address) as run:
        child = (await run.says("child"))["child"]
        try:
            await run.says("parent")
            killed_at = asyncio.get_running_loop().time()
            run.process.send_signal(signal.SIGKILL)
            served = await server.session()
            end, ended_at = await served.end(10)
            assert end is how
            os.kill(child, 0)
            return ended_at - killed_at
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost"])
async def test_a_killed_parent_is_noticed_although_its_forked_child_lives(host: str) -> None:
    assert await kill_parent(f"{host}:0", End.LEFT) < 1.0, "its agent left for it"


async def test_a_killed_rank_behind_the_agent_socket_is_noticed_at_once(tmp_path: Path) -> None:
    assert await kill_parent(f"unix:{tmp_path}/s", End.BROKEN) < 1.0


async def test_a_rank_has_one_session_however_often_it_connects(tmp_path: Path) -> None:
    async with serving(f"unix:{tmp_path}/s") as server, program("connects_again", server.address) as run:
        await run.says("closed")
        assert await run.ended() == 0
        rounds = [[arrival.round for arrival in served.arrivals] for served in server.sessions]
        assert rounds == [[1, 2, 3, 4], [5]], "a new one only after the last close; rounds go on"
        assert [hello.hello.rank.rank for hello in server.sessions] == [0, 0]


async def test_a_forked_child_is_refused_and_the_parent_continues() -> None:
    async with serving() as server, program("child_calls", server.address) as run:
        event = await run.says("barrier")
        for call in ("barrier", "progress", "connect", "unary", "status"):
            assert event[call].startswith("ConfigError"), call
            assert "spawn" in event[call], "the hint says what to do"
        assert (await run.says("child_exit"))["child_exit"] == 7
        assert await run.ended() == 0
        assert len(server.sessions) == 1, "no reconnect"


async def test_spawned_children_connect_by_themselves() -> None:
    async with serving() as server, program("other_methods", server.address) as run:
        for method in ("spawn", "forkserver"):
            assert await run.says("method") == {"method": method, "code": 0}
        assert await run.ended() == 0
        names = [served.hello.member.worker_id for served in server.sessions]
        assert names == ["parent", "spawn", "forkserver"]


async def test_a_child_forked_before_the_first_use_may_connect() -> None:
    async with serving() as server, program("forked_first", server.address) as run:
        assert (await run.says("code"))["code"] == 0


@pytest.mark.parametrize(("how", "code"), [("return", 0), ("exit", 3), ("error", 1), ("os_exit", 4)])
async def test_a_process_leaves_cleanly_by_any_kind_of_exit(how: str, code: int) -> None:
    async with serving() as server, program("ends", server.address, how, stderr=True) as run:
        await run.says("ending")
        assert await run.ended(5) == code
        assert run.process.stderr is not None
        complaints = (await run.process.stderr.read()).decode().splitlines()
        assert complaints[-1:] == (["ZeroDivisionError"] if how == "error" else [])
        assert (await (await server.session()).end(2))[0] is End.LEFT, (
            "its agent leaves for it if it does not"
        )


async def test_a_frozen_process_is_noticed_within_detect_s() -> None:
    async with serving(detect_s=5) as server, program("idle", server.address) as run:
        await run.says("idle")
        served = await server.session()
        stopped_at = asyncio.get_running_loop().time()
        run.process.send_signal(signal.SIGSTOP)
        end, ended_at = await served.end(15)
        assert end is End.LEFT, "its agent left for it"
        assert ended_at - stopped_at <= 5.0 + 4.0, (
            "with what a busy machine adds: a late sample restarts the count"
        )


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_a_process_that_holds_the_gil_lives() -> None:
    async with serving(detect_s=4) as server, program("held_gil", server.address, "10") as run:
        await run.says("holding")
        assert (await run.says("held", limit_s=60))["incarnation"] == 1
        assert await run.ended() == 0
        assert len(server.sessions) == 1, "no reconnect"
        assert (await server.sessions[0].end(5))[0] is End.LEFT


def test_grpc_imported_first_is_a_config_error() -> None:
    env = {k: v for k, v in os.environ.items() if k != "GRPC_ENABLE_FORK_SUPPORT"}
    call = "strata.CoordinatorClient.connect('127.0.0.1:1').jobs()"
    code = f"import grpc, strata\ntry: {call}\nexcept strata.ConfigError as e: print(e)"
    output = subprocess.run(
        [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "import strata before grpc" in output.stdout
    good = "import strata, grpc, os; strata.CoordinatorClient; print(os.environ['GRPC_ENABLE_FORK_SUPPORT'])"
    output = subprocess.run(
        [sys.executable, "-c", good], env=env, cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert output.stdout.strip() == "0"
