"""The start of a restore: its initial keys (a backup's, those in etcd, or none), and the backup's snapshot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.checkpoint.storage.sink import ObjectMissing
from strata.controlplane.metadata import BackupCorrupt, BackupMetadata
from strata.controlplane.names import BackupName
from strata.controlplane.places import BackupPlace
from strata.controlplane.rewriting import Keyspace, read_keyspace
from strata.controlplane.snapshot import SnapshotDigest
from strata.controlplane.storage_search import Survey
from strata.core.checkpoints.tiers import present_on, tiers_of
from strata.core.key_kinds import kind_of
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import CheckpointRecord, CheckpointState, ClusterUid, PoisonRecord, decode
from strata.core.kv.store import Store
from strata.core.kv.txn import read_prefix
from strata.core.restore.lineage import lineage
from strata.errors import InvalidArgument, NotFound, Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The state that a restore completes: its keys below `P/jobs/`, its cluster's uid, and a name for people."""

    jobs: Mapping[str, bytes]
    uid: str
    source: str
    backup: bytes | None = None
    in_place: bool = False
    """Whether this base is the state that etcd itself holds now."""


def download(
    place: BackupPlace,
    name: BackupName,
    described: BackupMetadata,
    target: Path,
    *,
    advance: Callable[[int], None],
) -> None:
    """Write a backup's snapshot to `target`; `BackupCorrupt` if it differs from the snapshot that was backed up."""
    what, digest = f"{place.uri}/{name.database}", SnapshotDigest()
    try:
        with target.open("xb") as file:
            for piece in place.pieces(name.database):
                digest.update(piece)
                file.write(piece)
                advance(len(piece))
    except ObjectMissing as error:
        raise BackupCorrupt(f"{what} is missing") from error
    if (digest.size_bytes, digest.sha256()) != (described.size_bytes, described.sha256):
        raise BackupCorrupt(
            f"{what} has changed since the backup: {digest.size_bytes} bytes with SHA-256 {digest.sha256()}",
            hint="take another backup by --name; strata controlplane backups lists them",
        )


async def read_base(store: Store, keys: ClusterKeys, *, source: str, uid: str = "") -> Base:
    """Return the state that an etcd (of a snapshot, for example) holds. `uid`: the expected uid, if known."""
    held = await read_keyspace(store, keys)
    if held.uid is None:
        raise NotFound(
            f"{source} holds nothing of cluster {keys.cluster}; it holds {await _clusters(store)}",
            hint="pass --cluster",
        )
    if uid and held.uid.uid != uid:
        raise BackupCorrupt(f"{source} holds cluster {held.uid.uid}, and its metadata names {uid}")
    return Base(jobs=held.jobs, uid=held.uid.uid, source=source, backup=held.backup)


async def _clusters(store: Store) -> str:
    """Return, in words, the clusters of which an etcd holds keys."""
    found = set()
    for kv in (await store.read(read_prefix("/strata/v1/"))).kvs:
        name, _, rest = kv.key.removeprefix("/strata/v1/").partition("/")
        if rest == "uid" and _readable(kv.value):
            found.add(name)
    return f"cluster {', '.join(sorted(found))}" if found else "no cluster"


def _readable(value: bytes) -> bool:
    try:
        decode(ClusterUid, value)
    except PoisonRecord:
        return False
    return True


def base_in_place(held: Keyspace) -> Base:
    """Return the state in etcd now, or the state from which an interrupted restore in place started.

    `Refused` if a restore from another source was interrupted: etcd then holds only a part of its keys.
    """
    if held.restoring is not None and not held.restoring.in_place:
        source = held.restoring.source or "its source"
        raise Refused(
            "a restore that was not in place was interrupted: etcd holds only a part of its keys",
            hint=f"run that restore again, from {source}: it continues",
        )
    uid = held.uid.uid if held.uid is not None else held.restoring.uid if held.restoring is not None else ""
    if not uid:
        raise NotFound(
            "etcd holds no cluster of this name",
            hint="restore a backup by --from, or build it from storage: strata controlplane rebuild",
        )
    return Base(jobs=held.jobs, uid=uid, source=f"etcd as of revision {held.revision}", in_place=True)


def expected(jobs: Mapping[str, bytes], keys: ClusterKeys) -> dict[str, str]:
    """Return the manifest digest of each copy that is committed in the catalog, by the URI of the copy's folder."""
    found = {}
    for key, value in jobs.items():
        job = keys.job_of(key)
        try:
            if not job or kind_of(key, keys.job(job).root) is not CheckpointRecord:
                continue
            record = decode(CheckpointRecord, value)
        except (PoisonRecord, InvalidArgument):
            continue
        if record.state is CheckpointState.COMMITTED and record.manifest_digest:
            for name in present_on(record):
                found[tiers_of(record)[name].path] = record.manifest_digest
    return found


def lineage_of(surveys: Sequence[Survey], wanted: str) -> str:
    """Return the lineage of the cluster to which these roots belong; `Refused` if there are several to choose from.

    `wanted`: the lineage that a person named, or "".
    """
    jobs: dict[str, set[str]] = {}
    for each in surveys:
        for one, names in each.jobs.items():
            jobs.setdefault(one, set()).update(names)
    if wanted:
        if lineage(wanted) not in jobs:
            raise Refused(f"no root has a job of lineage {wanted}", hint=_listed(jobs))
        return lineage(wanted)
    if not jobs:
        raise NotFound(
            "the roots hold no job's folder of any cluster", hint="name the roots that trainings save into"
        )
    if len(jobs) > 1:
        raise Refused(f"the roots are of {len(jobs)} clusters", hint=f"pass --lineage; {_listed(jobs)}")
    return next(iter(jobs))


def _listed(jobs: Mapping[str, set[str]]) -> str:
    """Return, in words, the lineages and their jobs."""
    return "; ".join(
        f"{one} has {', '.join(sorted(names)[:5])}{' …' if len(names) > 5 else ''}"
        for one, names in sorted(jobs.items())
    )
