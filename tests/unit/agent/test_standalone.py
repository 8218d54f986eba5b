"""The agent of a standalone process: when the agent ends, and its messages; without any coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from strata.agent import standalone
from strata.agent.rank_process import RankProcess
from strata.agent.standalone import StandaloneAgent
from strata.client.rank import standalone as standalone_client
from strata.config import Credentials
from strata.errors import ConfigError, StrataError, Unavailable
from strata.session.served import Limits
from strata.testing.links import pair
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Down, Hello, Tick, Up
from strata.wire.errors import unpack
from tests.polling import until
from tests.processes import wait_exit

PROGRAM = """
import ctypes, os, sys, time
from strata.client.rank import standalone
from strata.config import Credentials

keep = standalone.spawned()
if sys.argv[1] == "started":
    frame = standalone.start_of(["127.0.0.1:1"], 5.0, Credentials()).SerializeToString()
    keep.send(len(frame).to_bytes(4, "big") + frame)
if (child := ctypes.CDLL(None).fork()) == 0:  # unknown to Python: it keeps the socket
    ctypes.CDLL(None).sleep(1000)
agents = [pid for task in os.listdir("/proc/self/task") for pid in open(f"/proc/self/task/{task}/children").read().split()]
print(child, *(pid for pid in agents if int(pid) != child), flush=True)
time.sleep(1000)
"""
END_S = 5.0
"""The limit on a busy machine; otherwise an agent ends within 1 s."""


def watches(agent: int) -> bool:
    """Return True if the agent holds its process's pidfd."""
    found = []
    for file in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
            found.append(str(file.readlink()))
    return any("pidfd" in each for each in found)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["started", "not yet"])
def test_an_agent_ends_with_its_process_while_a_child_holds_its_socket(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, agent = map(int, process.stdout.readline().split())
        try:
            command = Path(f"/proc/{agent}/cmdline")  # empty between fork and exec
            until(
                lambda: b"strata.agent.standalone" in command.read_bytes(),
                "the agent's program did not start",
            )
            until(lambda: watches(agent), "the agent does not watch its process")
            process.kill()
            assert wait_exit(agent, END_S)
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()


class Carried:
    """An agent inside this process, and the standalone process's session with this agent."""

    def __init__(self) -> None:
        ours, theirs = pair()
        self.link = ours
        start = standalone_client.start_of(["127.0.0.1:1"], 5.0, Credentials())
        self.agent = StandaloneAgent(start, cast("RankProcess", SimpleNamespace(pid=os.getpid())))
        self.running = asyncio.create_task(self.agent.run(theirs, asyncio.Event()))
        member = Registration(job="j", worker_id="w", slots=1, cannot_restart=True)
        ours.send(Up(hello=Hello(member=member)))

    async def printed(self, kind: str) -> Down:
        """Return the next message of this kind."""
        async with asyncio.timeout(END_S):
            while True:
                down: Down | None = await self.link.recv()
                assert down is not None, f"it ended without a {kind}"
                if down.WhichOneof("message") == kind:
                    return down


@pytest.fixture
def storage_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuses(*_ignored: object, say: Callable[[str], None], **_more: object) -> None:
        say("disk full")
        await asyncio.get_running_loop().create_future()

    monkeypatch.setattr(standalone, "wait_for_storage", refuses)


@pytest.mark.usefixtures("storage_refuses")
async def test_a_process_is_welcomed_and_may_end_while_its_agent_waits_for_storage() -> None:
    """The welcome ends the wait for a coordinator.

    The agent must notice the process's end even after its many early ticks.
    """
    carried = Carried()
    for _ in range(Limits().early + 1):
        carried.link.send(Up(tick=Tick()))
    await carried.printed("welcome")
    assert (await carried.printed("disconnected")).disconnected.message == "disk full"
    carried.link.close()
    await asyncio.wait_for(carried.running, END_S)


@pytest.mark.parametrize(
    ("raised", "kind", "printed"),
    [
        (Unavailable("not today"), Unavailable, "not today"),
        (ValueError("a bug"), StrataError, r"ValueError\('a bug'\)"),
    ],
)
async def test_any_error_of_an_agent_is_delivered_to_its_process(
    raised: Exception, kind: type[StrataError], printed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_ignored: object, **_more: object) -> None:
        raise raised

    monkeypatch.setattr(standalone, "wait_for_storage", fails)
    carried = Carried()
    with pytest.raises(kind, match=printed):
        raise unpack((await carried.printed("ended")).ended.error)
    await asyncio.wait_for(carried.running, END_S)


async def test_a_wrong_setting_of_an_agent_is_raised_in_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STRATA_RUN_STALL_FACTOR", "x")
    carried = Carried()
    with pytest.raises(ConfigError, match="STRATA_RUN_STALL_FACTOR"):
        await carried.printed("welcome")
    await asyncio.wait_for(carried.running, END_S)
