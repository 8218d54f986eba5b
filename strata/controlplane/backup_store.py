"""The backups in a place: listing, verifying, and rotation.

A backup counts if its metadata is valid, and its database exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from strata.checkpoint.storage.sink import ObjectMissing
from strata.controlplane import metadata
from strata.controlplane.metadata import BackupCorrupt, BackupMetadata
from strata.controlplane.names import BackupName, parse, parse_stem
from strata.controlplane.places import BackupPlace
from strata.controlplane.snapshot import SnapshotDigest
from strata.core.restore.backup_rotation import Part, StoredFile, complete_stems, removals
from strata.core.restore.lineage import lineage as lineage_of
from strata.errors import NotFound, Refused, StorageError


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBackup:
    """A backup in a place. `fault` says why it does not count; if it counts, `fault` is "" and `metadata` is set."""

    name: BackupName
    size_bytes: int
    metadata: BackupMetadata | None
    fault: str = ""


def stored_files(place: BackupPlace) -> list[StoredFile]:
    """Return the backup files of every cluster; other files in the place are ignored."""
    return [found[1] for file in place.names() if (found := parse(file)) is not None]


def list_backups(place: BackupPlace, *, cluster: str | None = None) -> list[StoredBackup]:
    """Return the backups, newest first, including those that do not count."""
    parts: dict[BackupName, set[Part]] = {}
    for file in place.names():
        found = parse(file)
        if found is not None and cluster in {None, found[0].cluster}:
            parts.setdefault(found[0], set()).add(found[1].part)
    newest_first = sorted(parts, key=lambda name: (name.time, name.stem), reverse=True)
    shelved = (_look(place, name, parts[name]) for name in newest_first)
    return [backup for backup in shelved if backup is not None]


def _look(place: BackupPlace, name: BackupName, parts: set[Part]) -> StoredBackup | None:
    """Return one backup; None if another process has removed it meanwhile."""
    try:
        if Part.METADATA not in parts:
            size = place.size(name.database) if Part.DATABASE in parts else 0
            return StoredBackup(name=name, size_bytes=size, metadata=None, fault="unfinished")
        if Part.DATABASE not in parts:
            return StoredBackup(name=name, size_bytes=0, metadata=None, fault="its database is missing")
        described = read_metadata(place, name)
    except ObjectMissing:
        return None
    except BackupCorrupt as error:
        return StoredBackup(name=name, size_bytes=0, metadata=None, fault=error.message)
    return StoredBackup(name=name, size_bytes=described.size_bytes, metadata=described)


def read_metadata(place: BackupPlace, name: BackupName) -> BackupMetadata:
    """Return a backup's metadata; `BackupCorrupt` if it describes another backup, or cannot be read."""
    what = f"{place.uri}/{name.metadata}"
    described = metadata.decode(place.read(name.metadata), what=what)
    if (described.cluster, described.revision) != (name.cluster, name.revision):
        raise BackupCorrupt(
            f"{what} describes another backup: cluster {described.cluster}, revision {described.revision}"
        )
    return described


def newest_backup(place: BackupPlace, *, cluster: str | None = None) -> BackupName:
    """Return the newest backup that counts; `NotFound` if there is none."""
    for backup in list_backups(place, cluster=cluster):
        if not backup.fault:
            return backup.name
    of = f" of cluster {cluster}" if cluster is not None else ""
    raise NotFound(f"{place.uri} holds no finished backup{of}", hint="make one: strata controlplane backup")


