"""Whether etcd takes writes, from one replica's observations (PROTOCOLS 3.6).

Two conditions stop every write, but affect reads, watches and lease renewals little or not at all:

    quota alarm   etcd answers each write with "database space exceeded" until an operator disarms it
    no leader     no member answers a write, for longer than an election takes

Both conditions concern the cluster and not one replica, so no member fails over because of them. A replica proves
that writes work by a *dry run*: a transaction whose compare never holds. A dry run passes through etcd's log and
alarm check like a write, but changes nothing.

Times are seconds of one clock that runs through suspends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELECTION_S: Final = 3.0
"""Longer than an election of etcd: its members wait for 1 to 2 s before they campaign."""
DRY_RUN_S: Final = 60.0
"""The time without writes after which a dry run checks that etcd takes them."""
MEND: Final = "strata doctor --etcd ENDPOINTS prints the commands that mend it"


@dataclass(slots=True, kw_only=True)
class Writability:
    """One replica's knowledge of whether etcd takes writes. Created with the replica's start time."""

    proven_s: float
    """When etcd last took a write or a dry run."""
    _full: bool = False
    _failing_s: float | None = None
    _why: str = ""
    _suspected: bool = False

    def proved(self, now_s: float) -> None:
        """Record that etcd took a write."""
        self.proven_s = now_s
        self._full, self._failing_s, self._why, self._suspected = False, None, "", False

    def full(self) -> None:
        """Record that etcd refused a write because its quota is used up. One such answer is proof."""
        self._full = True

    def failed(self, now_s: float, why: str) -> None:
        """Record that a dry run got no answer: the answer may be lost, or etcd may be electing a leader."""
        if self._failing_s is None:
            self._failing_s = now_s
        self._why = why

    def suspect(self) -> None:
        """Make the next dry run due immediately: something suggests that etcd takes no writes."""
        self._suspected = True

    def is_due(self, now_s: float) -> bool:
        """Return whether a dry run is due now."""
        doubtful = self._suspected or self._full or self._failing_s is not None
        return doubtful or now_s - self.proven_s >= DRY_RUN_S

    def outage(self, now_s: float) -> str:
        """Return why etcd takes no writes; "" while it takes writes, as far as is known."""
        if self._full:
            return f"nothing can be written: etcd's quota is used up (alarm NOSPACE); {MEND}"
        if self._failing_s is not None and now_s - self._failing_s >= ELECTION_S:
            silent_s = now_s - self._failing_s
            return f"nothing can be written: etcd has taken no write for {silent_s:.0f} s ({self._why})"
        return ""
