"""The cluster."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One coordinator: registered, or unreachable and not forgotten."""

    replica: str
    address: str
    http_url: str
    """Where it serves this API; empty if nowhere."""
    version: str
    leader: bool
    ready: bool
    reason: str
    answered: bool
    """Whether this is the replica that answers."""
    unreachable: bool = False
    """It was registered, and is not any more."""
    unreachable_since_unix_ms: int | None = None
    """When a leader saw that it was lost; None if it is not, or if no leader has seen it yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    endpoint: str
    version: str
    healthy: bool
    leader: bool
    db_size_bytes: int
    error: str
    warning: str
    """Known bugs of its version."""


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
