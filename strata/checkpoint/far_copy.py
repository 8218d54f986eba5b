"""Copying one checkpoint to another storage so that no byte is published there unproven.

Every chunk that the copy's manifests speak of is proven against its digest on its way, in the images
of earlier attempts as well. What lies there already, because a crash cut an earlier copy or because
an Incremental took its base along, is read back unless this process proved it, or its own marker
stands beside it. Manifests are proven by what names them. The marker comes last, made by whoever
finds all of it whole.

A rank that cannot copy its part leaves a note beside it, so that the others do not wait for it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from strata.checkpoint.chunk_map import object_name
from strata.checkpoint.digest import CHUNK_BYTES, digest, named_digest
from strata.checkpoint.entries import OWN, ImageRef
from strata.checkpoint.manifest import GLOBAL_NAME, Manifest, Part, RankManifest
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.marker import (
    read_manifest,
    read_marker,
    read_rank_manifest,
    read_rank_manifests,
    write_marker,
)
from strata.checkpoint.sink import ObjectMissing, Source, Storage, put
from strata.errors import CheckpointCorrupt, CheckpointNotFound, Refused, StorageError

_HINT: Final = "remove the damaged object there; the next process that saves copies it again"
_NOTE: Final = ".not-copied-by-"
"""What a rank leaves, with its reason, that cannot copy its part."""

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A committed checkpoint to be copied: its folder and the digest of its global manifest."""

    folder: str
    attempt: str
    manifest_digest: str
    step: int


class Reports(Protocol):
    """Who is told how far a copy is. `Refused` and `CheckpointNotFound`: it shall not be made any more.

    Another `CheckpointError`: it cannot be, and somebody should know.
    """

    def begun(self, replica: Replica) -> None:
        """Something of it may lie there from now on."""
        ...

    def part(self, replica: Replica, rank: int, digest: str) -> None:
        """The part of that rank lies there; `digest` names its manifest."""
        ...

    def sealed(self, replica: Replica) -> None:
        """All of it does, and the marker."""
        ...


class Closed(Exception):
    """The copying was ended in the middle."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes `[start, end)` of an image, and their digest; empty for what nothing speaks of.

    `needed`: the checkpoint that is being copied has them.
    """

    start: int
    end: int
    digest: str = ""
    needed: bool = False


