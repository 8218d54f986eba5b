"""The cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One coordinator: registered, or unreachable and not forgotten."""

    replica: str
    address: str
    http_url: str
    """Where the replica serves this API; empty if it does not."""
    version: str
    leader: bool
    ready: bool
    reason: str
    answered: bool
    """Whether this is the replica that answers."""
    unreachable: bool = False
    """The replica was registered, and is not registered any more."""
    unreachable_since_unix_ms: int | None = None
    """When a leader noticed the replica's loss; None if the replica is not lost, or if no leader has noticed it
    yet.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    endpoint: str
    version: str
    healthy: bool
    leader: bool
    db_size_bytes: int
    error: str
    warning: str
    """Known bugs of the member's version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """The cluster as one replica sees it at `revision`."""

    cluster: str
    uid: str
    revision: int
    unix_ms: int
    answered_by: str
    version: str
    healthy: bool
    ready: bool
    reason: str
    leader: str
    leader_epoch: int
    sessions: int
    etcd_silence_ms: int
    audit_differences: int
    alarms: tuple[str, ...]
    """Conditions that need an operator, in sentences; empty if none."""
    replicas: tuple[Replica, ...]
    etcd: tuple[EtcdMember, ...]
    jobs_total: int
    jobs_by_phase: dict[str, int]
