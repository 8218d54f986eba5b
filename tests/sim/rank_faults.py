"""Faults between an agent and the processes of its ranks; `tests.sim.faults` registers them."""

from __future__ import annotations

import asyncio
import random

from tests.sim.cluster import Cluster
from tests.sim.programs.agents import SimulatedAgent
from tests.sim.programs.ranks import DETECT_S, GRACE_S, RankProcess


def some_agent(c: Cluster, rng: random.Random) -> SimulatedAgent | None:
    """Return a running agent with running ranks, or None."""
    there = []
    for member in c.members.values():
        agent, runs = member.agent, member.process.alive and not member.process.frozen
        if agent is not None and runs and not member.leaving and _ranks(agent):
            there.append(agent)
    return rng.choice(there) if there else None


def _ranks(agent: SimulatedAgent) -> list[RankProcess]:
    return [p for p in agent.processes.values() if p.attached and p.alive and not p.frozen]


def _some_rank(c: Cluster, rng: random.Random) -> tuple[SimulatedAgent, RankProcess] | None:
    agent = some_agent(c, rng)
    return None if agent is None else (agent, rng.choice(_ranks(agent)))


async def crash(c: Cluster, rng: random.Random) -> bool:
    """End a rank's process. The rank's agent, which waits for the process, reports the exit."""
    if (some := _some_rank(c, rng)) is None:
        return False
    some[1].kill()
    return True


async def stopped(c: Cluster, rng: random.Random) -> bool:
    """Stop a rank's process. If the stop is shorter than `detect_s`, the process lives on; otherwise it is evicted."""
    if (some := _some_rank(c, rng)) is None:
        return False
    _agent, process = some
    held = process.held
    process.freeze()
    await asyncio.sleep(
        rng.choice((rng.uniform(0.2, 0.95 * DETECT_S), rng.uniform(DETECT_S + 1, DETECT_S + 4)))
    )
    process.thaw()
    return process.held > held or not process.alive


async def disconnected(c: Cluster, rng: random.Random) -> bool:
    """Break a rank's connection while its process lives.

    The rank attaches again within the grace, or is evicted after it.
    """
    if (some := _some_rank(c, rng)) is None:
        return False
    agent, process = some
    links = c.board.links(process.address, agent.socket)
    process.cut_off = rng.random() < 0.7
    for link in links:
        link.break_off()
    await asyncio.sleep(rng.choice((rng.uniform(0, 0.3 * GRACE_S), GRACE_S + rng.uniform(1, 3))))
    process.cut_off = False
    return bool(links)


async def host_frozen(c: Cluster, rng: random.Random) -> bool:
    """Freeze and thaw all processes of a node.

    The agent freezes last and thaws first, so it sees stopped ranks both times.
    """
    if (agent := some_agent(c, rng)) is None:
        return False
    member, processes = agent.member, _ranks(agent)
    held = member.process.held
    for process in processes:
        process.freeze()
    await asyncio.sleep(rng.uniform(0.2, 1.5))
    c.note_disturbed(member)
    member.process.freeze()
    await asyncio.sleep(rng.choice((rng.uniform(0.2, 2), rng.uniform(DETECT_S, 2 * DETECT_S))))
    c.note_disturbed(member)
    member.process.thaw()
    await asyncio.sleep(rng.choice((0.0, rng.uniform(0.2, 1.5))))
    for process in processes:
        process.thaw()
    return member.process.held > held


async def agent_crash(c: Cluster, rng: random.Random) -> bool:
    """Kill an agent but not its ranks' processes, which end by themselves. Then start another agent of that name.

    Some of the ranks are stopped meanwhile. Sometimes the agent was frozen before, and they had lost their connections.
    """
    if (agent := some_agent(c, rng)) is None:
        return False
    member, processes = agent.member, _ranks(agent)
    if rng.random() < 0.4:
        member.process.freeze()
        for process in processes:
            for link in c.board.links(process.address, agent.socket):
                link.break_off()
        c.note_disturbed(member)
        await asyncio.sleep(rng.choice((rng.uniform(0, 3), rng.uniform(8, 16))))
    for process in processes:
        if rng.random() < 0.2:
            process.freeze()
    c.stopped.add(member.worker)
    member.kill()
    await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 1), rng.uniform(1, 8))))
    c.start_member(member.worker)
    await asyncio.sleep(rng.uniform(0, 3))
    for process in processes:
        process.thaw()
    return True


async def rival(c: Cluster, rng: random.Random) -> bool:
    """Make another process attach as a rank.

    It is refused while the first process lives, and admitted once that has ended.
    """
    if (some := _some_rank(c, rng)) is None:
        return False
    agent, first = some
    lasts_s = rng.uniform(0.3, 1.5)
    second = agent.start_rival(first, lasts_s)
    await asyncio.sleep(rng.uniform(0, 0.8 * lasts_s))
    if rng.random() < 0.5:
        first.kill()
    assert second.task is not None
    await asyncio.wait((second.task,))
    return True
