"""The system under test, for faults and health checks: its parts by name, and which parts a fault has claimed.

Names: `coordinator-1…`, `etcd-1…`, and processes of workloads such as `rank:4711`. A fault claims the parts that it
breaks, so that no other fault breaks them meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from strata.devcluster.etcd_member import EtcdMember
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from strata_chaos.backends.base import Host, Network
from strata_chaos.run.cluster_monitor import ClusterMonitor
from strata_chaos.run.roster import Roster


class Recording(Protocol):
    """The record of one life of etcd: from empty disks or a snapshot to the loss of etcd."""

    async def end_life(self) -> str:
        """End the record once it has all of etcd's events; return the problems, in words."""
        ...

    async def begin_life(self, *, listed_at: int) -> None:
        """Begin the record of a new etcd, either from its first revision or from a list of the keys at `listed_at`."""
        ...


@dataclass(frozen=True, slots=True)
class System:
    """The running system. `network` is None if hosts have no network of their own; `folder` is that of the run."""

    cluster: LocalCluster
    monitor: ClusterMonitor
    roster: Roster
    hosts: Sequence[Host]
    network: Network | None
    folder: Path
    recording: Recording
    claimed: set[str] = field(default_factory=set)

    # -- claims

    def whole(self, names: Iterable[str]) -> list[str]:
        """Return the names that no fault has claimed."""
        return [name for name in names if name not in self.claimed]

    def claim(self, *names: str) -> None:
        """Claim parts for a fault, until `release`."""
        assert not self.claimed & set(names), f"{self.claimed & set(names)} is broken already"
        self.claimed.update(names)

    def release(self, *names: str) -> None:
        """Release parts that a fault has healed."""
        self.claimed.difference_update(names)

    # -- coordinators

    @property
    def coordinators(self) -> dict[str, LocalCoordinator]:
        """All coordinators by name."""
        return {coordinator.name: coordinator for coordinator in self.cluster.coordinators}

    def leader(self) -> str | None:
        """Return the coordinator that holds the leader key, or None."""
        return self.monitor.leader()

    def running(self) -> list[str]:
        """Return the coordinators that run and are unclaimed."""
        alive = [name for name, c in self.coordinators.items() if c.child.poll() is None]
        return self.whole(alive)

    # -- etcd

    @property
    def etcd(self) -> dict[str, EtcdMember]:
        """All etcd members by name."""
        return {member.name: member for member in self.cluster.etcd.members}

    async def etcd_leader(self) -> str | None:
        """Return the etcd member that leads, or None."""
        return await asyncio.to_thread(self._etcd_leader)

    def _etcd_leader(self) -> str | None:
        member = self.cluster.etcd.leader_now()
        return member.name if member is not None else None

    def running_etcd(self) -> list[str]:
        """Return the etcd members that run and are unclaimed."""
        return self.whole(name for name, m in self.etcd.items() if m.running and not m.paused)

    # -- addresses

    def host(self, name: str) -> Host:
        """Return the host of a part; raise `LookupError` if no host has that name."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LookupError(f"no host {name}")


def chosen(rng: random.Random, names: Sequence[str]) -> str:
    """Return a random one of `names`. The names are sorted first, so that the result depends on `rng` alone."""
    return rng.choice(sorted(names))
