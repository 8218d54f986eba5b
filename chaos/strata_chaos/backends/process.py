"""Everything as processes on loopback: needs nothing, and has no network to break."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from strata.launch.local_cluster import LocalCluster
from strata.launch.placement import HOST
from strata_chaos.backends.base import Host, Say, Site
from strata_chaos.scenario import Topology


class ProcessBackend:
    """A `Backend`."""

    name: Final = "process"
    summary: Final = "processes on loopback; no partitions"

    def available(self) -> str:
        return ""

    @contextmanager
    def running(self, topology: Topology, folder: Path, *, workers: int, say: Say) -> Iterator[Site]:
        cluster = LocalCluster.start(
            folder,
            etcd_members=topology.etcd,
            coordinators=topology.coordinators,
            detect_s=topology.detect_s,
            fsync=False,  # no fault here is a power cut: what the kernel holds, a killed process keeps
            say=say,
        )
        try:
            names = [m.name for m in cluster.etcd.members] + [c.name for c in cluster.coordinators]
            yield Site(
                cluster=cluster,
                hosts=tuple(Host(name=name, address=HOST) for name in names),
                workers=tuple(Host(name=f"host-{n}", address=HOST) for n in range(1, workers + 1)),
            )
        finally:
            cluster.kill()
