"""What etcd's members say of themselves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final

NO_LEADER: Final = "it knows no leader"
"""The error of an etcd member that answers and knows of no leader."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdMember:
    """One etcd member as its own status call describes it; `error` says why it did not answer."""

    endpoint: str
    version: str = ""
    healthy: bool = False
    leader: bool = False
    db_size_bytes: int = 0
    error: str = ""
    full: bool = False
    """Whether it reports the alarm NOSPACE."""


AskMembers = Callable[[], Awaitable[Sequence[EtcdMember]]]
"""Asks every etcd member for its status, each with a limit of its own; raises for none of them."""
