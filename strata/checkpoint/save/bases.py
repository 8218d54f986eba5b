"""Choosing the base of an incremental save: the newest checkpoint, as this rank saved it.

An Incremental becomes a Full in these cases, and the log names the case: there is no checkpoint yet; the base's
manifest is damaged; an image to which the save would refer is damaged; a restore or a copy reported the base as
damaged; most of the state has changed; the unchanged chunks are spread over too many attempts.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from strata.checkpoint.catalog.protocol import Catalog, CheckpointMetadata, SaveRequest
from strata.checkpoint.copies.tiers import tiers_of
from strata.checkpoint.format.chunk_map import ChunkPlace, known_places, object_name, objects_in
from strata.checkpoint.format.digest import chunks
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.format.marker import read_manifest, read_rank_manifest
from strata.checkpoint.save.incremental import Delta, Digests, compare
from strata.checkpoint.snapshot.snapshot import Snapshot
from strata.checkpoint.snapshot.tensors import TensorSpec
from strata.checkpoint.storage.pipeline import DEFAULT_THREADS, digests
from strata.checkpoint.storage.sink import Storage
from strata.core.kv.records import CheckpointType
from strata.errors import CheckpointError, StorageError

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The request to the catalog, and the way to write the snapshot: only the changes if `delta` is set, else all.

    `digests` are the chunk digests that are known already, of some tensors or of all. `base` has the places of
    the base's chunks. `beside` is the parent of the base's folder.
    """

    request: SaveRequest
    digests: Digests | None = None
    delta: Delta | None = None
    base: Mapping[str, Mapping[int, ChunkPlace]] = field(default_factory=dict)
    beside: str = ""

    def whole(self) -> Plan:
        """Return the plan that writes everything and builds on no base."""
        request = dataclasses.replace(
            self.request, type=CheckpointType.FULL, base_step=None, base_attempt="", uses=frozenset()
        )
        return Plan(request=request)

    def for_record(self, record: CheckpointMetadata, folder: str) -> Plan:
        """Return the plan for the attempt `record` in `folder`; it has no delta if the attempt has another base.

        The rank that began the attempt may have chosen another base for all ranks. A manifest can refer only to
        folders with the same parent as its own folder.
        """
        if record.base_attempt != self.request.base_attempt or self.beside != folder.rpartition("/")[0]:
            return Plan(request=self.request)
        return self

    def shared(self, shares: Mapping[str, range], specs: Mapping[str, TensorSpec], digests: Digests) -> Plan:
        """Return the plan that writes, of each tensor in `shares`, only the given chunks; `digests` are known."""
        delta = compare(specs, digests, self.base, shares) if self.delta is not None else None
        return dataclasses.replace(self, digests=digests, delta=delta)


class DamagedCheckpoints:
    """The attempts of which this process found a copy damaged: no save of this process refers to their chunks.

    A restore may have read undamaged bytes from another copy or an older checkpoint. Without this set, the next save
    would not write those bytes, but refer to the damaged ones. These may belong to an attempt before the restored one.
    An entry loses its effect once a Full is the new base. May be used from any thread.
    """

    def __init__(self) -> None:
        self._noting = threading.Lock()
        self._folders: frozenset[str] = frozenset()

    def note(self, folder: str, complaint: str) -> None:
        """Stop building on the attempt in `folder` and on the attempts whose objects `complaint` names."""
        holds = {name.partition("/")[0] for name in objects_in(complaint)}
        with self._noting:
            self._folders |= {_attempt(folder), *holds}

    def among(self, folders: Iterable[str]) -> str:
        """Return an attempt among `folders` that was reported damaged, or ""."""
        return min(self._folders & {_attempt(folder) for folder in folders}, default="")


def _attempt(folder: str) -> str:
    """Return the name by which manifests in sibling folders refer to this folder."""
    return folder.rpartition("/")[2]


def choose(
    snapshot: Snapshot,
    request: SaveRequest,
    *,
    storage: Storage,
    catalog: Catalog,
    damaged: DamagedCheckpoints,
    threads: int = DEFAULT_THREADS,
) -> Plan:
    """Return the plan for saving the snapshot; only an Incremental needs a base.

    Each rank chooses for itself. A rank that cannot use the base writes its part whole, even in an Incremental
    that another rank began.
    """
    requested = Plan(request=request)
    if request.type is not CheckpointType.INCREMENTAL:
        return requested
    base = catalog.latest()
    if base is None:
        return _whole(requested, "there is no checkpoint yet")
    folder = catalog.folder(base)
    try:
        manifest = _manifest_of(storage, folder, base, catalog.rank)
    except (CheckpointError, StorageError) as error:
        return _whole(requested, error.message)
    used = [image.folder for image in manifest.files] if manifest is not None else []
    if found_bad := damaged.among([folder, *used]):
        return _whole(requested, f"a copy of {found_bad} was found damaged")
    request = dataclasses.replace(request, base_step=base.step, base_attempt=base.id)
    if manifest is None:  # the base has no part of this rank, only of others
        return Plan(request=request)
    found = digests_of(snapshot, snapshot.views, threads=threads)
    specs = {name: place.spec for name, place in snapshot.places.items()}
    before = {name: entry.chunks for name, entry in manifest.tensors.items()}
    places = known_places(folder, manifest)
    delta = compare(specs, found, places, snapshot.shares, before)
    if not delta.worth_it:
        return _whole(requested, delta.description)
    try:
        _check_images(storage, folder, delta)
    except StorageError as error:
        return _whole(requested, error.message)
    return Plan(
        request=dataclasses.replace(request, uses=delta.uses),
        digests=found,
        delta=delta,
        base=places,
        beside=folder.rpartition("/")[0],
    )


def _whole(requested: Plan, reason: str) -> Plan:
    log.info("step %d is saved whole: %s", requested.request.step, reason)
    return requested.whole()


def _manifest_of(storage: Storage, folder: str, base: CheckpointMetadata, rank: int) -> RankManifest | None:
    manifest = read_manifest(storage, folder, base.manifest_digest)
    if rank >= len(manifest.parts):
        return None
    return read_rank_manifest(storage, folder, manifest.parts[rank])


def digests_of(snapshot: Snapshot, names: Collection[str], *, threads: int) -> Digests:
    """Return the chunk digests of at least these tensors, once the tensors are copied."""
    if snapshot.digests is not None:
        return snapshot.digests
    snapshot.wait(max((snapshot.places[name].end for name in names), default=0))
    parts = {name: list(chunks(snapshot.views[name])) for name in names}
    found = iter(digests([chunk for part in parts.values() for chunk in part], threads=threads))
    return {name: tuple(next(found) for _ in part) for name, part in parts.items()}


def _check_images(storage: Storage, folder: str, delta: Delta) -> None:
    """Raise `StorageError` unless every image that the delta refers to exists with its recorded size.

    With two tiers, only the near one is checked: saves go to the near tier, and a checkpoint committed in the near
    tier must not depend on the far one. The images' bytes are not read again; a restore verifies them.
    """
    written = tiers_of(storage)[0]
    for image in sorted(delta.images, key=lambda image: (image.folder, image.image)):
        name = object_name(folder, image)
        found = written.size(name)
        if found != image.size_bytes:
            raise StorageError(f"{name} has {found} bytes instead of {image.size_bytes}")
