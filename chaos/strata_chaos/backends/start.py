"""Start etcd and coordinators on given hosts, for every backend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from strata.config import Credentials
from strata.devcluster.local_cluster import LocalCluster
from strata_chaos.backends.base import Host, Network, Say, Site
from strata_chaos.backends.certificates import RunCertificates
from strata_chaos.scenario import Topology

PLAINTEXT: Final = Credentials(insecure=True)
"""Plaintext is acceptable on loopback, and on a run's own bridge, which is removed with the run."""


def part_names(topology: Topology, *, workers: int) -> list[str]:
    """Return the names of all hosts that a topology needs."""
    return [
        *(f"etcd-{n}" for n in range(1, topology.etcd + 1)),
        *(f"coordinator-{n}" for n in range(1, topology.coordinators + 1)),
        *(f"host-{n}" for n in range(1, workers + 1)),
    ]


def start(
    topology: Topology,
    folder: Path,
    *,
    hosts: Sequence[Host],
    network: Network | None,
    members: Sequence[str],
    say: Say,
) -> Site:
    """Start etcd and the coordinators on their hosts, with certificates if the topology uses TLS."""
    etcd = [host for host in hosts if host.name.startswith("etcd-")]
    coordinators = [host for host in hosts if host.name.startswith("coordinator-")]
    certificates = None
    if topology.tls:
        certificates = RunCertificates.issue(
            folder / "certificates",
            etcd_hosts=[host.address for host in etcd],
            coordinators={host.name: host.address for host in coordinators},
            members=members,
        )
    credentials = certificates.operator if certificates else PLAINTEXT
    cluster = LocalCluster.start(
        folder,
        etcd_members=topology.etcd,
        coordinators=topology.coordinators,
        detect_s=topology.detect_s,
        fsync=False,  # no fault is a power cut, and the kernel keeps the data that a killed process has written
        etcd_placements=[host.placement for host in etcd],
        placements=[host.placement for host in coordinators],
        etcd_tls=certificates.etcd if certificates else None,
        options=certificates.options if certificates else lambda _name: ["--insecure"],
        credentials=credentials,
        say=say,
    )
    return Site(
        cluster=cluster,
        hosts=tuple(hosts),
        workers=tuple(host for host in hosts if host.name.startswith("host-")),
        network=network,
        credentials=credentials,
        etcd_tls=certificates.observer if certificates else None,
        environment=certificates.environment if certificates else {"STRATA_INSECURE": "1"},
    )
