"""The status of etcd's members, as they report it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

NO_LEADER: Final = "it knows no leader"
"""The error of an etcd member that answers but has no leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    """One etcd member as its status call describes it; `error` is why it did not answer."""

    endpoint: str
    version: str = ""
    healthy: bool = False
    leader: bool = False
    db_size_bytes: int = 0
    error: str = ""
    full: bool = False
    """Whether the etcd member reports the alarm NOSPACE."""


AskMembers = Callable[[], Awaitable[Sequence[EtcdMember]]]
"""Requests the status of every etcd member, each with its own timeout; a failing member raises no error."""
