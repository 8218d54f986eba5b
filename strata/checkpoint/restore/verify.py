"""Verifying a checkpoint without restoring it: every byte is compared with the saved digests.

A restore ends at the first byte that differs; a verification reports every problem with its file and tensor. It
needs one buffer of 8 MiB, however large the checkpoint is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self

from strata.checkpoint.format.chunk_map import ChunkPlace, chunk_places, images_of, object_name
from strata.checkpoint.format.digest import CHUNK_BYTES, digest
from strata.checkpoint.format.entries import OWN, ImageRef
from strata.checkpoint.format.manifest import Manifest, Part, RankManifest
from strata.checkpoint.format.marker import check_size, read_manifest, read_marker, read_rank_manifest
from strata.checkpoint.restore.reader import check_refers, tensors_of
from strata.checkpoint.snapshot.memory import allocate
from strata.checkpoint.storage.pipeline import open_at_once
from strata.checkpoint.storage.sink import Source, Storage, proving, unobserved
from strata.errors import CheckpointCorrupt, CheckpointIncomplete

MAX_PROBLEMS: Final = 1000
"""The most problems reported one by one; a lost disk could cause a million problems."""

OnBytes = Callable[[int], None]
"""Called with the number of further bytes read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """The result. `marked`: a marker proves in storage alone that the checkpoint is committed."""

    manifest: Manifest | None
    read_bytes: int
    marked: bool
    problems: tuple[str, ...]

    @property
    def good(self) -> bool:
        return not self.problems


def verify(
    storage: Storage, folder: str, *, manifest_digest: str | None, on_bytes: OnBytes = unobserved
) -> Verification:
    """Read the whole checkpoint in `folder` and return all problems.

    `manifest_digest` comes from the catalog; if None, the marker's is used. `CheckpointError` if a newer release
    wrote the checkpoint, `StorageError` if it cannot be read: neither error means that the checkpoint is corrupt.
    """
    with Images(storage, folder) as images:
        work = _Verifier(storage, folder, images, on_bytes)
        manifest, marked = work.documents(manifest_digest)
        if manifest is not None:
            work.parts(manifest)
    return Verification(
        manifest=manifest, read_bytes=work.read_bytes, marked=marked, problems=tuple(work.problems)
    )


def look(storage: Storage, folder: str, *, manifest_digest: str, only: str = "") -> str:
    """Read the manifests and the object `only` ("folder/file"; "": all) of a checkpoint; return its damage, or "".

    Use the memory of one chunk. The marker is not checked: the catalog proves the commit, and any process may write
    the marker again. `CheckpointIncomplete` if a file is missing and no file that was read is damaged.
    """
    with Images(storage, folder) as images:
        work = _Verifier(storage, folder, images, unobserved, only)
        try:
            work.parts(read_manifest(storage, folder, manifest_digest))
        except CheckpointCorrupt as error:
            work.note(error)
    if work.lacking is not None and not work.damage:
        raise work.lacking
    return work.damage


class Images:
    """The images from which chunks are read, with a limit on open images. A context manager that closes them."""

    def __init__(self, storage: Storage, folder: str) -> None:
        self._storage = storage
        self._folder = folder
        self._open: dict[str, Source] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._open.values():
            source.close()

    def read(self, place: ChunkPlace, into: memoryview, *, what: str) -> memoryview:
        """Read the chunk to the front of `into` and return it; `CheckpointCorrupt`, naming `what`, if it differs."""
        name = object_name(self._folder, place.image)
        chunk = into[: place.size_bytes]
        with proving(name):
            if name not in self._open:
                while len(self._open) >= open_at_once():
                    self._open.pop(next(iter(self._open))).close()
                self._open[name] = self._storage.source(name)
            count = self._open[name].read_into(place.offset, chunk)
        if count != len(chunk):
            raise CheckpointCorrupt(f"{name} ends after {place.offset + count} bytes, within {what}")
        if digest(chunk) != place.digest:
            raise CheckpointCorrupt(
                f"{name}: {what} differs from the saved data"
                f" (bytes {place.offset} to {place.offset + len(chunk)})"
            )
        return chunk


