"""Network faults between hosts: packets are dropped, or answered with a TCP reset.

They need a backend whose hosts have their own networks. The harness's connections (observer, health checks) come from
an address that no rule names, so a cut does not affect them.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from strata_chaos.backends.base import Network, Rule
from strata_chaos.faults.base import Effect, NoTarget, Wound
from strata_chaos.run.system import System, chosen

Draw = Callable[[System, random.Random], Awaitable[tuple[tuple[str, ...], list[Rule]]]]

_keys = itertools.count(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The `Fault` that applies the packet filter rules from `draw` on the hosts that they name."""

    name: str
    summary: str
    draw: Draw

    def available(self, backend: str) -> str:
        return "" if backend == "netns" else "all processes share one network; use --backend netns"

    async def inject(self, system: System, rng: random.Random) -> Wound:
        targets, rules = await self.draw(system, rng)
        key = f"cut{next(_keys)}"
        system.claim(*targets)
        try:
            await asyncio.to_thread(_network(system).cut, key, rules)
        except BaseException:
            system.release(*targets)
            await asyncio.to_thread(_network(system).mend, key)
            raise
        return Wound(targets=targets, memory=key)

    async def took_effect(self, system: System, wound: Wound) -> Effect:
        packets = await asyncio.to_thread(_network(system).packets, wound.memory)
        counts = ", ".join(f"{count} on {host}" for host, count in packets.items())
        return Effect(any(packets.values()), f"packets met by the rules: {counts}")

    async def heal(self, system: System, wound: Wound) -> None:
        try:
            await asyncio.to_thread(_network(system).mend, wound.memory)
        finally:
            system.release(*wound.targets)


def _network(system: System) -> Network:
    assert system.network is not None, "available() reported no network"
    return system.network


def _both_ways(system: System, host: str, peers: Iterable[str]) -> list[Rule]:
    address = {peer: system.host(peer).address for peer in peers}
    return [
        Rule(host=host, peer=address[peer], inbound=inbound) for peer in address for inbound in (True, False)
    ]


def _others(system: System, name: str) -> list[str]:
    return [host.name for host in system.hosts if host.name != name]


def _one(rng: random.Random, names: Sequence[str], what: str) -> str:
    if not names:
        raise NoTarget(f"no {what} is running and unharmed")
    return chosen(rng, names)


async def _isolated_leader(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    name = _one(rng, [n for n in system.running() if n == system.leader()], "leader")
    return (name,), _both_ways(system, name, _others(system, name))


async def _isolated_follower(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    name = _one(rng, [n for n in system.running() if n != system.leader()], "follower")
    return (name,), _both_ways(system, name, _others(system, name))


async def _isolated_etcd_leader(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    leader = await system.etcd_leader()
    name = _one(rng, [n for n in system.running_etcd() if n == leader], "etcd leader")
    return (name,), _both_ways(system, name, _others(system, name))


async def _isolated_etcd_follower(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    leader = await system.etcd_leader()
    name = _one(rng, [n for n in system.running_etcd() if n != leader], "etcd follower")
    return (name,), _both_ways(system, name, _others(system, name))


async def _isolated_workers(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    workers = system.whole(host.name for host in system.hosts if host.name.startswith("host-"))
    name = _one(rng, workers, "host of workers")
    return (name,), _both_ways(system, name, _others(system, name))


async def _one_way(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    name = _one(rng, system.running(), "coordinator")
    inbound = rng.random() < 0.5
    rules = [
        Rule(host=name, peer=system.host(peer).address, inbound=inbound) for peer in _others(system, name)
    ]
    return (name,), rules


def _pair(system: System, rng: random.Random) -> tuple[str, str]:
    whole = sorted(system.running())
    if len(whole) < 2:
        raise NoTarget("no two coordinators are running and unharmed")
    one, two = rng.sample(whole, 2)
    return one, two


async def _cut_pair(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    one, two = _pair(system, rng)
    return (one, two), _both_ways(system, one, [two])


async def _rejecting_pair(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    one, two = _pair(system, rng)
    return (one, two), _rejections(system, one, two)


async def _rejecting_leader(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    leader = _one(rng, [n for n in system.running() if n == system.leader()], "leader")
    other = _one(rng, [n for n in system.running() if n != leader], "follower")
    return (leader, other), _rejections(system, leader, other)


def _rejections(system: System, one: str, two: str) -> list[Rule]:
    """Return rules for outgoing packets of both hosts: rules for incoming packets would also drop the resets."""
    return [
        Rule(host=host, peer=system.host(peer).address, inbound=False, reject=True)
        for host, peer in ((one, two), (two, one))
    ]


async def _resetting_sessions(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    serving = system.monitor.serving()
    most = max((serving[name] for name in system.running()), default=0)
    name = _one(rng, [n for n in system.running() if most and serving[n] == most], "coordinator with members")
    hosts = [host.name for host in system.hosts if host.name.startswith("host-")]
    return (name,), [rule for host in hosts for rule in _rejections(system, name, host)]


async def _cut_from_etcd(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    name = _one(rng, system.running(), "coordinator")
    return (name,), _both_ways(system, name, system.etcd)


async def _leader_cut_from_etcd(system: System, rng: random.Random) -> tuple[tuple[str, ...], list[Rule]]:
    name = _one(rng, [n for n in system.running() if n == system.leader()], "leader")
    return (name,), _both_ways(system, name, system.etcd)


_ALL_PACKETS: Final = "packets of all others from and to"

FAULTS: Final = (
    Partition(
        name="isolate-leader",
        summary=f"{_ALL_PACKETS} the coordinator that leads are dropped",
        draw=_isolated_leader,
    ),
    Partition(
        name="isolate-follower",
        summary=f"{_ALL_PACKETS} a coordinator that does not lead are dropped",
        draw=_isolated_follower,
    ),
    Partition(
        name="isolate-etcd-leader",
        summary=f"{_ALL_PACKETS} the etcd member that leads are dropped",
        draw=_isolated_etcd_leader,
    ),
    Partition(
        name="isolate-etcd-follower",
        summary=f"{_ALL_PACKETS} an etcd member that does not lead are dropped",
        draw=_isolated_etcd_follower,
    ),
    Partition(
        name="isolate-workers",
        summary=f"{_ALL_PACKETS} a host of workers are dropped",
        draw=_isolated_workers,
    ),
    Partition(
        name="one-way-replica",
        summary="all packets to a coordinator are dropped, or all packets from it",
        draw=_one_way,
    ),
    Partition(
        name="cut-pair",
        summary="packets between two coordinators are dropped",
        draw=_cut_pair,
    ),
    Partition(
        name="reject-pair",
        summary="packets between two coordinators are answered with a reset, as if the other had died",
        draw=_rejecting_pair,
    ),
    Partition(
        name="reject-leader",
        summary="packets between the coordinator that leads and another one are answered with a reset",
        draw=_rejecting_leader,
    ),
    Partition(
        name="reset-sessions",
        summary="packets between members and the coordinator that serves most of them are answered with a reset",
        draw=_resetting_sessions,
    ),
    Partition(
        name="cut-replica-from-etcd",
        summary="a coordinator reaches its members and peers, but no etcd member",
        draw=_cut_from_etcd,
    ),
    Partition(
        name="cut-leader-from-etcd",
        summary="the coordinator that leads reaches its members and peers, but no etcd member",
        draw=_leader_cut_from_etcd,
    ),
)
