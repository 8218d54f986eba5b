"""The liveness watch on real rank processes: stopped, debugged, busy, dumping core, and watched by a frozen agent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from strata.agent.health.liveness import Liveness
from strata.processes.children import Child
from tests import debugger
from tests.conftest import Need
from tests.cores import need_cores
from tests.processes import Record, Talker

LIMIT_S = 20.0
DETECT_S = 1.0
SLACK_S = 0.5
"""The delay that a busy machine may add to `DETECT_S`."""
SLEEPS = ("sleep", "1000")
FROZEN = "frozen: a signal has stopped its process for 1 s"
CORE_MB = 500
Report = tuple[str, int, int, str, float]


@dataclass(frozen=True, slots=True)
class Rank:
    """A child process as the watch sees it."""

    child: Child

    @property
    def pid(self) -> int:
        return self.child.pid

    @property
    def alive(self) -> bool:
        return self.child.poll() is None


class Watch:
    """A running `Liveness`, and its reports: (kind, rank, generation, reason, time)."""

    def __init__(self, detect_s: float) -> None:
        self.reports: asyncio.Queue[Report] = asyncio.Queue()
        self.liveness = Liveness(
            detect_s=detect_s, on_frozen=self._took("frozen"), on_core_dump=self._took("core")
        )

    def _took(self, what: str) -> Callable[[int, int, str], None]:
        return lambda rank, generation, reason: self.reports.put_nowait(
            (what, rank, generation, reason, time.monotonic())
        )

    async def one(self) -> Report:
        async with asyncio.timeout(LIMIT_S):
            return await self.reports.get()

    async def nothing_for(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        assert self.reports.empty(), self.reports.get_nowait()


@contextlib.asynccontextmanager
async def watching(detect_s: float = DETECT_S) -> AsyncIterator[Watch]:
    watch = Watch(detect_s)
    async with watch.liveness.watching():
        yield watch


@pytest.fixture
def start() -> Iterator[Callable[..., Rank]]:
    """Return a function that starts a process, which ends with the test."""
    with contextlib.ExitStack() as ending:

        def start(*command: str, cwd: Path | None = None) -> Rank:
            child = Child.start(command, cwd=cwd)
            ending.callback(child.stop, 0.0)
            return Rank(child)

        yield start


Start = Callable[..., Rank]


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not true():  # noqa: ASYNC110  # another process
            await asyncio.sleep(0.01)


async def test_a_stopped_process_is_reported_once_within_detect_s(start: Start) -> None:
    ranks = [start(*SLEEPS) for _ in range(3)]
    async with watching() as watch:
        for number, rank in enumerate(ranks):
            watch.liveness.watch(number, 7, rank)
        await watch.nothing_for(0.3)
        stopped_s = time.monotonic()
        os.kill(ranks[1].pid, signal.SIGSTOP)
        *report, reported_s = await watch.one()
        assert report == ["frozen", 1, 7, FROZEN]
        assert DETECT_S <= reported_s - stopped_s < DETECT_S + SLACK_S
        await watch.nothing_for(DETECT_S + SLACK_S)


async def test_a_process_that_ended_or_is_forgotten_is_not_reported_and_holds_no_descriptor(
    start: Start,
) -> None:
    async with watching() as watch:
        before = open_files()
        ended, forgotten, stopped = (start(*SLEEPS) for _ in range(3))
        watch.liveness.watch(0, 1, ended)
        watch.liveness.watch(1, 1, forgotten)
        watch.liveness.watch(2, 2, stopped)
        watch.liveness.watch(2, 2, stopped)  # the rank attached again
        assert open_files() == before + 3
        for rank in (forgotten, stopped):
            os.kill(rank.pid, signal.SIGSTOP)
        ended.child.stop(0.0)
        await until(lambda: open_files() == before + 2)
        watch.liveness.forget(1)
        assert open_files() == before + 1
        assert (await watch.one())[:3] == ("frozen", 2, 2)
        assert open_files() == before
        await watch.nothing_for(DETECT_S)
        watch.liveness.watch(0, 3, ended)
        watch.liveness.watch(1, 3, forgotten)
        watch.liveness.forget()
        assert open_files() == before
        watch.liveness.watch(1, 3, forgotten)
    assert open_files() <= before, "the watch has ended"


def open_files() -> int:
    """Return the number of `/proc/PID/status` files that this process has open."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the folder
            found += str(fd.readlink()).endswith("/status")
    return found


