"""Copying one checkpoint to another storage so that no unverified byte is published there.

Every chunk in the copy's manifests is verified against its digest while it is copied, including chunks in images of
earlier attempts. Bytes may be in the far storage already, if an earlier copy was interrupted, or if the images of a
base were copied with an Incremental. Such bytes are read back, unless this process has verified them or they belong
to a base with a marker. Manifests are verified by the digest that names them. The rank that finds the copy whole
writes the marker last.

A rank that cannot copy its part writes a note to the far folder, so that the other ranks do not wait for that part.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from strata.checkpoint.catalog.protocol import SavePhase
from strata.checkpoint.copies.copying import Piece, copy_image, known_pieces
from strata.checkpoint.format.chunk_map import images_of, object_name
from strata.checkpoint.format.entries import OWN
from strata.checkpoint.format.manifest import GLOBAL_NAME, Part
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.format.marker import (
    read_manifest,
    read_named,
    read_rank_manifest,
    read_rank_manifests,
    write_marker,
)
from strata.checkpoint.storage.place import scheme_of
from strata.checkpoint.storage.sink import ObjectMissing, Storage, put
from strata.errors import CheckpointCorrupt, CheckpointNotFound, Refused, StorageError

_HINT: Final = "remove the damaged object there; the next process that saves copies it again"
_NOTE: Final = ".not-copied-by-"
"""The name of the note, with the reason, of a rank that cannot copy its part."""

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A committed checkpoint to be copied: its folder and the digest of its global manifest."""

    folder: str
    attempt: str
    manifest_digest: str
    step: int


class Report(Protocol):
    """Receives the progress of a copy. It raises `Refused` or `CheckpointNotFound` if the copy is not needed any more.

    It raises another `CheckpointError` if the copy cannot be made; that error is reported to the user.
    """

    def __call__(
        self,
        replica: Replica,
        *,
        begun: bool = False,
        rank: int = 0,
        digest: str = "",
        sealed: bool = False,
        phase: SavePhase | None = None,
    ) -> None:
        """`begun`: from now on the far storage may have files of the copy. `digest` without `sealed`: a rank's part is
        copied; `digest` names that rank's manifest, and `phase` has the duration. `sealed`: all parts and the marker
        are copied; `digest` names the global manifest.
        """
        ...


class Closed(Exception):
    """The copier was closed during a copy."""


