"""`P/restoring`: who restores the keys of the cluster just now (PROTOCOLS 9.4)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """The control plane is being restored: no replica serves, and none creates a uid, while this is there.

    `uid` is that of the cluster before, "" if there was none; `replaced` as in `ClusterUid`: an interrupted restore
    leaves them to the one that takes it over. `in_place`: the keys below are a cluster's own, and whole.
    """

    who: str
    since_unix_ms: int
    source: str = ""
    uid: str = ""
    replaced: tuple[str, ...] = ()
    in_place: bool = False

    def __str__(self) -> str:
        return f"{self.who} began" + (f", from {self.source}" if self.source else "")
