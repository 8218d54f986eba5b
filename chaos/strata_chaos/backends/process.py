"""The process backend: all processes on loopback. It runs on every machine, but cannot partition the network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from strata.devcluster.placement import HOST
from strata_chaos.backends.base import Host, Say, Site
from strata_chaos.backends.start import part_names, start
from strata_chaos.scenario import Topology


class ProcessBackend:
    """The `Backend` that runs all processes on loopback."""

    name: Final = "process"
    summary: Final = "processes on loopback; no partitions"

    def available(self) -> str:
        return ""

    @contextmanager
    def running(
        self, topology: Topology, folder: Path, *, workers: int, members: Sequence[str], say: Say
    ) -> Iterator[Site]:
        hosts = [Host(name=name, address=HOST) for name in part_names(topology, workers=workers)]
        site = start(topology, folder, hosts=hosts, network=None, members=members, say=say)
        try:
            yield site
        finally:
            site.cluster.kill()