class FarCopy:
    """The share of one of `ranks` ranks in checkpoints copied from `near` to `far`, in one thread.

    `world` names these ranks, unlike any that come after them. `closed` tells whether to leave off;
    then `Closed` is raised.
    """

    def __init__(
        self,
        near: Storage,
        far: Storage,
        *,
        rank: int,
        ranks: int,
        world: str,
        reports: Reports | None,
        closed: Callable[[], bool],
    ) -> None:
        self._near = near
        self._far = far
        self._rank = rank
        self._ranks = ranks
        self._world = world
        self._reports = reports
        self._closed = closed
        self._proven: dict[str, set[Piece]] = {}

    # -- one rank's share

    def copy(self, replica: Replica) -> None:
        """Return once this rank's files lie there; `CheckpointCorrupt` when they are not what was saved."""
        folder = replica.folder
        manifest = read_manifest(self._near, folder, replica.manifest_digest)
        if self._reports is not None:
            self._reports.begun(replica)
        for part in manifest.parts:
            if part.rank % self._ranks == self._rank:
                self._copy_part(folder, part)
                if self._reports is not None:
                    self._reports.part(replica, part.rank, part.digest)
        if self._rank == 0:
            for name in self._near.list(folder):
                if not name.startswith("rank-") and name != MARKER:
                    expected = replica.manifest_digest if name == GLOBAL_NAME else ""
                    self._copy_small(folder, name, expected)

    def give_up(self, replica: Replica, reason: str, *, for_all: bool = False) -> None:
        """Tell the other ranks that this one's part will not come, as well as it can be done.

        `for_all`: nobody's will, and whoever has not begun hears it as this one did. Where nobody has, nothing is
        written that nobody would remove.
        """
        if self._ranks == 1 or (for_all and not self._far.list(replica.folder)):
            return
        name = f"{replica.folder}/{self._note(self._rank)}"
        try:
            self._far.create_once(name, reason.encode())
        except StorageError as error:
            log.warning("the other ranks are not told that step %d fails: %s", replica.step, error.message)

    def _copy_part(self, folder: str, part: Part) -> None:
        manifest = read_rank_manifest(self._near, folder, part)
        for number, earlier in enumerate(manifest.files, 1):
            self._copy_earlier(folder, manifest, number, earlier)
        own = pieces(manifest.image_bytes, known_pieces(manifest, OWN, needed=True))
        self._copy_image(f"{folder}/{manifest.image}", manifest.image_bytes, own)
        self._copy_small(folder, part.manifest, part.digest)

    def _copy_earlier(self, folder: str, manifest: RankManifest, number: int, earlier: ImageRef) -> None:
        """Copy an image of an earlier attempt, whose copy was cut, or never made."""
        name = object_name(folder, earlier)
        beside = name.rpartition("/")[0]
        needed = known_pieces(manifest, number, needed=True)
        if self._is_there(name, earlier.size_bytes):
            if self._far.exists(f"{beside}/{MARKER}"):
                return
            known: dict[int, Piece] = {}
        else:
            known = self._said_of(beside, earlier)
        self._copy_image(name, earlier.size_bytes, pieces(earlier.size_bytes, known | needed))

    def _said_of(self, folder: str, image: ImageRef) -> dict[int, Piece]:
        """Return what its own manifest says of an image; nothing when that is not there any more."""
        with contextlib.suppress(CheckpointCorrupt):
            marker = read_marker(self._near, folder)
            if marker is not None:
                manifest = read_manifest(self._near, folder, marker.manifest_digest)
                for part in manifest.parts:
                    if part.image == image.image:
                        return known_pieces(read_rank_manifest(self._near, folder, part), OWN, needed=False)
        return {}

    # -- objects

    def _copy_image(self, name: str, size_bytes: int, wanted: Iterator[Piece]) -> None:
        proven = self._proven.setdefault(name, set())
        if self._is_there(name, size_bytes):
            self._prove(name, [p for p in wanted if p.needed and p not in proven])
            return
        proven.clear()
        source = self._near.source(name)
        with _there(name):
            sink = self._far.sink(name)
        good: list[Piece] = []
        try:
            with _there(name):
                sink.begin(size_bytes)
            for piece in wanted:
                chunk = self._read(source, piece, name)
                if not piece.digest or digest(chunk) == piece.digest:
                    good.append(Piece(piece.start, piece.end, piece.digest, needed=True))
                elif piece.needed:
                    raise CheckpointCorrupt(f"{name} differs from what was saved, at {piece.start}")
                else:
                    log.warning(
                        "%s differs from what was saved, at %d, where nothing uses it", name, piece.start
                    )
                with _there(name):
                    sink.write_at(piece.start, chunk.toreadonly())
            with _there(name):
                sink.finish()
        finally:
            sink.abort()
            source.close()
        proven.update(good)

    def _prove(self, name: str, wanted: list[Piece]) -> None:
        """Read back what lies there from somebody else."""
        if not wanted:
            return
        with _there(name):
            source = self._far.source(name)
        try:
            for piece in wanted:
                with _there(name):
                    chunk = self._read(source, piece, name)
                if digest(chunk) != piece.digest:
                    raise CheckpointCorrupt(
                        f"{name} in {self._far.uri} differs from what was saved, at {piece.start}", hint=_HINT
                    )
                self._proven[name].add(piece)
        finally:
            source.close()

    def _read(self, source: Source, piece: Piece, name: str) -> memoryview:
        if self._closed():
            raise Closed
        chunk = memoryview(bytearray(piece.end - piece.start))
        if source.read_into(piece.start, chunk) != len(chunk):
            raise CheckpointCorrupt(f"{name} ends before {piece.end}")
        return chunk

    def _copy_small(self, folder: str, name: str, expected: str) -> None:
        """Copy a document; `expected` names it, unless it holds a digest of itself."""
        name = f"{folder}/{name}"
        data = self._near.read(name)
        if expected and named_digest(data) != expected:
            raise CheckpointCorrupt(f"{name} differs from what was committed")
        try:
            there = self._far.read(name)
        except ObjectMissing:
            with _there(name):
                put(self._far, name, data)
        else:
            if there != data:
                raise CheckpointCorrupt(f"{name} in {self._far.uri} differs from the one here", hint=_HINT)

    def _is_there(self, name: str, size_bytes: int) -> bool:
        """Tell whether the far storage has it; `CheckpointCorrupt` when it has less, or more.

        A torn upload is no object: what has another size was whole once, and nothing there is replaced.
        """
        try:
            found = self._far.size(name)
        except ObjectMissing:
            return False
        if found != size_bytes:
            raise CheckpointCorrupt(
                f"{name} in {self._far.uri} has {found} bytes instead of {size_bytes}", hint=_HINT
            )
        return True

    # -- all ranks together

    def mark(self, replica: Replica) -> str:
        """Mark the far copy if it is whole, and return ""; else return what it lacks.

        `StorageError` when a rank has said that its part will not come, `CheckpointError` when it counts for nobody.
        """
        try:
            manifest = read_manifest(self._far, replica.folder, replica.manifest_digest)
            read_rank_manifests(self._far, replica.folder, manifest)
        except CheckpointCorrupt as error:
            return self._lacking(replica) or error.message
        with _there(f"{replica.folder}/{MARKER}"):
            write_marker(self._far, replica.folder, manifest, replica.manifest_digest)
        if self._reports is not None:
            with contextlib.suppress(
                Refused, CheckpointNotFound
            ):  # it is to go; whoever removes it finds all
                self._reports.sealed(replica)
        for part in manifest.parts:  # the marker beside them says it from now on
            self._proven.pop(f"{replica.folder}/{part.image}", None)
        for name in self._far.list(replica.folder):  # of earlier worlds
            if _NOTE in name:
                self._far.delete(f"{replica.folder}/{name}")
        return ""

    def _lacking(self, replica: Replica) -> str:
        manifest = read_manifest(self._near, replica.folder, replica.manifest_digest)
        there = set(self._far.list(replica.folder))
        waiting = sorted({p.rank % self._ranks for p in manifest.parts if p.manifest not in there})
        for rank in waiting:
            if rank != self._rank and self._note(rank) in there:
                reason = self._far.read(f"{replica.folder}/{self._note(rank)}").decode(errors="replace")
                raise PartLost(f"step {replica.step} is not in {self._far.uri}: rank {rank} says: {reason}")
        return _told(waiting, manifest)

    def _note(self, rank: int) -> str:
        return f"rank-{rank:05d}{_NOTE}{self._world}"


