"""Records of two keys of the whole cluster: `P/backup` and `P/restoring` (PROTOCOLS 9.4).

No replica reads `P/backup`, the record of the newest backup.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Backup:
    """The newest backup, as its writer recorded it, for people.

    The snapshot holds at least `revision`. `where` is the URL of the backup location, without credentials.
    """

    revision: int
    unix_ms: int
    where: str
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoring:
    """The control plane is being restored: while this key exists, no replica serves, and none creates a uid.

    `uid`: the uid of the cluster before the restore, "" if there was none; `replaced` is as in `ClusterUid`. A
    restore that takes over from an interrupted restore uses both. `in_place`: etcd's other keys belong to the
    cluster itself, and are complete.
    """

    who: str
    since_unix_ms: int
    source: str = ""
    uid: str = ""
    replaced: tuple[str, ...] = ()
    in_place: bool = False

    def __str__(self) -> str:
        return f"{self.who} began" + (f", from {self.source}" if self.source else "")
