"""Which files a place of backups gives up after a backup succeeded. Pure.

A backup is two files of one stem: the database, and the metadata that is written last and removed first.
Only both together count. Only names that Strata gives are seen here, and only those of one cluster are
removed: what else lies in the place is somebody else's.

A cluster's name says nothing of its data: a coordinator that begins on an emptied etcd makes a new cluster of the same
name. So a backup makes room among those of its own lineage alone. *Else backups of the empty cluster would push out
those that it is to be restored from.*
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

LEFTOVER_MS: Final = 24 * 3600 * 1000
"""How old an unfinished backup must be before it counts as interrupted: no backup takes so long."""


class Part(Enum):
    """What a file of a backup is."""

    DATABASE = "db"
    METADATA = "json"
    TEMPORARY = "tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a backup, as its name says. Two parts of one backup have the same `stem`."""

    name: str
    stem: str
    cluster: str
    unix_ms: int
    part: Part


def complete_stems(files: Sequence[StoredFile]) -> list[str]:
    """Return the stems of the backups that count, newest first."""
    databases = {file.stem for file in files if file.part is Part.DATABASE}
    whole = [file for file in files if file.part is Part.METADATA and file.stem in databases]
    return [file.stem for file in sorted(whole, key=lambda file: (file.unix_ms, file.stem), reverse=True)]


def removals(
    files: Sequence[StoredFile],
    *,
    cluster: str,
    made: str,
    related: Collection[str],
    keep: int,
    now_unix_ms: int,
) -> list[StoredFile]:
    """Return what goes, in the order in which it has to: metadata before its database.

    Of `related`, the stems of `cluster`'s backups that are known to be of the lineage of `made`, the newest `keep`
    stay. So does `made` itself, the stem of the backup that has just been made, though another host's clock may be
    ahead of ours, and metadata without a database, for nothing that Strata does leaves them.
    """
    ours = [file for file in files if file.cluster == cluster and file.stem != made]
    others = [stem for stem in complete_stems(ours) if stem in related]
    stay = set(others[: max(0, keep - 1)])
    old = [stem for stem in reversed(others) if stem not in stay]
    by_part = {(file.stem, file.part): file for file in ours}
    gone = [by_part[stem, part] for stem in old for part in (Part.METADATA, Part.DATABASE)]
    described = {file.stem for file in ours if file.part is Part.METADATA}
    limit = now_unix_ms - LEFTOVER_MS
    gone += [
        file
        for file in ours
        if file.unix_ms < limit
        and (file.part is Part.TEMPORARY or (file.part is Part.DATABASE and file.stem not in described))
    ]
    return gone