@contextlib.contextmanager
def _there(name: str) -> Iterator[None]:
    """Tell what is missing there from what is missing here: only the latter ends a copy."""
    try:
        yield
    except ObjectMissing as error:
        raise StorageError(
            f"cannot copy {name}: {error.message}", hint=error.hint, transient=error.transient
        ) from error


class PartLost(StorageError):
    """Another rank cannot copy its part of a checkpoint."""


def _told(waiting: list[int], manifest: Manifest) -> str:
    if not waiting:
        return ""
    some = ", ".join(map(str, waiting[:10])) + (", …" if len(waiting) > 10 else "")
    return f"of {len(manifest.parts)} parts those of rank {some} are not there"


def known_pieces(manifest: RankManifest, file: int, *, needed: bool) -> dict[int, Piece]:
    """Return what a rank's manifest says of one of its images, by where it begins."""
    known = {}
    if file == OWN and manifest.header_bytes:
        known[0] = Piece(0, manifest.header_bytes, manifest.header_digest, needed)
    for entry in manifest.tensors.values():
        for number, lies_in, offset in entry.located():
            if lies_in == file and (size_bytes := entry.chunk_bytes(number)):
                known[offset] = Piece(offset, offset + size_bytes, entry.chunks[number], needed)
    return known


def pieces(size_bytes: int, known: dict[int, Piece]) -> Iterator[Piece]:
    """Yield an image in pieces, in order, none larger than a chunk or a header: those known, and all between."""
    at = 0
    for start, piece in sorted(known.items()):
        yield from _gap(at, start)
        if start >= at:
            yield piece
            at = piece.end
        elif piece.needed:
            raise CheckpointCorrupt(f"two chunks overlap at byte {start}")
    yield from _gap(at, size_bytes)


def _gap(start: int, end: int) -> Iterator[Piece]:
    for begin in range(start, end, CHUNK_BYTES):
        yield Piece(begin, min(begin + CHUNK_BYTES, end))
