"""One object being uploaded to S3: small ones by one conditional write, large ones in parts by obstore.

The parts are sent from the caller's memory: a read-only chunk is borrowed until `finish` or `abort` returns, a
writable chunk is copied. Chunks may arrive in any order. They are sent in the order of the object, by the thread that
writes the next due chunk; the object is not visible before `finish`. obstore sends a few parts at a time; meanwhile
the sending thread waits. Strata starts no thread for uploads, so a process that is exiting, and cannot start threads,
can still upload.

If the answer to a completed upload is lost, the upload looks failed; the object's mark shows that it completed.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any, Final

import obstore

from strata.checkpoint.format.digest import CHUNK_BYTES, Bytes
from strata.checkpoint.storage.s3_control import MARK, S3Control
from strata.checkpoint.storage.s3_errors import as_storage_error
from strata.checkpoint.storage.sink import NameTaken, OnStep
from strata.errors import StorageError

SINGLE_BYTES: Final = 8 << 20
"""An object up to this size is written by one conditional request."""
PARTS_AIMED_AT: Final = 1_000
"""S3 allows 10,000 parts; fewer and larger parts need fewer requests."""
MAX_OBJECT_BYTES: Final = 5 << 40
PARTS_AT_ONCE: Final = 16


def part_bytes(size_bytes: int) -> int:
    """Return the size of an object's parts: whole chunks, so that there are at most about a thousand parts."""
    chunks = -(-size_bytes // (CHUNK_BYTES * PARTS_AIMED_AT))
    return max(chunks, 1) * CHUNK_BYTES


class S3Sink:
    """A `Sink` for `key`. `store` opens obstore's client; `mark` is unique to this writer.

    `failed` has, by key, the marks of failed tries. The next try first removes their remains; these include the
    object if a try's upload completed and only the answer was lost.
    """

    def __init__(
        self,
        control: S3Control,
        store: Callable[[], Any],
        key: str,
        *,
        mark: str,
        on_step: OnStep,
        failed: dict[str, str],
    ) -> None:
        self._control = control
        self._open_store = store
        self._key = key
        self._leaf = key.rpartition("/")[2]
        self._mark = mark
        self._on_step = on_step
        self._failed = failed
        self._complete = False
        self._size_bytes = -1
        self._large = False
        self._lock = threading.Lock()
        """The thread that holds the lock sends the chunks."""
        self._chunks: dict[int, Bytes] = {}
        self._taken_bytes = 0
        """The number of bytes of a large object that were sent: the offset of the next due chunk."""
        self._writer: Any = None
        self._error: StorageError | None = None

    @property
    def _what(self) -> str:
        return f"s3://{self._control.place.bucket}/{self._key}"

    def begin(self, size_bytes: int) -> None:
        self._on_step(f"begin {self._leaf}")
        if size_bytes > MAX_OBJECT_BYTES:
            raise StorageError(
                f"{self._what} would have {size_bytes} bytes, and S3 takes {MAX_OBJECT_BYTES}",
                hint="save with more ranks, so that each has less",
            )
        if (before := self._failed.get(self._key)) is not None:
            self._clear(before)
            del self._failed[self._key]
        self._size_bytes = size_bytes
        self._large = size_bytes > SINGLE_BYTES
        if self._large:
            self._refuse_a_taken_name()

    def write_at(self, offset: int, chunk: Bytes) -> None:
        count = memoryview(chunk).nbytes
        if offset < 0 or offset + count > self._size_bytes:
            raise StorageError(f"{count} bytes at {offset} lie outside of {self._what}")
        self._on_step(f"write {self._leaf}")
        if count:
            borrowed = memoryview(chunk).readonly
            self._chunks[offset] = chunk if borrowed else bytes(chunk)
            # A borrowed chunk need not wait for the lock: the sending thread checks again. A copied chunk
            # waits, so that each thread has at most one copy.
            while self._large and self._is_due() and self._lock.acquire(blocking=not borrowed):
                try:
                    self._send()
                finally:
                    self._lock.release()

    def finish(self) -> None:
        self._on_step(f"complete {self._leaf}")
        taken_bytes = self._taken_bytes + sum(memoryview(chunk).nbytes for chunk in self._chunks.values())
        if taken_bytes != self._size_bytes:
            raise StorageError(f"{self._what} got {taken_bytes} of {self._size_bytes} bytes")
        if self._large:
            self._finish_large()
        else:
            self._finish_small()
        self._complete = True
        self._on_step(f"completed {self._leaf}")

    def abort(self) -> None:
        with self._lock:
            self._chunks.clear()
            self._writer = None  # this drops the parts in progress, too
        if self._complete:
            return
        if self._large:
            with contextlib.suppress(StorageError):  # the sweep does the rest; the first error counts
                self._control.abort_uploads(self._key)
        self._failed.setdefault(self._key, self._mark)

    def _clear(self, mark: str) -> None:
        """Remove the remains of an earlier try of this process."""
        with contextlib.suppress(StorageError):  # not every server lists uploads; the sweep aborts the rest
            self._control.abort_uploads(self._key)
        found = self._control.find(self._key)
        if found is not None and found.mark == mark:
            self._control.delete(self._key)

    def _finish_small(self) -> None:
        data = b"".join(chunk for _, chunk in sorted(self._chunks.items()))
        if self._control.create(self._key, data, self._mark):
            return
        if self._control.get(self._key) != data:
            self._refuse_a_taken_name()

    def _refuse_a_taken_name(self) -> None:
        if self._control.find(self._key) is not None:
            raise NameTaken(f"{self._what} exists already", hint="two processes write as the same rank")

    def _is_due(self) -> bool:
        return self._error is not None or self._taken_bytes in self._chunks

    def _send(self) -> None:
        """Send the due chunks that have arrived; raise the error of an earlier part."""
        if self._error is not None:
            raise self._error
        try:
            with as_storage_error("write", self._what):
                while (piece := self._chunks.pop(self._taken_bytes, None)) is not None:
                    if self._writer is None:
                        self._writer = obstore.open_writer(
                            self._open_store(),
                            self._key,
                            attributes={MARK: self._mark},
                            buffer_size=part_bytes(self._size_bytes),
                            max_concurrency=PARTS_AT_ONCE,
                        )
                    self._taken_bytes += memoryview(piece).nbytes
                    self._writer.write(piece)
        except StorageError as error:
            self._error = error
            raise

    def _finish_large(self) -> None:
        try:
            with as_storage_error("write", self._what):
                self._writer.close()
            found = self._control.find(self._key)
            if found is None or found.size_bytes != self._size_bytes:
                has = "is not there" if found is None else f"has {found.size_bytes} bytes"
                raise StorageError(f"{self._what} {has} after {self._size_bytes} were sent")
        except StorageError:
            if not self._is_there():
                raise

    def _is_there(self) -> bool:
        """Return whether this writer's object exists, although the upload seemed to fail."""
        with contextlib.suppress(StorageError):
            found = self._control.find(self._key)
            return found is not None and (found.mark, found.size_bytes) == (self._mark, self._size_bytes)
        return False
