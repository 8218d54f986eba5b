"""The system under test as faults and health checks see it: its parts by name, and who broke which.

Names: `coordinator-1…`, `etcd-1…`, and the processes of workloads as `rank:4711`. A part that a
fault holds is claimed, so that no second fault takes it for whole.
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
    """The record of what etcd did. Each life of etcd, from empty disks or from a snapshot to its loss, has its own."""

    async def end_life(self) -> str:
        """End the record once it has all that etcd holds; return what was not as it should be."""
        ...

    async def begin_life(self, *, listed_at: int) -> None:
        """Begin the record of an etcd that began anew, from its first revision, or from a list of `listed_at` on."""
        ...


@dataclass(frozen=True, slots=True)
class System:
    """What runs. `network` is None where hosts have no network of their own. `folder` is the run's."""

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
        """Return those that no fault holds."""
        return [name for name in names if name not in self.claimed]

    def claim(self, *names: str) -> None:
        """Hold parts for a fault, until `release`."""
        assert not self.claimed & set(names), f"{self.claimed & set(names)} is broken already"
        self.claimed.update(names)

    def release(self, *names: str) -> None:
        """Let parts go that a fault has healed."""
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
        """Return the coordinators that run and are whole."""
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
        """Return the etcd members that run and are whole."""
        return self.whole(name for name, m in self.etcd.items() if m.running and not m.paused)

    # -- addresses

    def host(self, name: str) -> Host:
        """Return where a part runs; `LookupError` when it is not a part with a host."""
        for host in self.hosts:
            if host.name == name:
                return host
        raise LookupError(f"no host {name}")


def chosen(rng: random.Random, names: Sequence[str]) -> str:
    """Return one of `names`, which are put in order first, so that chance alone decides."""
    return rng.choice(sorted(names))
