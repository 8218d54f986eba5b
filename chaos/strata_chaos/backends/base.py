"""Where the parts of a system run: on loopback, or each in a network namespace of its own."""

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
    """Where one part runs: its address, and the command that enters its network."""

    name: str
    address: str
    enter: tuple[str, ...] = ()

    @property
    def placement(self) -> Placement:
        """The same for what starts processes."""
        return Placement(host=self.address, enter=self.enter)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One thing a host's network does to packets: drop them, or answer that nobody is there.

    `inbound` packets come from `peer`, others go to it. A `port` is the destination's.
    """

    host: str
    peer: str
    inbound: bool
    reject: bool = False
    port: int = 0


class Network(Protocol):
    """The network between hosts, where there is one to break."""

    def cut(self, key: str, rules: Sequence[Rule]) -> None:
        """Put `rules` in force, under a key that `mend` takes."""
        ...

    def packets(self, key: str) -> dict[str, int]:
        """Return how many packets met the rules of `key`, on each host."""
        ...

    def mend(self, key: str) -> None:
        """Take the rules of `key` away; nothing if they are gone."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What a backend has started. `workers` are the hosts for workloads, in turn.

    `credentials` are what our own calls show, `etcd_tls` what they show to etcd; `environment` is
    what makes workloads show theirs.
    """

    cluster: LocalCluster
    hosts: tuple[Host, ...]
    workers: tuple[Host, ...]
    network: Network | None = None
    credentials: Credentials = field(default_factory=Credentials)
    etcd_tls: TlsConfig | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


class Backend(Protocol):
    """A way to run a system on this machine."""

    @property
    def name(self) -> str:
        """As `--backend` takes it."""
        ...

    @property
    def summary(self) -> str:
        """What it is, in one sentence."""
        ...

    def available(self) -> str:
        """Return why it cannot be had on this machine; empty when it can."""
        ...

    def running(
        self, topology: Topology, folder: Path, *, workers: int, members: Sequence[str], say: Say
    ) -> AbstractContextManager[Site]:
        """Have everything running for as long as the context lasts; nothing is left after it.

        `workers` is how many hosts for workloads there are, `members` the worker ids that need
        certificates where there are any.
        Raises `StrataError` when something does not come up.
        """
        ...
