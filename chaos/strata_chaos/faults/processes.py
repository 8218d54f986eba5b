"""Process faults: SIGKILL and SIGSTOP of each kind of process.

Healing restarts killed processes: the harness restarts coordinators and etcd members on their data, as a service
manager would, and a workload restarts its own processes. Frozen processes get SIGCONT.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

from strata_chaos.faults.base import Effect, NoTarget, Wound
from strata_chaos.faults.parts import CoordinatorPart, EtcdPart, Part, WorkloadPart
from strata_chaos.run.system import System, chosen

Choose = Callable[[System, random.Random], Awaitable[list[Part]]]


class Action(Enum):
    """The signal sent to a process."""

    KILL = "kill"
    FREEZE = "freeze"


@dataclass(frozen=True, slots=True)
class _Memory:
    parts: tuple[Part, ...]
    epoch: int
    led: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessFault:
    """The `Fault` that kills or freezes the processes that `choose` returns."""

    action: Action
    whom: str
    summary: str
    choose: Choose

    @property
    def name(self) -> str:
        return f"{self.action.value}-{self.whom}"

    def available(self, backend: str) -> str:
        return ""

    async def inject(self, system: System, rng: random.Random) -> Wound:
        parts = await self.choose(system, rng)
        names = tuple(part.name for part in parts)
        memory = _Memory(tuple(parts), system.monitor.epoch(), system.leader() in names)
        system.claim(*names)
        act = (lambda part: part.kill()) if self.action is Action.KILL else (lambda part: part.freeze())
        try:
            await asyncio.gather(*(asyncio.to_thread(act, part) for part in parts))
        except BaseException:
            system.release(*names)
            raise
        return Wound(targets=names, memory=memory)

    async def took_effect(self, system: System, wound: Wound) -> Effect:
        memory: _Memory = wound.memory
        looks = [p.killed() if self.action is Action.KILL else p.frozen() for p in memory.parts]
        evidence = "; ".join(shown for _, shown in looks)
        if memory.led and system.monitor.epoch() != memory.epoch:
            evidence += f"; epoch {memory.epoch} ended, the leader now: {system.leader() or 'none'}"
        return Effect(all(done for done, _ in looks), evidence)

    async def heal(self, system: System, wound: Wound) -> None:
        memory: _Memory = wound.memory
        act = (lambda part: part.revive()) if self.action is Action.KILL else (lambda part: part.thaw())
        try:
            await asyncio.gather(*(asyncio.to_thread(act, part) for part in memory.parts))
        finally:
            system.release(*wound.targets)


# -- targets


def _coordinators(system: System, names: Sequence[str]) -> list[Part]:
    if not names:
        raise NoTarget("no such coordinator is running and unharmed")
    return [CoordinatorPart(system.coordinators[name]) for name in names]


def _members(system: System, names: Sequence[str]) -> list[Part]:
    return [EtcdPart(system.etcd[name]) for name in names]


async def _leader(system: System, _rng: random.Random) -> list[Part]:
    return _coordinators(system, [name for name in system.running() if name == system.leader()])


async def _follower(system: System, rng: random.Random) -> list[Part]:
    followers = [name for name in system.running() if name != system.leader()]
    return _coordinators(system, [chosen(rng, followers)] if followers else [])


async def _all_replicas(system: System, _rng: random.Random) -> list[Part]:
    return _coordinators(system, system.running())


async def _etcd_leader(system: System, _rng: random.Random) -> list[Part]:
    name = await system.etcd_leader()
    if name is None or name not in system.running_etcd():
        raise NoTarget("etcd has no leader that is running and unharmed")
    return _members(system, [name])


async def _etcd_follower(system: System, rng: random.Random) -> list[Part]:
    leader = await system.etcd_leader()
    followers = [name for name in system.running_etcd() if name != leader]
    if leader is None or not followers:
        raise NoTarget("etcd has no follower that is running and unharmed")
    return _members(system, [chosen(rng, followers)])


async def _etcd_majority(system: System, rng: random.Random) -> list[Part]:
    whole, majority = sorted(system.running_etcd()), len(system.etcd) // 2 + 1
    if len(whole) < majority:
        raise NoTarget("etcd has lost its majority already")
    return _members(system, rng.sample(whole, majority))


def _of_role(role: str) -> Choose:
    async def choose(system: System, rng: random.Random) -> list[Part]:
        found = [t for t in system.roster.of(role) if t.name not in system.claimed]
        if not found:
            raise NoTarget(f"no workload has a living {role}")
        return [WorkloadPart(rng.choice(found))]

    return choose


_WHOM: Final[dict[str, tuple[str, Choose]]] = {
    "leader": ("the coordinator that leads", _leader),
    "follower": ("a coordinator that does not lead", _follower),
    "all-replicas": ("every coordinator at once", _all_replicas),
    "etcd-leader": ("the etcd member that leads", _etcd_leader),
    "etcd-follower": ("an etcd member that does not lead", _etcd_follower),
    "etcd-majority": ("as many etcd members as make a majority", _etcd_majority),
    "member": ("a standalone process", _of_role("member")),
    "rank": ("a rank of an agent", _of_role("rank")),
    "agent": ("an agent (`strata run`)", _of_role("agent")),
}
_HOW: Final = {
    Action.KILL: "SIGKILL, started again at the end",
    Action.FREEZE: "SIGSTOP, and SIGCONT at the end",
}

FAULTS: Final = tuple(
    ProcessFault(action=action, whom=whom, summary=f"{who}: {how}", choose=choose)
    for action, how in _HOW.items()
    for whom, (who, choose) in _WHOM.items()
)