def backup_to_restore(place: BackupPlace, *, cluster: str, lineage: str = "") -> BackupName:
    """Return the newest backup of `cluster` and of this lineage that counts; `NotFound` if there is none.

    `Refused` if no lineage is named and there are backups of several lineages: the newest may be of an empty cluster
    that coordinators started after etcd was lost.
    """
    by_lineage: dict[str, list[BackupName]] = {}
    for backup in list_backups(place, cluster=cluster):
        if backup.metadata is not None and not backup.fault:
            by_lineage.setdefault(lineage_of(backup.metadata.cluster_uid), []).append(backup.name)
    if not by_lineage:
        return newest_backup(place, cluster=cluster)
    listed = "; ".join(
        f"{one} has {len(names)}, the newest {names[0].stem}" for one, names in by_lineage.items()
    )
    requested_lineage = lineage_of(lineage)
    if requested_lineage and requested_lineage not in by_lineage:
        raise NotFound(f"{place.uri} holds no finished backup of lineage {requested_lineage}", hint=listed)
    if not requested_lineage and len(by_lineage) > 1:
        raise Refused(
            f"{place.uri} holds backups of {len(by_lineage)} clusters named {cluster}",
            hint=f"pass --lineage, or a backup by --name; {listed}",
        )
    return by_lineage[requested_lineage or next(iter(by_lineage))][0]


def verify_backup(
    place: BackupPlace, name: BackupName, *, advance: Callable[[int], None], described: BackupMetadata
) -> None:
    """Read the snapshot once, and return if it is complete; `BackupCorrupt` says what is wrong.

    Its size and SHA-256 are compared with the metadata, and etcd's own SHA-256 at its end is checked.
    """
    what = f"{place.uri}/{name.database}"
    digest = SnapshotDigest()
    try:
        for piece in place.pieces(name.database):
            digest.update(piece)
            advance(len(piece))
    except ObjectMissing as error:
        raise BackupCorrupt(f"{what} is missing") from error
    if digest.size_bytes != described.size_bytes:
        raise BackupCorrupt(f"{what} has {digest.size_bytes} bytes, and had {described.size_bytes}")
    if digest.sha256() != described.sha256:
        raise BackupCorrupt(
            f"{what} has changed since the backup: its SHA-256 is {digest.sha256()}, and was {described.sha256}"
        )
    if fault := digest.fault():
        raise BackupCorrupt(f"{what} is no snapshot of etcd: {fault}")


def find_metadata(place: BackupPlace, name: BackupName) -> BackupMetadata:
    """Return the metadata of a backup that a person named; `NotFound` if there is none."""
    try:
        return read_metadata(place, name)
    except ObjectMissing:
        raise NotFound(
            f"{place.uri} holds no finished backup {name.stem}",
            hint=f"strata controlplane backups {place.uri} lists its backups",
        ) from None


def rotate(
    place: BackupPlace, made: BackupName, *, uid: str, keep: int, now: datetime
) -> tuple[list[StoredFile], StorageError | None]:
    """Remove old backups of the lineage and leftovers of the cluster; return the removed files, and any error."""
    removed: list[StoredFile] = []
    try:
        files = stored_files(place)
        for file in removals(
            files,
            cluster=made.cluster,
            made=made.stem,
            related=_related(place, made, uid, files) if _may_be_full(files, made, keep) else (),
            keep=keep,
            now_unix_ms=int(now.timestamp() * 1000),
        ):
            place.delete(file.name)
            removed.append(file)
    except StorageError as error:
        return removed, error
    return removed, None


def _may_be_full(files: Sequence[StoredFile], made: BackupName, keep: int) -> bool:
    """Return False if no backup can be due for removal, so that no metadata need be read."""
    return len(complete_stems([file for file in files if file.cluster == made.cluster])) > keep


def _related(place: BackupPlace, made: BackupName, uid: str, files: Sequence[StoredFile]) -> set[str]:
    """Return the stems of the finished backups whose metadata have the lineage of `uid`."""
    related: set[str] = set()
    requested_lineage = lineage_of(uid)
    for stem in complete_stems([file for file in files if file.cluster == made.cluster]):
        try:
            if lineage_of(read_metadata(place, parse_stem(stem)).cluster_uid) == requested_lineage:
                related.add(stem)
        except (BackupCorrupt, ObjectMissing):
            continue  # the backup's lineage is unknown, or another process has removed the backup meanwhile
    return related
