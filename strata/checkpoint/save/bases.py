"""Choosing what an Incremental builds on: the newest checkpoint, as this rank saved it.

An Incremental is asked for, and a Full comes of it where it must or where it pays: there is no
checkpoint yet, its manifest or an image that would be used is damaged, a restore or a copy found it damaged,
most has changed, or the chunks lie in too many attempts already. The log says why.
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
    """What to ask the catalog for, and how to write it: whole, unless there is a `delta`.

    `digests` are those of chunks that are known already, of some tensors or of all. `base` says where
    the base's chunks lie, and `beside` which folder its folder lies in.
    """

    request: SaveRequest
    digests: Digests | None = None
    delta: Delta | None = None
    base: Mapping[str, Mapping[int, ChunkPlace]] = field(default_factory=dict)
    beside: str = ""

    def whole(self) -> Plan:
        """Return the plan that writes everything, and builds on nothing."""
        request = dataclasses.replace(
            self.request, type=CheckpointType.FULL, base_step=None, base_attempt="", uses=frozenset()
        )
        return Plan(request=request)

    def for_record(self, record: CheckpointMetadata, folder: str) -> Plan:
        """Return the plan for the attempt that this rank found, which goes to `folder`.

        Another rank may have chosen otherwise for all; and a manifest names only what lies beside.
        """
        if record.base_attempt != self.request.base_attempt or self.beside != folder.rpartition("/")[0]:
            return Plan(request=self.request)
        return self

    def shared(self, shares: Mapping[str, range], specs: Mapping[str, TensorSpec], digests: Digests) -> Plan:
        """Return the plan that writes only these chunks of the tensors in `shares`; `digests` are known."""
        delta = compare(specs, digests, self.base, shares) if self.delta is not None else None
        return dataclasses.replace(self, digests=digests, delta=delta)


class Doubted:
    """The attempts of which this process found a copy damaged: nothing that it saves refers to their chunks.

    What is good in memory, as a restore made it from another copy or an older checkpoint, would else be saved as
    a reference to the damaged bytes. Those may lie in an earlier attempt than the one that was read. It ends by
    itself: a Full takes their place as what is built on. May be used from any thread.
    """

    def __init__(self) -> None:
        self._noting = threading.Lock()
        self._folders: frozenset[str] = frozenset()

    def note(self, folder: str, complaint: str) -> None:
        """Build no more on the attempt in `folder`, nor on those whose objects the `complaint` of it names."""
        holds = {name.partition("/")[0] for name in objects_in(complaint)}
        with self._noting:
            self._folders |= {_attempt(folder), *holds}

    def among(self, folders: Iterable[str]) -> str:
        """Return the first of these that is doubted, or ""."""
        return min(self._folders & {_attempt(folder) for folder in folders}, default="")


def _attempt(folder: str) -> str:
    """Return a folder's name as others beside it refer to it."""
    return folder.rpartition("/")[2]


def choose(
    snapshot: Snapshot,
    request: SaveRequest,
    *,
    storage: Storage,
    catalog: Catalog,
    doubted: Doubted,
    threads: int = DEFAULT_THREADS,
) -> Plan:
    """Return how the snapshot is to be saved; only an Incremental is looked into.

    Each rank chooses for itself. One that doubts the base writes its part whole, also in an Incremental that
    another rank began.
    """
    asked = Plan(request=request)
    if request.type is not CheckpointType.INCREMENTAL:
        return asked
    base = catalog.latest()
    if base is None:
        return _whole(asked, "there is no checkpoint yet")
    folder = catalog.folder(base)
    try:
        manifest = _manifest_of(storage, folder, base, catalog.rank)
    except (CheckpointError, StorageError) as error:
        return _whole(asked, error.message)
    used = [image.folder for image in manifest.files] if manifest is not None else []
    if found_bad := doubted.among([folder, *used]):
        return _whole(asked, f"a copy of {found_bad} was found damaged")
    request = dataclasses.replace(request, base_step=base.step, base_attempt=base.id)
    if manifest is None:  # this rank has no part in it; the others have
        return Plan(request=request)
    found = digests_of(snapshot, snapshot.views, threads=threads)
    specs = {name: place.spec for name, place in snapshot.places.items()}
    before = {name: entry.chunks for name, entry in manifest.tensors.items()}
    places = known_places(folder, manifest)
    delta = compare(specs, found, places, snapshot.shares, before)
    if not delta.worth_it:
        return _whole(asked, delta.told)
    try:
        _check_images(storage, folder, delta)
    except StorageError as error:
        return _whole(asked, error.message)
    return Plan(
        request=dataclasses.replace(request, uses=delta.uses),
        digests=found,
        delta=delta,
        base=places,
        beside=folder.rpartition("/")[0],
    )


def _whole(asked: Plan, reason: str) -> Plan:
    log.info("step %d is saved whole: %s", asked.request.step, reason)
    return asked.whole()


def _manifest_of(storage: Storage, folder: str, base: CheckpointMetadata, rank: int) -> RankManifest | None:
    manifest = read_manifest(storage, folder, base.manifest_digest)
    if rank >= len(manifest.parts):
        return None
    return read_rank_manifest(storage, folder, manifest.parts[rank])


def digests_of(snapshot: Snapshot, names: Collection[str], *, threads: int) -> Digests:
    """Return the digests of the chunks of these tensors, or of all; wait until they are copied."""
    if snapshot.digests is not None:
        return snapshot.digests
    snapshot.wait(max((snapshot.places[name].end for name in names), default=0))
    parts = {name: list(chunks(snapshot.views[name])) for name in names}
    found = iter(digests([chunk for part in parts.values() for chunk in part], threads=threads))
    return {name: tuple(next(found) for _ in part) for name, part in parts.items()}


def _check_images(storage: Storage, folder: str, delta: Delta) -> None:
    """Raise `StorageError` unless every image is there that the delta would use, as long as it was.

    There is where the save goes, of two storages the near one: what is committed there needs no other. Their bytes
    are not read again: a restore proves them.
    """
    written = tiers_of(storage)[0]
    for image in sorted(delta.images, key=lambda image: (image.folder, image.image)):
        name = object_name(folder, image)
        found = written.size(name)
        if found != image.size_bytes:
            raise StorageError(f"{name} has {found} bytes instead of {image.size_bytes}")
