"""Searches storage roots for a cluster's checkpoints whose files prove them complete. Writes nothing.

A checkpoint counts if its COMMIT marker, its manifests and every image exist with their recorded length. The
same must hold for its bases. A checkpoint that is committed in the catalog also counts without
its marker, because the marker may not have been written yet. With `verify` every byte is read.

A root may contain files of any program. Each entry that is not a Strata checkpoint, or cannot be read, becomes
one line of the report. A root that cannot be listed ends the search. A job's folder is *unread* if it
cannot be listed, or if its owner cannot be read. Then its checkpoints must not count as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Final

from strata.checkpoint.catalog.evidence import Folder
from strata.checkpoint.format.manifest import Manifest
from strata.checkpoint.format.marker import read_manifest, read_marker, read_rank_manifests
from strata.checkpoint.restore.verify import verify as read_all
from strata.checkpoint.storage import root
from strata.checkpoint.storage.sink import Storage, unobserved
from strata.core.checkpoints.paths import folder_name
from strata.core.ids import AttemptId, checked_id
from strata.core.kv.records import CheckpointType
from strata.core.restore.storage_evidence import MAX_GENERATION, Found, FoundCheckpoint, Slot
from strata.errors import (
    CheckpointCorrupt,
    CheckpointIncomplete,
    InvalidArgument,
    NotFound,
    Refused,
    StrataError,
)

THREADS: Final = 4
"""How many checkpoints are examined at a time: the manifests of each are in memory meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """The jobs that have folders in one root, by the lineage of their cluster.

    `unread`: the folders that may be a job's but whose owner is unknown, by URI, with the reason.
    """

    storage: Storage
    jobs: Mapping[str, tuple[str, ...]]
    unread: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """The checkpoints of one cluster that the roots prove, and the folders that were skipped."""

    found: Found
    skipped: tuple[str, ...]


def survey(storage: Storage) -> Survey:
    """Find the owners of a root's folders. `NotFound` if `storage` is no root, `Refused` if no coordinator used it."""
    owner = root.owner_of(storage)
    if owner is None:
        raise NotFound(
            f"{storage.uri} is no storage root: it has no {root.NAME}",
            hint="name the folder, or the prefix, that the trainings save into",
        )
    if root.parse_owner(owner) is not None:
        raise Refused(f"{storage.uri} is the folder of one job", hint="name the storage root above it")
    if owner != root.COORDINATED:
        raise Refused(
            f"{storage.uri} belongs to trainings without coordinators: nothing of it is in any catalog",
            hint="such a training goes on from it by itself",
        )
    jobs: dict[str, list[str]] = {}
    unread = {}
    for name in storage.list():
        if name == root.NAME:
            continue
        try:
            belongs = root.owner_of(storage, folder=name)
            parsed = root.parse_owner(belongs) if belongs is not None else None
            if parsed is None:
                continue  # the folder has no owner, or an owner whose name Strata would not give
            if parsed[1] != name:
                raise Refused(f"its {root.NAME} names another job, {parsed[1]}")
            checked_id("job", name)
            checked_id("cluster's data", parsed[0])
        except StrataError as error:
            unread[f"{storage.uri}/{name}"] = error.message
        else:
            jobs.setdefault(parsed[0], []).append(name)
    return Survey(
        storage=storage,
        jobs={lineage: tuple(sorted(names)) for lineage, names in jobs.items()},
        unread=unread,
    )


