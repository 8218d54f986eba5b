"""A checkpoint copied into another storage, each byte of it from a source that proves it, the marker last.

Of several sources each document and each chunk is taken from the first that has it as it was saved: two damaged
copies make a whole one if they are not damaged in the same place. The copy is read back and verified before the
marker is written: until then it is no checkpoint. What it needs of earlier attempts' images comes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from strata.checkpoint.chunk_map import object_name
from strata.checkpoint.digest import digest, named_digest
from strata.checkpoint.entries import OWN
from strata.checkpoint.far_copy import Piece, known_pieces, pieces
from strata.checkpoint.manifest import GLOBAL_NAME, Manifest, RankManifest, read_object
from strata.checkpoint.marker import read_marker, write_marker
from strata.checkpoint.sink import Source, Storage, put
from strata.checkpoint.uses import NAME as USES
from strata.checkpoint.uses import write_uses
from strata.checkpoint.verifying import OnBytes, ignored, verify
from strata.errors import CheckpointCorrupt, CheckpointIncomplete, StorageError

_T = TypeVar("_T")


def copy_checkpoint(
    sources: Sequence[Storage], target: Storage, folder: str, manifest_digest: str, *, on_bytes: OnBytes
) -> Manifest:
    """Return the manifest once the checkpoint in `folder` is one of `target`, too; may be repeated after a crash.

    `manifest_digest` is what the catalog says; "" takes the word of a source's marker. `CheckpointCorrupt` when
    something differs from what was saved in each source: then `target` has no such checkpoint.
    """
    found = manifest_digest or _first(sources, lambda source: _marked(source, folder))
    name = f"{folder}/{GLOBAL_NAME}"
    documents = {name: _document(sources, name, found)}
    manifest = Manifest.from_bytes(documents[name], what=name)
    ranks = []
    for part in manifest.parts:
        name = f"{folder}/{part.manifest}"
        documents[name] = _document(sources, name, part.digest)
        ranks.append(RankManifest.from_bytes(documents[name], what=name))
    if manifest.uses:  # said first, so that nobody takes the images for what a save left over
        target.delete(f"{folder}/{USES}")
        write_uses(target, folder, manifest.uses)
    for name, (size_bytes, known) in sorted(_images(folder, ranks).items()):
        _copy_image(sources, target, name, size_bytes, known, on_bytes)
    for name, data in reversed(documents.items()):  # the ranks' before the one that names them
        target.delete(name)
        put(target, name, data)
    copied = verify(target, folder, manifest_digest=found, on_bytes=ignored)
    if not copied.good:
        raise CheckpointCorrupt(copied.problems[0], hint="verify the checkpoint that was copied")
    write_marker(target, folder, manifest, found)
    return manifest


def _first(sources: Sequence[Storage], read: Callable[[Storage], _T]) -> _T:
    """Return what the first source has that proves to be what was saved; else raise what the last error was."""
    for source in sources[:-1]:
        try:
            return read(source)
        except (CheckpointCorrupt, StorageError):
            continue
    return read(sources[-1])


def _marked(source: Storage, folder: str) -> str:
    marker = read_marker(source, folder)
    if marker is None:
        raise CheckpointIncomplete(f"{source.uri}/{folder} has no marker: nothing says what was saved there")
    return marker.manifest_digest


def _document(sources: Sequence[Storage], name: str, named: str) -> bytes:
    def read(source: Storage) -> bytes:
        data = read_object(source, name)
        if named_digest(data) != named:
            raise CheckpointCorrupt(f"{name} differs from what was committed")
        return data

    return _first(sources, read)


def _images(folder: str, ranks: Sequence[RankManifest]) -> dict[str, tuple[int, dict[int, Piece]]]:
    """Return the size of each image, and the pieces of it that the checkpoint has."""
    found: dict[str, tuple[int, dict[int, Piece]]] = {}
    for rank in ranks:
        own = (f"{folder}/{rank.image}", rank.image_bytes)
        earlier = ((object_name(folder, image), image.size_bytes) for image in rank.files)
        for number, (name, size_bytes) in enumerate((own, *earlier), OWN):
            _, known = found.setdefault(name, (size_bytes, {}))
            known.update(known_pieces(rank, number, needed=True))
    return found


def _copy_image(
    sources: Sequence[Storage],
    target: Storage,
    name: str,
    size_bytes: int,
    known: dict[int, Piece],
    on_bytes: OnBytes,
) -> None:
    target.delete(name)  # what an interrupted copy left
    sink = target.sink(name)
    opened: dict[int, Source] = {}

    def read(source: Storage, piece: Piece) -> memoryview:
        if id(source) not in opened:
            opened[id(source)] = source.source(name)
        chunk = memoryview(bytearray(piece.end - piece.start))
        count = opened[id(source)].read_into(piece.start, chunk)
        if count != len(chunk):
            raise CheckpointCorrupt(f"{name} ends after {piece.start + count} bytes")
        if piece.digest and digest(chunk) != piece.digest:
            raise CheckpointCorrupt(
                f"{name} differs from what was saved (bytes {piece.start} to {piece.end})"
            )
        return chunk.toreadonly()

    try:
        sink.begin(size_bytes)
        for piece in pieces(size_bytes, known):
            sink.write_at(piece.start, _first(sources, partial(read, piece=piece)))
            on_bytes(piece.end - piece.start)
        sink.finish()
    finally:
        sink.abort()
        for each in opened.values():
            each.close()