class FarCopy:
    """One rank's share (of `ranks` shares) of checkpoints copied from `near` to `far`, in one thread.

    `world` identifies this world; a later world has another value. If `closed` returns True, the copy stops and
    `Closed` is raised.
    """

    def __init__(
        self,
        near: Storage,
        far: Storage,
        *,
        rank: int,
        ranks: int,
        world: str,
        report: Report,
        closed: Callable[[], bool],
    ) -> None:
        self._near = near
        self._far = far
        self._rank = rank
        self._ranks = ranks
        self._world = world
        self._report = report
        self._closed = closed
        self._proven: dict[str, set[Piece]] = {}
        """The far pieces that this process has verified, by image; cleared once the marker is written."""

    # -- one rank's share

    def copy(self, replica: Replica) -> None:
        """Return once this rank's files are copied; `CheckpointCorrupt` if they differ from the saved ones."""
        folder = replica.folder
        manifest = read_manifest(self._near, folder, replica.manifest_digest)
        self._report(replica, begun=True)
        for part in manifest.parts:
            if part.rank % self._ranks == self._rank:
                begun_s = time.monotonic()
                size_bytes = self._copy_part(folder, part)
                phase = SavePhase(
                    phase="copy",
                    backend=scheme_of(self._far.uri),
                    took_s=time.monotonic() - begun_s,
                    size_bytes=size_bytes,
                )
                self._report(replica, rank=part.rank, digest=part.digest, phase=phase if size_bytes else None)
        if self._rank == 0:
            for name in self._near.list(folder):
                if not name.startswith("rank-") and name != MARKER:
                    expected = replica.manifest_digest if name == GLOBAL_NAME else ""
                    self._copy_small(folder, name, expected)

    def give_up(self, replica: Replica, reason: str, *, for_all: bool = False) -> None:
        """Try to report to the other ranks that this rank's part will not be copied.

        `for_all`: no rank's part will be copied, and each rank that has not begun finds that out itself, as this rank
        did. So if no rank has begun, no note is written, since no rank would remove the note.
        """
        if self._ranks == 1 or (for_all and not self._far.list(replica.folder)):
            return
        name = f"{replica.folder}/{self._note(self._rank)}"
        try:
            self._far.create_once(name, reason.encode())
        except StorageError as error:
            log.warning(
                "cannot report to the other ranks that step %d fails: %s", replica.step, error.message
            )

    def _copy_part(self, folder: str, part: Part) -> int:
        """Copy one part; return the bytes of images transferred, not counting images that `far` had already."""
        carried = 0
        manifest = read_rank_manifest(self._near, folder, part)
        for number, image in reversed(list(enumerate(images_of(folder, manifest)))):  # own image last
            known = known_pieces(manifest, number)
            name, size_bytes = object_name(folder, image), image.size_bytes
            if self._copy_image(name, size_bytes, known, own=number == OWN):
                carried += size_bytes
        self._copy_small(folder, part.manifest, part.digest)
        return carried

    # -- objects

    def _copy_image(self, name: str, size_bytes: int, known: Mapping[int, Piece], *, own: bool) -> bool:
        """Copy an image; return False if the far storage already had the image with the saved bytes."""
        there = self._is_there(name, size_bytes)
        if there and not own and self._far.exists(f"{name.rpartition('/')[0]}/{MARKER}"):
            return False
        proven = self._proven.setdefault(name, set())
        if there:
            self._prove(name, [piece for piece in known.values() if piece not in proven])
        else:
            proven.clear()
            copy_image([self._near], self._far, name, size_bytes, known, self._check_open)
        proven.update(known.values())
        return not there

    def _prove(self, name: str, unproven: Sequence[Piece]) -> None:
        """Read back and verify pieces that are in the far storage already."""
        if not unproven:
            return
        with contextlib.closing(self._far.source(name)) as source:
            for piece in unproven:
                self._check_open()
                try:
                    piece.read(source, f"{name} in {self._far.uri}")
                except CheckpointCorrupt as error:
                    raise CheckpointCorrupt(error.message, hint=_HINT) from error

    def _check_open(self, _: int = 0) -> None:
        if self._closed():
            raise Closed

    def _copy_small(self, folder: str, name: str, expected: str) -> None:
        """Copy a document; `expected` is its digest, or "" if the document contains its own digest."""
        name = f"{folder}/{name}"
        data = read_named(self._near, name, expected) if expected else self._near.read(name)
        try:
            there = self._far.read(name)
        except ObjectMissing:
            put(self._far, name, data)
        else:
            if there != data:
                raise CheckpointCorrupt(f"{name} in {self._far.uri} differs from the one here", hint=_HINT)

    def _is_there(self, name: str, size_bytes: int) -> bool:
        """Return whether the far storage has the object; `CheckpointCorrupt` if its size differs.

        An interrupted upload creates no object. So an object of another size was completed by a writer, and is never
        replaced.
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
        """Mark the far copy if it is whole, and return ""; else return a text that says which files are missing.

        `StorageError` if a rank has noted that its part will not be copied; `CheckpointError` if the copy was rejected.
        """
        try:
            manifest = read_manifest(self._far, replica.folder, replica.manifest_digest)
            read_rank_manifests(self._far, replica.folder, manifest)
        except CheckpointCorrupt as error:
            return self._lacking(replica) or error.message
        write_marker(self._far, replica.folder, manifest, replica.manifest_digest)
        with contextlib.suppress(Refused, CheckpointNotFound):  # the checkpoint is being removed
            self._report(replica, sealed=True, digest=replica.manifest_digest)
        for part in manifest.parts:
            self._proven.pop(f"{replica.folder}/{part.image}", None)
        for name in self._far.list(replica.folder):  # notes of earlier worlds
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
                raise PartLost(
                    f"step {replica.step} is not in {self._far.uri}: rank {rank} reports: {reason}"
                )
        if not waiting:
            return ""
        some = ", ".join(map(str, waiting[:10])) + (", …" if len(waiting) > 10 else "")
        return f"of {len(manifest.parts)} parts, those of rank {some} are missing"

    def _note(self, rank: int) -> str:
        return f"rank-{rank:05d}{_NOTE}{self._world}"


class PartLost(StorageError):
    """Another rank cannot copy its part of a checkpoint."""
