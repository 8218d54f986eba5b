"""The interface of backends: run the processes of a system on loopback, or each in its own network namespace."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from strata.config import Credentials
from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.placement import Placement
from strata.etcd import TlsConfig
from strata_chaos.scenario import Topology

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The host of one process: its address, and the command prefix that runs a program in the host's network."""

    name: str
    address: str
    enter: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        """This host in the form that `strata.devcluster` takes."""
        return Placement(host=self.address, enter=self.enter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One packet filter rule of a host. It drops matching packets, or answers them with a TCP reset (`reject`).

    `inbound` rules match packets from `peer`; other rules match packets to `peer`. `port` is the destination port; 0
    matches any port.
    """

    host: str
    peer: str
    inbound: bool
    reject: bool = False
    port: int = 0


class Network(Protocol):
    """The network between hosts, on backends that can break it."""

    def cut(self, key: str, rules: Sequence[Rule]) -> None:
        """Apply `rules` under `key`; `mend(key)` removes them."""
        ...

    def packets(self, key: str) -> dict[str, int]:
        """Return the number of packets that matched the rules of `key`, by host."""
        ...

    def mend(self, key: str) -> None:
        """Remove the rules of `key`, if there are any."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A started system. Workloads are placed on `workers`, round robin.

    The harness calls coordinators with `credentials` and etcd with `etcd_tls`. `environment` holds the variables from
    which workloads take their own credentials.
    """

    cluster: LocalCluster
    hosts: tuple[Host, ...]
    workers: tuple[Host, ...]
    network: Network | None = None
    credentials: Credentials = field(default_factory=Credentials)
    etcd_tls: TlsConfig | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """One way to run a system on this machine."""

    @property
    def name(self) -> str:
        """The value of `--backend` that selects this backend."""
        ...

    @property
    def summary(self) -> str:
        """One-sentence description."""
        ...

    def available(self) -> str:
        """Return why this machine cannot run the backend; empty if it can."""
        ...

    def running(
        self, topology: Topology, folder: Path, *, workers: int, members: Sequence[str], say: Say
    ) -> AbstractContextManager[Site]:
        """Run the system while the context lasts; leave nothing behind.

        `workers` is the number of hosts for workloads. `members` are the worker ids that get certificates if the
        topology uses TLS. Raises `StrataError` if a process does not come up.
        """
        ...
