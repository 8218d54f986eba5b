"""Whether etcd takes writes, from what a replica saw of it (PROTOCOLS 3.6).

Two things stop every write and leave reads, watches and renewals alone, or nearly so:

    quota alarm   etcd answers each write with "database space exceeded" until somebody disarms it
    no leader     no member answers a write, for longer than an election takes

Both are facts of the cluster and not of one replica, so they send no member elsewhere. A replica
proves the opposite by a *dry run*: a transaction whose compare never holds. It goes through etcd's
log and past the alarm like a write, and changes nothing.

Times are seconds of one clock that runs through suspends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ELECTION_S: Final = 3.0
"""Longer than an election of etcd: its members wait for 1 to 2 s before they campaign."""
DRY_RUN_S: Final = 60.0
"""How long nothing is written before a dry run proves that something could be."""
MEND: Final = "strata doctor --etcd ENDPOINTS prints the commands that mend it"


@dataclass(slots=True, kw_only=True)
class Writability:
    """What one replica knows of etcd's willingness to write. Made with the time of its start."""

    proven_s: float
    """When etcd last took a write, or a dry run."""
    _full: bool = False
    _failing_s: float | None = None
    _why: str = ""
    _suspected: bool = False

    def proved(self, now_s: float) -> None:
        """Take note that etcd took a write."""
        self.proven_s = now_s
        self._full, self._failing_s, self._why, self._suspected = False, None, "", False

    def full(self) -> None:
        """Take note that etcd refused a write because its quota is used up: that is certain at once."""
        self._full = True

    def failed(self, now_s: float, why: str) -> None:
        """Take note that a dry run had no answer: one may be lost, or etcd elects a leader."""
        if self._failing_s is None:
            self._failing_s = now_s
        self._why = why

    def suspect(self) -> None:
        """Have the next dry run at once: something suggests that etcd takes no writes."""
        self._suspected = True

    def is_due(self, now_s: float) -> bool:
        """Tell whether a dry run is to be made now."""
        doubtful = self._suspected or self._full or self._failing_s is not None
        return doubtful or now_s - self.proven_s >= DRY_RUN_S

    def outage(self, now_s: float) -> str:
        """Return why nothing can be written; an empty string as long as something can, as far as is known."""
        if self._full:
            return f"nothing can be written: etcd's quota is used up (alarm NOSPACE); {MEND}"
        if self._failing_s is not None and now_s - self._failing_s >= ELECTION_S:
            silent_s = now_s - self._failing_s
            return f"nothing can be written: etcd has taken no write for {silent_s:.0f} s ({self._why})"
        return ""
