"""Ranks that enter a newer generation without a new process."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from strata.v1.worlds_pb2 import JOB_PHASE_PAUSED
from tests.unit.launch.stage import FOREVER, Exit, Stage, shell, stage, update


def in_process(**more: Any) -> dict[str, Any]:
    return {"restart": "in_process", "slots": 2, **more}


def pids(it: Stage) -> list[int | None]:
    ranks = it.local_agent._slots.ranks
    assert ranks is not None
    return [ranks.pid(rank) for rank in ranks.place.ranks]


async def test_a_rank_that_supports_it_continues_in_the_next_generation() -> None:
    async with stage(*FOREVER, **in_process()) as it:
        await it.enter(update(1, slots=2))
        before = pids(it)
        it.rank_socket.movable = frozenset({1})
        await it.enter(update(2, slots=2, first_rank=2))
        assert await it.rank_socket.moves.get() == (2, frozenset({1}))
        assert pids(it)[1] == before[1]
        assert pids(it)[0] not in before
        it.local_agent.rank_attached(3, 2)
        os.kill(before[1] or 0, signal.SIGKILL)
        assert (await it.upstream.exits.get()) == Exit(2, 3, -9, "was ended by SIGKILL")


async def test_a_rank_that_does_not_rejoin_in_time_is_replaced() -> None:
    script = 'test "$STRATA_GENERATION" = 2 && exit 5; exec sleep 1000'
    async with stage(*shell(script), **in_process(restart_grace_s=0.1)) as it:
        await it.enter(update(1, slots=2))
        before = pids(it)
        it.rank_socket.movable = frozenset({0, 1})
        await it.enter(update(2, slots=2))
        it.local_agent.rank_attached(1, 2)
        assert before[0] is not None
        await wait_exit(before[0])
        assert (await it.rank_socket.moves.get())[1] == {0, 1}
        assert await it.upstream.exits.get() == Exit(2, 0, 5, "exited with 5"), "of the new process only"
        assert pids(it)[1] == before[1], "who has arrived is let be"


async def test_a_process_that_waits_for_its_place_ends_with_the_job() -> None:
    async with stage(*FOREVER, **in_process()) as it:
        await it.enter(update(1, slots=2))
        first, second = pids(it)
        assert first is not None
        assert second is not None
        it.rank_socket.movable = frozenset({0, 1})
        forming = update(2, first_rank=None)
        forming.world.forming = True
        it.local_agent.on_world(forming)
        assert await it.rank_socket.places.get() is None
        await it.enter(update(3, slots=2))
        assert pids(it) == [first, second], "they waited for others to come"
        it.local_agent.on_world(update(4, first_rank=None))
        await wait_exit(first)
        await wait_exit(second)


async def test_a_job_that_is_paused_keeps_no_process() -> None:
    """The processes would keep devices' memory in use, and other jobs may get these devices meanwhile."""
    async with stage(*FOREVER, **in_process()) as it:
        await it.enter(update(1, slots=2))
        before = pids(it)
        it.rank_socket.movable = frozenset({0, 1})
        paused = update(2, first_rank=None)
        paused.world.forming, paused.phase = True, JOB_PHASE_PAUSED
        it.local_agent.on_world(paused)
        for pid in before:
            assert pid is not None
            await wait_exit(pid)


async def test_by_default_a_new_generation_is_a_new_process() -> None:
    async with stage(*FOREVER, slots=2) as it:
        await it.enter(update(1, slots=2))
        before = pids(it)
        it.rank_socket.movable = frozenset({0, 1})
        await it.enter(update(2, slots=2))
        assert not set(pids(it)) & set(before)
        assert it.rank_socket.moves.empty()


async def wait_exit(pid: int) -> None:
    """Return once the process has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(fd)
    os.close(fd)
