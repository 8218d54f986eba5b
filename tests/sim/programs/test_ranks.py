"""The judge's rules for an agent and its ranks' processes, and the agent's watch for stopped processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strata.testing.links import Switchboard
from strata.testing.virtual_time import in_virtual_time
from tests.sim.programs.ranks import DETECT_S, GRACE_S, SAMPLING, Program, RankProcess, RankRules, Watch

BROKEN = "its connection ended"


class Node:
    """An agent and a rank that is attached to it."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self.rules = RankRules()
        self.agent = Program("agent")
        self.agent.start(asyncio.sleep(1000), tasks=tasks)
        self.rank = self.process(1)
        assert self.rules.attached(self.rank) is None
        self.rank.opened()

    def process(self, pid: int) -> RankProcess:
        """Start another process of the same rank."""
        process = RankProcess(pid, 1, 0, agent=self.agent, board=Switchboard(), host="h")
        self.rules.processes.append(process)
        process.start(asyncio.sleep(1000), tasks=self._tasks)
        return process

    def end(self) -> None:
        for process in self.rules.processes:
            process.kill()
        self.agent.killed()


@asynccontextmanager
async def node() -> AsyncIterator[Node]:
    async with asyncio.TaskGroup() as tasks:
        it = Node(tasks)
        yield it
        it.end()


@in_virtual_time()
async def test_a_rank_that_is_connected_and_runs_may_not_be_evicted() -> None:
    async with node() as n:
        assert "within the grace" in (n.rules.evicted(n.rank, BROKEN) or "")
        assert "was not stopped" in (n.rules.evicted(n.rank, SAMPLING.frozen) or "")


@pytest.mark.parametrize("for_s", [GRACE_S - 0.1, GRACE_S + 0.1])
def test_a_rank_without_a_connection_is_evicted_after_the_grace_and_not_before(for_s: float) -> None:
    @in_virtual_time()
    async def test() -> None:
        async with node() as n:
            n.rank.ended()
            await asyncio.sleep(for_s)
            assert (n.rules.evicted(n.rank, BROKEN) is None) is (for_s > GRACE_S)
            assert n.rules.overdue() == []
            await asyncio.sleep(GRACE_S)
            assert "its agent lets it live" in n.rules.overdue()[0]

    test()


@in_virtual_time()
async def test_a_rank_counts_as_frozen_after_detect_s_observed_by_its_agent() -> None:
    async with node() as n:
        n.rank.freeze()
        n.agent.freeze()
        await asyncio.sleep(2 * DETECT_S)
        n.agent.thaw()
        assert "0.000 s that its agent saw" in (n.rules.evicted(n.rank, SAMPLING.frozen) or "")
        await asyncio.sleep(DETECT_S)
        assert n.rules.evicted(n.rank, SAMPLING.frozen) is None
        assert n.rules.overdue() == []
        await asyncio.sleep(1)
        assert "is stopped" in n.rules.overdue()[0]


@in_virtual_time()
async def test_a_second_process_may_attach_once_the_first_has_ended() -> None:
    async with node() as n:
        rival = n.process(2)
        assert "was that rank and lives" in (n.rules.attached(rival) or "")
        n.rank.kill()
        assert n.rules.attached(rival) is None


@in_virtual_time()
async def test_a_rank_has_a_second_of_its_own_time_after_its_agent_ended() -> None:
    async with node() as n:
        n.rank.freeze()
        n.agent.killed()
        await asyncio.sleep(60)
        assert n.rules.overdue() == []
        n.rank.thaw()
        await asyncio.sleep(1)
        assert n.rules.overdue() == []
        await asyncio.sleep(0.1)
        assert "1.100 s after its agent ended" in n.rules.overdue()[0]


@in_virtual_time()
async def test_an_act_of_a_rank_whose_agent_has_ended_is_a_finding() -> None:
    async with node() as n:
        n.agent.killed()
        findings: list[str | None] = []

        async def act() -> None:
            for _ in range(2):
                findings.append(n.rules.acts("an arrival"))
                await asyncio.sleep(2)

        late = RankProcess(3, 1, 0, agent=n.agent, board=Switchboard(), host="h")
        async with asyncio.TaskGroup() as tasks:
            late.start(act(), tasks=tasks)
        assert findings[0] is None
        assert "had ended 2.000 s before" in (findings[1] or "")
        assert n.rules.acts("an act of no rank") is None


@pytest.mark.parametrize(("for_s", "frozen"), [(DETECT_S - 0.5, False), (DETECT_S + 0.5, True)])
def test_the_watch_reports_a_stop_of_detect_s_once(for_s: float, frozen: bool) -> None:
    @in_virtual_time()
    async def test() -> None:
        reports: list[tuple[int, int, str]] = []
        async with node() as n:
            watch = Watch(lambda *report: reports.append(report))
            watch.watch(0, 1, n.rank)
            watching = asyncio.create_task(watch.run())
            await asyncio.sleep(3)
            n.rank.freeze()
            await asyncio.sleep(for_s)
            n.rank.thaw()
            await asyncio.sleep(3)
            watching.cancel()
        assert reports == ([(0, 1, SAMPLING.frozen)] if frozen else [])

    test()