def search(
    surveys: Sequence[Survey],
    lineage: str,
    *,
    expected: Mapping[str, str],
    earlier: Found | None = None,
    verify: bool = False,
    on_folder: Callable[[], None] = unobserved,
    on_bytes: Callable[[int], None] = unobserved,
) -> Searched:
    """Return the checkpoints that the roots prove for the cluster of this lineage.

    `expected`: the manifest's digest of each copy that the catalog has as committed, by the URI of its folder.
    Checkpoints that `earlier` proved committed are not read again if their folder still exists.
    `on_folder` is called for each examined checkpoint. Other threads call `on_bytes` with the bytes read.
    """
    result = _Result()
    proven = earlier.by_path if earlier is not None else {}
    tasks: list[tuple[Storage, str, Folder]] = []
    for each in surveys:
        for uri, why in each.unread.items():
            result.leave_out(uri, why)
        for job in each.jobs.get(lineage, ()):
            for storage, _, folder in result.list_job(each.storage, job):
                known = proven.get(f"{storage.uri}/{job}/{folder.name}")
                if known is not None and known.marked:
                    result.checkpoints.append(known)
                else:
                    tasks.append((storage, job, folder))
    pool = ThreadPoolExecutor(THREADS, thread_name_prefix="strata-search")
    try:
        looks = pool.map(
            lambda task: _look(*task, expected=expected, verify=verify, on_bytes=on_bytes), tasks
        )
        for look in looks:
            result.take(look)
            on_folder()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return result.of([each.storage.uri for each in surveys])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The result for one folder: a checkpoint, damaged, not read, or nothing."""

    path: str
    checkpoint: FoundCheckpoint | None = None
    damaged: str = ""
    unread: str = ""


@dataclass(slots=True)
class _Result:
    checkpoints: list[FoundCheckpoint] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    unread: dict[str, str] = field(default_factory=dict)
    listed: set[str] = field(default_factory=set)
    generations: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)

    def leave_out(self, folder: str, why: str) -> None:
        """Record a folder that may be a job's, and cannot be read."""
        self.unread[folder] = why
        root, _, name = folder.rpartition("/")
        self.skipped.append(f"{root}/{name[:200]} is left out: {why}")

    def list_job(self, storage: Storage, job: str) -> Iterable[tuple[Storage, str, Folder]]:
        """Yield the checkpoint folders of one job in one root."""
        self.generations.setdefault(job, 0)
        try:
            names = storage.list(job)
        except StrataError as error:
            self.unread[f"{storage.uri}/{job}"] = error.message
            self.skipped.append(f"{storage.uri}/{job} is not searched: {error.message}")
            return
        self.listed.add(f"{storage.uri}/{job}")
        for name in names:
            folder = Folder.parse(name)
            if folder is None:
                continue
            if (fault := _fault(folder)) != "":
                self.skipped.append(f"{storage.uri}/{job}/{name[:200]} is left out: {fault}")
                continue
            self.generations[job] = max(self.generations[job], folder.generation)
            yield storage, job, folder

    def take(self, look: _Look) -> None:
        if look.checkpoint is not None:
            self.checkpoints.append(look.checkpoint)
        if look.damaged:
            self.damaged[look.path] = look.damaged
            self.skipped.append(f"{look.path} is damaged: {look.damaged}")
        if look.unread:
            self.unread[look.path] = look.unread
            self.skipped.append(f"{look.path} is not read: {look.unread}")

    def of(self, roots: Iterable[str]) -> Searched:
        found = Found(
            roots=tuple(roots),
            listed=frozenset(self.listed),
            checkpoints=tuple(self.checkpoints),
            damaged=self.damaged,
            unread=self.unread,
            generations=self.generations,
        )
        return Searched(found=found, skipped=tuple(self.skipped))


def _fault(folder: Folder) -> str:
    """Return why this cannot be the folder of one of Strata's checkpoint attempts, or ""."""
    if folder.generation > MAX_GENERATION:
        return f"no job has a generation {folder.generation}"
    if folder.generation == 0:
        return "no checkpoint is saved in a generation 0"
    try:
        checked_id("attempt", folder.attempt)
    except InvalidArgument as error:
        return error.message
    if folder.name != folder_name(folder.step, folder.generation, folder.attempt):
        return "its name is not written as Strata writes it"
    return ""


def _look(
    storage: Storage,
    job: str,
    folder: Folder,
    *,
    expected: Mapping[str, str],
    verify: bool,
    on_bytes: Callable[[int], None],
) -> _Look:
    name = f"{job}/{folder.name}"
    path = f"{storage.uri}/{name}"
    marked = True
    try:
        marker = read_marker(storage, name)
        marked = marker is not None
        digest = marker.manifest_digest if marker is not None else expected.get(path, "")
        if not digest:
            return _Look(path=path)
        manifest = read_manifest(storage, name, digest)
        identity = manifest.identity
        if (identity.step, identity.generation, identity.attempt) != (
            folder.step,
            folder.generation,
            folder.attempt,
        ):
            return _Look(path=path, damaged="it holds another checkpoint")
        read_rank_manifests(storage, name, manifest)
        if verify and (problems := _problems(storage, name, digest, on_bytes)):
            return _Look(path=path, damaged=problems)
    except CheckpointIncomplete as error:
        # without a marker, the checkpoint is being removed or was never complete
        return _Look(path=path, damaged=error.message if marked else "")
    except CheckpointCorrupt as error:
        return _Look(path=path, damaged=error.message)
    except StrataError as error:
        return _Look(path=path, unread=error.message)
    return _Look(path=path, checkpoint=_checkpoint(storage.uri, job, manifest, digest, marked=marked))


def _problems(storage: Storage, name: str, digest: str, on_bytes: Callable[[int], None]) -> str:
    problems = read_all(storage, name, manifest_digest=digest, on_bytes=on_bytes).problems
    return problems[0] if problems else ""


def _checkpoint(uri: str, job: str, manifest: Manifest, digest: str, *, marked: bool) -> FoundCheckpoint:
    identity = manifest.identity
    return FoundCheckpoint(
        job=job,
        root=uri,
        step=identity.step,
        generation=identity.generation,
        attempt=AttemptId(identity.attempt),
        type=CheckpointType(identity.type),
        ranks=identity.world_size,
        manifest_digest=digest,
        epoch=identity.epoch,
        size_bytes=manifest.size_bytes,
        model_hash=manifest.model_hash,
        created_unix_ms=manifest.created_unix_ms,
        metadata=manifest.metadata,
        predecessor=manifest.predecessor,
        uses=tuple(slot for used in manifest.uses if (slot := _slot(used)) is not None),
        marked=marked,
    )


def _slot(name: str) -> Slot | None:
    folder = Folder.parse(name)
    return (folder.step, folder.generation, AttemptId(folder.attempt)) if folder is not None else None
