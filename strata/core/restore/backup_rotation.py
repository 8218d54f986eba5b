"""Backup rotation: which files to remove from a backup location after a backup succeeded. Pure.

A backup is two files with one stem: the database, and the metadata, which is written last and removed first.
A backup counts only if it has both files. This module considers only file names that Strata generates, and removes
only backups of one cluster: all other files in the location belong to other clusters or programs.

A cluster's name does not identify its data: a coordinator that starts on an emptied etcd makes a new cluster of the
same name. So a backup replaces only older backups of its own lineage (`core.restore.lineage`). *Otherwise backups
of the new, empty cluster would displace the backups needed to restore the old one.*
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final

LEFTOVER_MS: Final = 24 * 3600 * 1000
"""The age after which an unfinished backup counts as interrupted: no backup takes so long."""


class Part(Enum):
    """The part of a backup that a file holds."""

    DATABASE = "db"
    METADATA = "json"
    TEMPORARY = "tmp"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file of a backup, parsed from its name. The two parts of a backup have the same `stem`."""

    name: str
    stem: str
    cluster: str
    unix_ms: int
    part: Part


def complete_stems(files: Sequence[StoredFile]) -> list[str]:
    """Return the stems of the complete backups, newest first."""
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
    """Return the files to remove, in the required order: metadata before its database.

    `related`: the stems of those backups of `cluster` that are known to have the lineage of `made`; the newest
    `keep` of them stay. `made`: the backup just made; it always stays, even if another host's clock is ahead of
    this one's. Metadata without a database stays too, because nothing in Strata leaves such files.
    """
    ours = [file for file in files if file.cluster == cluster and file.stem != made]
    others = [stem for stem in complete_stems(ours) if stem in related]
    stay = set(others[: max(0, keep - 1)])
    old = [stem for stem in reversed(others) if stem not in stay]
    by_part = {(file.stem, file.part): file for file in ours}
    removed = [by_part[stem, part] for stem in old for part in (Part.METADATA, Part.DATABASE)]
    described = {file.stem for file in ours if file.part is Part.METADATA}
    limit = now_unix_ms - LEFTOVER_MS
    removed += [
        file
        for file in ours
        if file.unix_ms < limit
        and (file.part is Part.TEMPORARY or (file.part is Part.DATABASE and file.stem not in described))
    ]
    return removed