@pytest.mark.parametrize(
    ("detect_s", "stopped_s"), [(1.0, 0.7), pytest.param(5.0, 4.0, marks=pytest.mark.slow)]
)
async def test_a_process_resumed_within_detect_s_is_alive(
    start: Start, detect_s: float, stopped_s: float
) -> None:
    rank = start(*SLEEPS)
    async with watching(detect_s) as watch:
        watch.liveness.watch(0, 1, rank)
        for _ in range(2):
            os.kill(rank.pid, signal.SIGSTOP)
            await watch.nothing_for(stopped_s)
            os.kill(rank.pid, signal.SIGCONT)
            await watch.nothing_for(0.5)


async def test_a_debugged_process_is_alive(start: Start, need: Need) -> None:
    rank = start(*SLEEPS)
    holds = start(sys.executable, str(Path(debugger.__file__)), str(rank.pid))
    await until(lambda: debugger.state(rank.pid) == "t" or not holds.alive)
    need("ptrace", holds.alive, debugger.ALLOW)
    async with watching() as watch:
        watch.liveness.watch(0, 1, rank)
        await watch.nothing_for(3 * DETECT_S)
        assert debugger.state(rank.pid) == "t"


async def test_a_process_that_holds_the_gil_is_alive(start: Start) -> None:
    program = "import ctypes; ctypes.PyDLL(None).sleep(4)"
    rank = start(sys.executable, "-c", program)
    async with watching() as watch:
        watch.liveness.watch(0, 1, rank)
        await watch.nothing_for(3 * DETECT_S)
        assert rank.alive


AGENT = """
import asyncio, json, sys
from strata.agent.health.liveness import Liveness

class Rank:
    alive = True
    pid = int(sys.argv[2])

def told(*what):
    print(json.dumps({"event": "told", "what": what}), flush=True)

async def main():
    liveness = Liveness(detect_s=float(sys.argv[1]), on_frozen=told, on_core_dump=told)
    async with liveness.watching():
        liveness.watch(0, 1, Rank())
        print(json.dumps({"event": "watches"}), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


@pytest.mark.parametrize(
    ("detect_s", "before_s", "frozen_s"),
    [(1.0, 0.6, 1.5), pytest.param(5.0, 3.0, 6.0, marks=pytest.mark.slow)],
)
def test_an_agent_that_froze_kills_no_rank(
    start: Start, record: Record, detect_s: float, before_s: float, frozen_s: float
) -> None:
    """The rank is stopped for a moment before the agent's freeze and after it: each stop is too short to count."""
    rank = start(*SLEEPS)
    agent = Talker([sys.executable, "-c", AGENT, str(detect_s), str(rank.pid)], name="agent", record=record)
    try:
        record.wait_one("watches")
        os.kill(rank.pid, signal.SIGSTOP)
        time.sleep(before_s)
        agent.child.pause()
        time.sleep(frozen_s)
        agent.child.resume()
        time.sleep(detect_s / 2)
        os.kill(rank.pid, signal.SIGCONT)
        time.sleep(1.0)
        assert record.of("told") == []
        os.kill(rank.pid, signal.SIGSTOP)
        assert record.wait_one("told")["what"][:2] == [0, 1], "it still watches"
    finally:
        agent.child.stop(0.0)


CRASHES = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_CORE, (resource.getrlimit(resource.RLIMIT_CORE)[1],) * 2)
touched = b"x" * int(sys.argv[1])
os.abort()
"""


async def test_a_process_that_dumps_core_is_reported_while_it_writes(
    start: Start, need: Need, tmp_path: Path
) -> None:
    need_cores(need, tmp_path, megabytes=CORE_MB << 2)
    async with watching() as watch:
        for number in range(3):  # a machine with much memory may write a core between two samples
            size = str(CORE_MB << 20 << number)
            rank = start(sys.executable, "-c", CRASHES, size, cwd=tmp_path)
            watch.liveness.watch(3, number, rank)
            await until(lambda rank=rank: not rank.alive or not watch.reports.empty())  # type: ignore[misc]
            if not watch.reports.empty():
                report = await watch.one()
                assert report[:4] == ("core", 3, number, "its process crashed and dumps core")
                await watch.nothing_for(0.3)
                return
    pytest.fail("no core dump was found")