class _Verifier:
    """One pass over one checkpoint, with its findings so far."""

    def __init__(
        self, storage: Storage, folder: str, images: Images, on_bytes: OnBytes, only: str = ""
    ) -> None:
        self.problems: list[str] = []
        self.lacking: CheckpointIncomplete | None = None
        self.damage = ""
        self.read_bytes = 0
        self._storage = storage
        self._folder = folder
        self._images = images
        self._on_bytes = on_bytes
        self._only = only
        self._buffer = allocate(CHUNK_BYTES, inherited=True)

    def documents(self, manifest_digest: str | None) -> tuple[Manifest | None, bool]:
        """Return the global manifest, and whether a marker names it."""
        marked = False
        try:
            marker = read_marker(self._storage, self._folder)
        except CheckpointCorrupt as error:
            self.note(error)
        else:
            if marker is None and manifest_digest is None:
                self.problems.append(f"{self._folder} has no marker: its save never ended")
            elif marker is not None and manifest_digest not in {None, marker.manifest_digest}:
                self.problems.append(
                    f"the marker of {self._folder} names another checkpoint than the catalog"
                )
            elif marker is not None:
                marked = True
                manifest_digest = marker.manifest_digest
        if manifest_digest is None:
            return None, marked
        try:
            return read_manifest(self._storage, self._folder, manifest_digest), marked
        except CheckpointCorrupt as error:
            self.note(error)
            return None, marked

    def parts(self, manifest: Manifest) -> None:
        """Read all ranks' parts, each byte once."""
        whole = [found for part in manifest.parts if (found := self._rank_manifest(part)) is not None]
        if len(whole) == len(manifest.parts):
            self._together(whole)
        seen: set[tuple[ImageRef, int]] = set()
        for index, rank in enumerate(whole):
            try:
                self._header(rank)
                tensors = chunk_places(self._folder, whole, index)
            except CheckpointCorrupt as error:
                self.note(error)
                continue
            for tensor, places in tensors.items():
                for place in places:
                    if self._is_requested(place.image) and (place.image, place.offset) not in seen:
                        seen.add((place.image, place.offset))
                        self._chunk(place, f"tensor {tensor}")

    def _rank_manifest(self, part: Part) -> RankManifest | None:
        try:
            manifest = read_rank_manifest(self._storage, self._folder, part)
            check_size(self._storage, f"{self._folder}/{part.image}", part.image_bytes)
            for image in manifest.files:
                check_size(self._storage, object_name(self._folder, image), image.size_bytes)
        except CheckpointCorrupt as error:
            self.note(error)
            return None
        return manifest

    def _together(self, manifests: Sequence[RankManifest]) -> None:
        """Record errors that a restore would raise: parts that do not fit together, and names without a tensor."""
        try:
            tensors = tensors_of(self._folder, manifests)
            for manifest in manifests:
                check_refers(self._folder, manifest, tensors)
        except CheckpointCorrupt as error:
            self.note(error)

    def _header(self, manifest: RankManifest) -> None:
        """Verify an image's header; unless there are very many tensors, it is smaller than a chunk."""
        own = images_of(self._folder, manifest)[OWN]
        if not self._is_requested(own):
            return
        into = memoryview(bytearray(manifest.header_bytes))
        place = ChunkPlace(
            image=own,
            offset=0,
            size_bytes=manifest.header_bytes,
            digest=manifest.header_digest,
        )
        self._read(place, into, "the header")

    def _is_requested(self, image: ImageRef) -> bool:
        name = object_name(self._folder, image)
        return self._only in {"", "/".join(name.split("/")[-2:])}

    def _chunk(self, place: ChunkPlace, what: str) -> None:
        try:
            self._read(place, self._buffer, what)
        except CheckpointCorrupt as error:
            self.note(error)

    def _read(self, place: ChunkPlace, into: memoryview, what: str) -> None:
        self._images.read(place, into, what=what)
        self.read_bytes += place.size_bytes
        self._on_bytes(place.size_bytes)

    def note(self, error: CheckpointCorrupt) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(error.message)
        if isinstance(error, CheckpointIncomplete):
            self.lacking = self.lacking or error
        elif not self.damage:
            self.damage = error.message
