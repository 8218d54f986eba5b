"""Carrying committed checkpoints from the near storage to the far one, in a thread of its own.

Each rank copies its own files, and those of a larger world's ranks are shared out; rank 0 copies the
global manifest too. Whoever finds the far copy whole
marks it: with every manifest and image there, the marker says the same as the near one. So of
several ranks the last one to finish marks, and no message passes between them. Every byte is
proven against the manifest while it is copied; what is corrupt here is not spread.

A far storage that is away is tried again and again; nothing of a training waits for it. What an
earlier process left behind is carried on with the first save.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from strata.checkpoint.chunk_map import object_name
from strata.checkpoint.digest import CHUNK_BYTES, digest
from strata.checkpoint.entries import OWN
from strata.checkpoint.handle import CheckpointInfo
from strata.checkpoint.manifest import Part, RankManifest
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.marker import read_manifest, read_rank_manifest, read_rank_manifests, write_marker
from strata.checkpoint.sink import ObjectMissing, Storage, put
from strata.errors import CheckpointCorrupt, CheckpointNotFound, Refused, StorageError, StrataError

RETRY_S: Final = (1.0, 5.0, 15.0, 60.0)
"""How long to wait after each failure in a row; the last one from then on."""
LOOK_S: Final = 2.0
"""How often to look whether the other ranks are done."""
CLOSE_S: Final = 5.0

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """A committed checkpoint to be copied: its folder and the digest of its global manifest."""

    folder: str
    attempt: str
    manifest_digest: str
    step: int


class Reports(Protocol):
    """Who is told how far a copy is. `Refused` and `CheckpointNotFound`: it shall not be made any more."""

    def begun(self, replica: Replica) -> None:
        """Something of it may lie there from now on."""
        ...

    def part(self, replica: Replica, rank: int, digest: str) -> None:
        """The part of that rank lies there; `digest` names its manifest."""
        ...

    def sealed(self, replica: Replica) -> None:
        """All of it does, and the marker."""
        ...


class Replicator:
    """Copies the share of one of `ranks` ranks in each checkpoint from `near` to `far`, in their order.

    `missing` is asked once, in the thread, what earlier processes left to be copied; `afterwards` is called
    there after each turn: what else has to ask the far storage, so that no save waits for it.
    """

    def __init__(
        self,
        near: Storage,
        far: Storage,
        *,
        rank: int,
        ranks: int,
        reports: Reports | None = None,
        missing: Callable[[], list[Replica]] = list,
        afterwards: Callable[[], None] = lambda: None,
        retry_s: tuple[float, ...] = RETRY_S,
        look_s: float = LOOK_S,
    ) -> None:
        self._near = near
        self._far = far
        self._rank = rank
        self._ranks = ranks
        self._reports = reports
        self._missing = missing
        self._afterwards = afterwards
        self._retry_s = retry_s
        self._look_s = look_s
        self._changed = threading.Condition()
        self._queue: collections.deque[Replica] = collections.deque()
        self._copied: list[Replica] = []
        self._marked: set[str] = set()
        self._infos: list[CheckpointInfo] = []
        self._error: StrataError | None = None
        self._lost: list[StrataError] = []
        self._closed = False
        self._thread: threading.Thread | None = None
        # now, so that it comes after the saves that the process still waits for at its end
        atexit.register(self._at_exit)

    def add(self, replica: Replica) -> None:
        """Copy it, soon."""
        with self._changed:
            self._queue.append(replica)
            self._changed.notify_all()
        self._start()

    def follow(self, info: CheckpointInfo) -> None:
        """Tell `info` when its checkpoint is there."""
        self._start()
        with self._changed:
            if info.record is not None and info.record.id in self._marked:
                info.replicated = True
            else:
                self._infos = [i for i in self._infos if i.error is None]
                self._infos.append(info)

    def _start(self) -> None:
        with self._changed:
            if self._thread is not None or self._closed:
                return
            thread = threading.Thread(target=self._run, name="strata-replicator", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the process is ending: a later one goes on with it
                return
            self._thread = thread

    def wait(self, timeout_s: float | None) -> None:
        """Return once all is there; raise what it fails of, `StorageError`, after `timeout_s`.

        What cannot be copied, because it is corrupt here, is raised once.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._queue and not self._copied, timeout_s)
            if self._lost:
                raise self._lost.pop(0)
            if done:
                return
            left, error = [r.step for r in (*self._copied, *self._queue)], self._error
        raise StorageError(
            f"steps {left} are not in {self._far.uri} yet: {error.message if error else 'it takes longer'}",
            hint=error.hint
            if error
            else "they are committed in the near storage; the next save goes on with them",
        ) from error

    def close(self) -> None:
        """Stop, whatever is left; it stays in the near storage, and a later process goes on with it."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        atexit.unregister(self._at_exit)
        if self._thread is not None:
            self._thread.join(CLOSE_S)  # a request that hangs is left to the end of the process

    def _at_exit(self) -> None:
        """Stop; say what is not copied, for nobody waited for it."""
        self.close()
        left = [replica.step for replica in (*self._copied, *self._queue)]
        told = [str(error) for error in self._lost]
        if left:
            why = f": {self._error}" if self._error is not None else ""
            told.append(
                f"steps {left} are not in {self._far.uri} yet, the next process that saves goes on{why}"
            )
        if sys.stderr is not None:
            sys.stderr.write("".join(f"strata: {line}\n" for line in told))

    # -- the thread

    def _run(self) -> None:
        failures = 0
        asked = False
        while True:
            with self._changed:
                pause_s = self._retry_s[min(failures, len(self._retry_s)) - 1] if failures else None
                if pause_s is None and self._copied:
                    pause_s = self._look_s
                if failures:
                    self._changed.wait_for(lambda: self._closed, pause_s)
                elif not (self._queue or not asked):
                    self._changed.wait_for(lambda: self._closed or self._queue, pause_s)
                if self._closed:
                    return
            try:
                if not asked:
                    self._take_up(self._missing())
                    asked = True
                self._turn()
                self._afterwards()
            except StrataError as error:
                failures += 1
                self._error = error
                log.warning("the copy to %s waits: %s", self._far.uri, error.message)
            except _Closed:
                return
            else:
                failures, self._error = 0, None

    def _take_up(self, found: list[Replica]) -> None:
        with self._changed:
            known = {replica.folder for replica in self._queue}
            self._queue.extendleft(reversed([r for r in found if r.folder not in known]))

    def _turn(self) -> None:
        """Copy one checkpoint, if any waits, and mark those that are whole."""
        if self._queue:
            replica = self._queue[0]
            copied = self._copy(replica)
            with self._changed:
                self._queue.popleft()
                if copied:
                    self._copied.append(replica)
                self._changed.notify_all()
        for replica in list(self._copied):
            if not self._near.exists(f"{replica.folder}/{MARKER}"):
                self._forget(replica)  # retention was faster
            elif self._mark(replica):
                self._tell(replica)
                self._forget(replica)
                log.info("step %d is in %s", replica.step, self._far.uri)

    def _tell(self, replica: Replica) -> None:
        with self._changed:
            self._marked.add(replica.attempt)
            for info in self._infos:
                if info.record is not None and info.record.id == replica.attempt:
                    info.replicated = True
            self._infos = [info for info in self._infos if not info.replicated]

    def _forget(self, replica: Replica) -> None:
        with self._changed:
            self._copied.remove(replica)
            self._changed.notify_all()

    def _copy(self, replica: Replica) -> bool:
        """Copy this rank's files; False when they are gone here, or not what was saved."""
        folder = replica.folder
        try:
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
                        self._copy_small(folder, name)
        except (Refused, CheckpointNotFound) as error:
            log.info("step %d is not copied any more: %s", replica.step, error.message)
            return False
        except (CheckpointCorrupt, ObjectMissing) as error:
            if not self._near.exists(f"{folder}/{MARKER}"):
                return False  # retention was faster
            log.error("step %d is not copied to %s: %s", replica.step, self._far.uri, error.message)  # noqa: TRY400  # the reason says it all
            self._lost.append(error)
            return False
        return True

    def _copy_part(self, folder: str, part: Part) -> None:
        manifest = read_rank_manifest(self._near, folder, part)
        for earlier in manifest.files:  # left behind by a process that died, or had no second storage
            self._copy_image(object_name(folder, earlier), earlier.size_bytes, _unproven(earlier.size_bytes))
        self._copy_image(f"{folder}/{manifest.image}", manifest.image_bytes, _pieces(manifest))
        self._copy_small(folder, part.manifest)

    def _copy_image(self, name: str, size_bytes: int, pieces: Iterable[tuple[int, int, str]]) -> None:
        if self._is_there(name, size_bytes):
            return
        source, sink = self._near.source(name), self._far.sink(name)
        try:
            sink.begin(size_bytes)
            for start, end, expected in pieces:
                if self._closed:
                    raise _Closed
                chunk = memoryview(bytearray(end - start))
                if source.read_into(start, chunk) != len(chunk):
                    raise CheckpointCorrupt(f"{name} ends before {end}")
                if expected and digest(chunk) != expected:
                    raise CheckpointCorrupt(f"{name} differs from what was saved, at {start}")
                sink.write_at(start, chunk.toreadonly())
            sink.finish()
        finally:
            sink.abort()
            source.close()

    def _copy_small(self, folder: str, name: str) -> None:
        data = self._near.read(f"{folder}/{name}")
        if not self._is_there(f"{folder}/{name}", len(data)):
            put(self._far, f"{folder}/{name}", data)

    def _is_there(self, name: str, size_bytes: int) -> bool:
        """Tell whether the far storage has it; a torn upload is no object, so the size tells."""
        with contextlib.suppress(ObjectMissing):
            return self._far.size(name) == size_bytes
        return False

    def _mark(self, replica: Replica) -> bool:
        """Mark the far copy if it is whole; tell whether it is."""
        try:
            manifest = read_manifest(self._far, replica.folder, replica.manifest_digest)
            read_rank_manifests(self._far, replica.folder, manifest)
        except CheckpointCorrupt:
            return False  # other ranks are not done
        write_marker(self._far, replica.folder, manifest, replica.manifest_digest)
        if self._reports is not None:
            with contextlib.suppress(
                Refused, CheckpointNotFound
            ):  # it is to go; whoever removes it finds all
                self._reports.sealed(replica)
        return True


class _Closed(Exception):
    """The replicator was closed in the middle of a copy."""


def _unproven(size_bytes: int) -> Iterator[tuple[int, int, str]]:
    """Yield an image in pieces whose digests stand elsewhere; whoever restores it proves them."""
    for start in range(0, size_bytes, CHUNK_BYTES):
        yield start, min(start + CHUNK_BYTES, size_bytes), ""


def _pieces(manifest: RankManifest) -> Iterator[tuple[int, int, str]]:
    """Yield the image in pieces, in order: from, to, digest, which is empty for what none covers."""
    known = {0: (manifest.header_bytes, manifest.header_digest)}
    for entry in manifest.tensors.values():
        for number, file, offset in entry.located():
            if file == OWN:
                known[offset] = offset + entry.chunk_bytes(number), entry.chunks[number]
    at = 0
    for start, (end, expected) in sorted(known.items()):
        if at < start:
            yield at, start, ""
        if end > start:
            yield start, end, expected
        at = max(at, end)
    if at < manifest.image_bytes:
        yield at, manifest.image_bytes, ""
