"""One backup: a member's snapshot, then its metadata, then rotation and the record in etcd.

1. The place is checked first, so that a wrong place is found before a snapshot is made.
2. A healthy member streams its database into a file that does not have its final name yet (`places`).
3. The file is discarded if the stream's last 32 bytes are not the SHA-256 of the bytes before. The file is also
   discarded if etcd holds another cluster after the snapshot than before: then a restore began, and the
   snapshot may contain only half of the restored keys.
4. The database gets its name, then the metadata does. From here on the backup counts.
5. Old backups are removed, and the backup is recorded in etcd. A failure of either is a warning.

An interruption before step 4 is complete leaves no backup that counts. Simultaneous backups have different names.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import datetime

from strata.controlplane.backup_store import rotate
from strata.controlplane.metadata import BackupCorrupt, BackupMetadata
from strata.controlplane.names import BackupName, backup_name
from strata.controlplane.places import BackupPlace, NewFile, Progress, creating, put
from strata.controlplane.record import record_backup
from strata.controlplane.snapshot import SnapshotDigest
from strata.controlplane.source import Source, check_unchanged, find_source
from strata.core.kv.keys import ClusterKeys
from strata.core.restore.backup_rotation import Part, StoredFile
from strata.core.restore.records import Backup
from strata.errors import StrataError
from strata.etcd import EtcdStore

Connect = Callable[[], Awaitable[EtcdStore]]
"""Opens a store on etcd; this package closes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeBackup:
    """A backup that counts. `warnings` say which later steps failed."""

    name: BackupName
    metadata: BackupMetadata
    reason: str
    removed: tuple[StoredFile, ...]
    warnings: tuple[str, ...]

    @property
    def removed_backups(self) -> int:
        """Number of finished backups that rotation removed."""
        return sum(file.part is Part.METADATA for file in self.removed)


def back_up(
    connect: Connect,
    place: BackupPlace,
    *,
    cluster: str,
    keep: int,
    strata_version: str,
    now: Callable[[], datetime],
    progress: Progress,
) -> MadeBackup:
    """Make one backup of `cluster`, and return it once it counts.

    `Unavailable` if no member of etcd can give a snapshot or the stream broke; `BackupCorrupt` if the snapshot arrived
    damaged; `Conflict` if a restore began meanwhile; `StorageError` if the place rejects it. After an error, no backup
    that counts is left.
    """
    keys = ClusterKeys(cluster)
    place.prepare()
    # one loop for both calls: gRPC may deliver an event to the loop after the first call
    with asyncio.Runner() as loop:
        with contextlib.ExitStack() as unfinished:
            source, name, file, digest = loop.run(_receive(connect, place, keys, now, progress, unfinished))
            # outside the loop, so that Ctrl-C ends an upload immediately
            file.commit(progress)
        metadata = BackupMetadata(
            cluster=cluster,
            cluster_uid=source.uid,
            etcd_cluster_id=source.etcd_cluster_id,
            revision=source.revision,
            member=source.member,
            etcd_version=source.version,
            strata_version=strata_version,
            size_bytes=digest.size_bytes,
            sha256=digest.sha256(),
            time=name.time,
        )
        # If this fails, the database file stays, but does not count as a backup. It must not be deleted: if only the
        # answer was lost, the metadata exists, and metadata without a database must not exist.
        put(place, name.metadata, metadata.encode())
        removed, rotation_error = rotate(place, name, uid=source.uid, keep=keep, now=now())
        warnings = [] if rotation_error is None else [f"older backups stay: {rotation_error.message}"]
        record = Backup(
            revision=source.revision, unix_ms=name.unix_ms, where=place.uri, size_bytes=digest.size_bytes
        )
        try:
            loop.run(_record(connect, keys, record, source.uid_value))
        except StrataError as error:
            warnings.append(
                f"etcd has no record of this backup, so strata doctor does not see it: {error.message}"
            )
    return MadeBackup(
        name=name,
        metadata=metadata,
        reason=source.reason,
        removed=tuple(removed),
        warnings=tuple(warnings),
    )


async def _receive(
    connect: Connect,
    place: BackupPlace,
    keys: ClusterKeys,
    now: Callable[[], datetime],
    progress: Progress,
    unfinished: contextlib.ExitStack,
) -> tuple[Source, BackupName, NewFile, SnapshotDigest]:
    """Stream a snapshot into a new file of the place; `unfinished` discards the file unless it is committed."""
    async with await connect() as store:
        source = await find_source(store, keys)
        name = backup_name(keys.cluster, now(), source.revision)
        file = unfinished.enter_context(creating(place, name.database))
        digest = SnapshotDigest()
        pieces = contextlib.aclosing(store.cluster.snapshot(source.endpoint))
        with progress(f"snapshot of {source.member}", source.database_bytes) as advance:
            async with pieces as snapshot:
                async for piece in snapshot:
                    digest.update(piece)
                    file.write(piece)
                    advance(len(piece))
        await check_unchanged(store, keys, source)
    if fault := digest.fault():
        raise BackupCorrupt(
            f"the snapshot of etcd member {source.member} came damaged: {fault}",
            hint="nothing of it was kept; make the backup again",
        )
    return source, name, file, digest


async def _record(connect: Connect, keys: ClusterKeys, backup: Backup, uid_value: bytes) -> None:
    async with await connect() as store:
        await record_backup(store, keys, backup, uid_value=uid_value)
