"""To its agent, a rank is one process, from the rank's first attachment until this process ends."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator

import pytest

from strata.agent.rank_process import RankProcess
from strata.agent.relay import EXIT_S
from strata.errors import Refused
from strata.testing.virtual_time import in_virtual_time
from tests.unit.agent.relay_rig import GRACE_S, node, place, up


@pytest.fixture
def sleepers() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that sleep until the end of the test."""
    children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    yield children
    for child in children:
        child.kill()
        child.wait()


async def test_a_rank_belongs_to_one_process_until_that_process_ends(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    first, second = sleepers
    async with node() as it:
        await it.attached(2, pid=first.pid)
        rival = await it.dial(2, process=RankProcess(second.pid))
        with pytest.raises(Refused, match=f"is process {first.pid}; process {second.pid} is refused"):
            await rival.recv()
        await it.attached(2, pid=first.pid)  # the rank's own process attaches again
        first.kill()
        first.wait()  # milliseconds
        await it.attached(2, pid=second.pid)
        assert (now := it.relay.process(2)) is not None
        assert now.pid == second.pid
        assert [process.pid for *_, process in it.processes] == [first.pid, second.pid]
        it.relay.set_place(place(2, first_rank=2))
        assert it.relay.process(2) is None


async def test_another_process_cannot_attach_as_a_live_rank_that_left(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    first, second = sleepers
    async with node() as it:
        left = await it.attached(2, pid=first.pid)
        left.send(up(leave={"reason": "closed"}))
        while await left.recv() is not None:
            pass
        helper = await it.dial(2, process=RankProcess(second.pid))
        with pytest.raises(Refused, match=f"is process {first.pid}; process {second.pid} is refused"):
            await helper.recv()
        await it.attached(2, pid=first.pid)  # the rank's own process attaches again
        assert [process.pid for *_, process in it.processes] == [first.pid], "it is watched all the while"


@in_virtual_time()
async def test_the_relay_does_not_evict_a_rank_whose_process_ended(
    sleepers: list[subprocess.Popen[bytes]],
) -> None:
    first, _ = sleepers
    async with node() as it:
        link = await it.attached(2, pid=first.pid)
        first.kill()
        first.wait()  # milliseconds
        link.break_off()
        await asyncio.sleep(GRACE_S * 1.5)
        assert it.evicted == []


@in_virtual_time()
async def test_the_relay_does_not_evict_a_dying_process_that_frees_its_memory(
    sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection of a dying process ends before the process, for example after SIGSEGV with much shared memory."""
    dying, _other = sleepers
    monkeypatch.setattr(RankProcess, "exiting", property(lambda process: process.pid == dying.pid))
    async with node() as it:
        link = await it.attached(2, pid=dying.pid)
        link.break_off()
        await asyncio.sleep(GRACE_S * 5)
        assert it.evicted == []
        dying.kill()
        dying.wait()
        await asyncio.sleep(GRACE_S * 3)
        assert it.evicted == []


@in_virtual_time()
async def test_a_process_that_never_finishes_exiting_is_evicted(
    sleepers: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RankProcess, "exiting", True)
    async with node() as it:
        link = await it.attached(2, pid=sleepers[0].pid)
        link.break_off()
        await asyncio.sleep(EXIT_S + GRACE_S * 1.5)
        assert it.evicted == [(2, 1)]
