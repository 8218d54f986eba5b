"""One object on its way to S3: small ones by one conditional write, large ones in parts by obstore.

The parts go straight from the caller's memory: a read-only chunk is borrowed until `finish` or
`abort` returns, a writable one is copied. Chunks may come in any order; they are sent in the order
of the object, as soon as the next one is there; the last one only with `finish`, so that nothing
appears before.

A thread sends them. Where none can be started, because the process is ending, say, whoever writes sends
them, a few parts at a time: a far copy reads each chunk into memory of its own, and an image kept until
`finish` would be all of it.

A completed upload whose answer was lost looks like one that failed; the object's mark tells.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Final

import obstore

from strata.checkpoint.digest import CHUNK_BYTES, Bytes
from strata.checkpoint.s3_control import MARK, S3Control
from strata.checkpoint.s3_errors import as_storage_error
from strata.checkpoint.sink import OnStep
from strata.errors import StorageError, StrataError

SINGLE_BYTES: Final = 8 << 20
"""Up to this size an object is one request, and conditional."""
PARTS_AIMED_AT: Final = 1_000
"""S3 takes 10,000 parts; fewer and larger ones cost fewer requests."""
MAX_OBJECT_BYTES: Final = 5 << 40
PARTS_AT_ONCE: Final = 16
_PARTS_AT_ONCE_HERE: Final = 4
"""How many parts are under way, and their chunks kept, where no thread sends them."""
_AHEAD_BYTES: Final = 4 * CHUNK_BYTES
"""How much may wait to be sent before the writer does."""


def part_bytes(size_bytes: int) -> int:
    """Return the size of the parts for an object: whole chunks, about a thousand of them at most."""
    chunks = -(-size_bytes // (CHUNK_BYTES * PARTS_AIMED_AT))
    return max(chunks, 1) * CHUNK_BYTES


class S3Sink:
    """A `Sink` for `key`. `store` opens obstore's side; `mark` is this writer's own, unlike any other's.

    `before` is the mark of a try that failed, "" without one. What it left is cleared away at the beginning,
    also an object: a completed upload whose answer was lost. `failed` is told the mark of what this one leaves.
    """

    def __init__(
        self,
        control: S3Control,
        store: Callable[[], Any],
        key: str,
        *,
        mark: str,
        on_step: OnStep,
        before: str = "",
        failed: Callable[[str], None] = lambda mark: None,
    ) -> None:
        self._control = control
        self._open_store = store
        self._key = key
        self._leaf = key.rpartition("/")[2]
        self._mark = mark
        self._on_step = on_step
        self._before = before
        self._failed = failed
        self._complete = False
        self._size_bytes = -1
        self._large = False
        self._written_bytes = 0
        self._small = bytearray()
        self._changed = threading.Condition()
        self._chunks: dict[int, Bytes] = {}
        self._sent_to = 0
        self._ahead_bytes = 0
        self._aborted = False
        self._finishing = False
        self._done = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._writer: Any = None
        """What sends the parts where there is no thread."""

    @property
    def _what(self) -> str:
        return f"s3://{self._control.place.bucket}/{self._key}"

    @property
    def block_bytes(self) -> int:
        return CHUNK_BYTES

    def begin(self, size_bytes: int) -> None:
        self._on_step(f"begin {self._leaf}")
        if size_bytes > MAX_OBJECT_BYTES:
            raise StorageError(
                f"{self._what} would have {size_bytes} bytes, and S3 takes {MAX_OBJECT_BYTES}",
                hint="save with more ranks, so that each has less",
            )
        if self._before:
            self._clear(self._before)
            self._before = ""
        self._size_bytes = size_bytes
        if size_bytes <= SINGLE_BYTES:
            self._small = bytearray(size_bytes)
            return
        self._refuse_a_taken_name()
        self._large = True
        thread = threading.Thread(target=self._run, name="strata-s3-upload", daemon=True)
        with contextlib.suppress(RuntimeError):  # no thread to be had: whoever writes sends it
            thread.start()
            self._thread = thread

    def write_at(self, offset: int, chunk: Bytes) -> None:
        count = memoryview(chunk).nbytes
        if offset < 0 or offset + count > self._size_bytes:
            raise StorageError(f"{count} bytes at {offset} lie outside of {self._what}")
        self._on_step(f"write {self._leaf}")
        if not self._large:
            self._small[offset : offset + count] = chunk
            self._written_bytes += count
            return
        borrowed = chunk if memoryview(chunk).readonly else bytes(chunk)
        with self._changed:
            self._raise_failure()
            if count:
                self._chunks[offset] = borrowed
                self._ahead_bytes += count
                self._written_bytes += count
            self._changed.notify_all()
            if self._thread is None:
                self._send_here()
                return
            # whoever brings what is sent next is never held up, whatever waits behind it
            self._changed.wait_for(
                lambda: self._done or self._ahead_bytes <= _AHEAD_BYTES or not self._is_sending()
            )
            self._raise_failure()

    def finish(self) -> None:
        self._on_step(f"complete {self._leaf}")
        if self._written_bytes != self._size_bytes:
            raise StorageError(f"{self._what} got {self._written_bytes} of {self._size_bytes} bytes")
        if not self._large:
            self._finish_small()
        else:
            with self._changed:
                self._finishing = True
                self._changed.notify_all()
            if self._thread is None:
                self._finish_here()
            else:
                self._thread.join()
                with self._changed:
                    self._raise_failure()
        self._complete = True
        self._on_step(f"completed {self._leaf}")

    def abort(self) -> None:
        with self._changed:
            finished = self._done and self._error is None
            self._aborted = True
            self._chunks.clear()
            self._writer = None  # and what is under way with it
            self._changed.notify_all()
        if self._large and not finished:
            if self._thread is not None:
                self._thread.join()
            with contextlib.suppress(StorageError):  # the sweep finds what is left; the first error counts
                self._control.abort_uploads(self._key)
        self._small = bytearray()
        if not self._complete:
            self._failed(self._before or self._mark)

    def _clear(self, mark: str) -> None:
        """Remove what an earlier try of this process left."""
        with contextlib.suppress(StorageError):  # not every server lists them; the sweep finds what is left
            self._control.abort_uploads(self._key)
        found = self._control.find(self._key)
        if found is not None and found.mark == mark:
            self._control.delete(self._key)

    # -- small objects

    def _finish_small(self) -> None:
        data = bytes(self._small)
        if self._control.create(self._key, data, self._mark):
            return
        if self._control.get(self._key) != data:
            self._refuse_a_taken_name()

    def _refuse_a_taken_name(self) -> None:
        if self._control.find(self._key) is not None:
            raise StorageError(f"{self._what} exists already", hint="two processes write as the same rank")

    # -- large objects without a thread

    def _send_here(self) -> None:
        """Send what is next as far as it is there, the last chunk only when all is to appear."""
        with as_storage_error("write", self._what):
            while self._is_sending():
                if self._writer is None:
                    self._writer = obstore.open_writer(
                        self._open_store(),
                        self._key,
                        attributes={MARK: self._mark},
                        buffer_size=part_bytes(self._size_bytes),
                        max_concurrency=_PARTS_AT_ONCE_HERE,
                    )
                self._writer.write(self._take())

    def _finish_here(self) -> None:
        with self._changed:
            try:
                self._send_here()
                with as_storage_error("write", self._what):
                    self._writer.close()
                self._check_there()
            except StrataError as error:
                if self._unless_complete(error) is not None:
                    raise
            self._done = True

    # -- large objects: the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._upload()
        except BaseException as caught:  # noqa: BLE001  # raised in the writer's thread
            error = self._unless_complete(caught)
        with self._changed:
            self._done, self._error = True, error
            self._chunks.clear()
            self._changed.notify_all()

    def _upload(self) -> None:
        store = self._open_store()
        with as_storage_error("write", self._what):
            obstore.put(
                store,
                self._key,
                self._pieces(),
                attributes={MARK: self._mark},
                use_multipart=True,
                chunk_size=part_bytes(self._size_bytes),
                max_concurrency=PARTS_AT_ONCE,
            )
        self._check_there()

    def _check_there(self) -> None:
        found = self._control.find(self._key)
        if found is None or found.size_bytes != self._size_bytes:
            has = "is not there" if found is None else f"has {found.size_bytes} bytes"
            raise StorageError(f"{self._what} {has} after {self._size_bytes} were sent")

    def _pieces(self) -> Iterator[Bytes]:
        offset = 0
        while offset < self._size_bytes:
            piece = self._next(offset)
            offset += len(piece)
            yield piece

    def _is_sending(self) -> bool:
        """Whether the next chunk is there and will be taken; the last one waits for `finish`."""
        piece = self._chunks.get(self._sent_to)
        return piece is not None and (self._finishing or self._sent_to + len(piece) < self._size_bytes)

    def _next(self, offset: int) -> Bytes:
        """Return the chunk at `offset` once it is there, the last one only when all is to appear."""
        with self._changed:
            self._changed.wait_for(lambda: self._aborted or self._is_sending())
            if self._aborted:
                raise StorageError(f"{self._what} was given up")
            return self._take()

    def _take(self) -> Bytes:
        """Return the chunk that is next, which is there."""
        piece = self._chunks.pop(self._sent_to)
        self._sent_to += len(piece)
        self._ahead_bytes -= len(piece)
        self._changed.notify_all()
        return piece

    def _unless_complete(self, error: BaseException) -> BaseException | None:
        """Return the error, or None when the object is there after all and is this writer's."""
        if self._aborted or not isinstance(error, StrataError):
            return error
        with contextlib.suppress(StorageError):
            found = self._control.find(self._key)
            if found is not None and found.mark == self._mark and found.size_bytes == self._size_bytes:
                return None
        return error

    def _raise_failure(self) -> None:
        """Raise what the upload failed of."""
        if self._error is None:
            return
        if isinstance(self._error, StrataError):
            raise self._error
        raise StorageError(f"cannot write {self._what}: {self._error}") from self._error
