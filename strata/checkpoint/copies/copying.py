"""Copying a checkpoint into another storage: each byte verified at its source, the marker last.

Each document and each chunk is taken from the first source that has the saved bytes. So two damaged copies give a
whole one, unless both are damaged in the same place. The copy is read back and verified before the marker is written;
until then it does not count as a checkpoint. Images of earlier attempts to which the checkpoint refers are copied, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from strata.checkpoint.format.chunk_map import images_of, object_name
from strata.checkpoint.format.digest import CHUNK_BYTES, digest
from strata.checkpoint.format.entries import OWN
from strata.checkpoint.format.manifest import GLOBAL_NAME, Manifest, RankManifest
from strata.checkpoint.format.marker import read_marker, read_named, write_marker
from strata.checkpoint.format.uses import NAME as USES
from strata.checkpoint.format.uses import write_uses
from strata.checkpoint.restore.verify import OnBytes, verify
from strata.checkpoint.storage.sink import Source, Storage, proving, put, unobserved
from strata.errors import CheckpointCorrupt, CheckpointIncomplete, StorageError

_T = TypeVar("_T")


def copy_checkpoint(
    sources: Sequence[Storage],
    target: Storage,
    folder: str,
    manifest_digest: str,
    *,
    on_bytes: OnBytes = unobserved,
) -> Manifest:
    """Return the manifest once `target` has the checkpoint in `folder`, too; may be repeated after a crash.

    `manifest_digest` comes from the catalog; if "", the digest in a source's marker is used. `CheckpointCorrupt` if
    some bytes differ from the saved ones in every source: then `target` does not get the checkpoint.
    """
    found = manifest_digest or _first(sources, lambda source: _marked(source, folder))
    documents: dict[str, bytes] = {}

    def document(file: str, named: str) -> bytes:
        name = f"{folder}/{file}"
        documents[name] = _first(sources, lambda source: read_named(source, name, named))
        return documents[name]

    manifest = Manifest.from_bytes(document(GLOBAL_NAME, found), what=f"{folder}/{GLOBAL_NAME}")
    ranks = [
        RankManifest.from_bytes(document(part.manifest, part.digest), what=f"{folder}/{part.manifest}")
        for part in manifest.parts
    ]
    if manifest.uses:  # record the uses first, so that no process treats the images as leftovers of a save
        target.delete(f"{folder}/{USES}")
        write_uses(target, folder, manifest.uses)
    for name, (size_bytes, known) in sorted(_images(folder, ranks).items()):
        target.delete(name)  # the remains of an interrupted copy
        copy_image(sources, target, name, size_bytes, known, on_bytes)
    for name, data in reversed(documents.items()):  # the ranks' manifests before the global one
        target.delete(name)
        put(target, name, data)
    copied = verify(target, folder, manifest_digest=found)
    if not copied.good:
        raise CheckpointCorrupt(copied.problems[0], hint="verify the checkpoint that was copied")
    write_marker(target, folder, manifest, found)
    return manifest


def _first(sources: Sequence[Storage], read: Callable[[Storage], _T]) -> _T:
    """Return the result of `read` on the first source that does not fail; if all fail, raise the last error."""
    for source in sources[:-1]:
        try:
            return read(source)
        except (CheckpointCorrupt, StorageError):
            continue
    return read(sources[-1])


def _marked(source: Storage, folder: str) -> str:
    marker = read_marker(source, folder)
    if marker is None:
        raise CheckpointIncomplete(f"{source.uri}/{folder} has no marker, so its files are not known")
    return marker.manifest_digest


def _images(folder: str, ranks: Sequence[RankManifest]) -> dict[str, tuple[int, dict[int, Piece]]]:
    """Return, for each image, its size and the pieces that the checkpoint needs."""
    found: dict[str, tuple[int, dict[int, Piece]]] = {}
    for rank in ranks:
        for number, image in enumerate(images_of(folder, rank)):
            _, known = found.setdefault(object_name(folder, image), (image.size_bytes, {}))
            known.update(known_pieces(rank, number))
    return found


# -- images -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, end)` of an image, and their digest; "" for bytes that the checkpoint does not need."""

    start: int
    end: int
    digest: str = ""

    def read(self, source: Source, name: str) -> memoryview:
        """Return these bytes of the image `name`; `CheckpointCorrupt` if they differ from the saved ones."""
        chunk = memoryview(bytearray(self.end - self.start))
        count = source.read_into(self.start, chunk)
        if count != len(chunk):
            raise CheckpointCorrupt(f"{name} ends after {self.start + count} bytes")
        if self.digest and digest(chunk) != self.digest:
            raise CheckpointCorrupt(f"{name} differs from the saved data (bytes {self.start} to {self.end})")
        return chunk.toreadonly()


def known_pieces(manifest: RankManifest, number: int) -> dict[int, Piece]:
    """Return the pieces of image `number` in a rank's manifest, by their start."""
    known = {}
    if number == OWN and manifest.header_bytes:
        known[0] = Piece(0, manifest.header_bytes, manifest.header_digest)
    for entry in manifest.tensors.values():
        for chunk, lies_in, offset in entry.located():
            if lies_in == number and (size_bytes := entry.chunk_bytes(chunk)):
                known[offset] = Piece(offset, offset + size_bytes, entry.chunks[chunk])
    return known


def copy_image(
    sources: Sequence[Storage],
    target: Storage,
    name: str,
    size_bytes: int,
    known: Mapping[int, Piece],
    on_bytes: OnBytes,
) -> None:
    """Copy an image, each piece from the first source that has the saved bytes."""
    sink = target.sink(name)
    opened: dict[int, Source] = {}

    def read(source: Storage, piece: Piece) -> memoryview:
        with proving(name):
            if id(source) not in opened:
                opened[id(source)] = source.source(name)
            return piece.read(opened[id(source)], name)

    try:
        sink.begin(size_bytes)
        for piece in _pieces(size_bytes, known):
            sink.write_at(piece.start, _first(sources, partial(read, piece=piece)))
            on_bytes(piece.end - piece.start)
        sink.finish()
    finally:
        sink.abort()
        for each in opened.values():
            each.close()


def _pieces(size_bytes: int, known: Mapping[int, Piece]) -> Iterator[Piece]:
    """Yield all pieces of an image in order: the known pieces and the gaps, cut into pieces of at most a chunk."""
    at = 0
    for start, piece in sorted(known.items()):
        if start < at:
            raise CheckpointCorrupt(f"two chunks overlap at byte {start}")
        yield from _gap(at, start)
        yield piece
        at = piece.end
    yield from _gap(at, size_bytes)


def _gap(start: int, end: int) -> Iterator[Piece]:
    for begin in range(start, end, CHUNK_BYTES):
        yield Piece(begin, min(begin + CHUNK_BYTES, end))
