"""`P/backup`: the record of the newest backup of the control plane. No replica reads it."""

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
