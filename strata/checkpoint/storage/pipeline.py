"""Moving an image between memory and storage in blocks of 8 MiB, by a few threads.

Each thread takes the next block. To write the block, the thread hashes its chunks and passes the bytes to the sink. To
read the block, the thread requests it from the source and verifies each chunk whose last byte has arrived. So hashing
goes on while the device works, and both run without the interpreter's lock. Blocks and chunks have different
boundaries: each tensor begins a new chunk; a block begins at each multiple of 8 MiB of the object.

The calling thread also takes blocks. So a process that cannot start threads any more, because it is exiting, still
finishes its save.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import itertools
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.digest import CHUNK_BYTES, digest
from strata.checkpoint.snapshot.memory import BufferPool, copy
from strata.checkpoint.storage.sink import Sink, Source, Storage, proving, unobserved
from strata.errors import CheckpointCorrupt

DEFAULT_THREADS: Final = 4
OPEN_AT_ONCE: Final = 64
"""The most images open at a time, if the process may open that many files."""

OnBlock = Callable[[int], None]
"""Called with the size of each finished block, by one thread at a time; an exception ends the transfer."""


def spread(count: int, work: Callable[[int], None], *, threads: int) -> None:
    """Call `work(0)` to `work(count - 1)`, begun in this order, in up to `threads` threads.

    Return when all calls have ended. After an error no further call begins; the first error is raised once the
    running calls have ended.
    """
    numbers: Iterator[int] = iter(range(count))
    lock = threading.Lock()
    errors: list[BaseException] = []

    def run() -> None:
        while not errors:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            try:
                work(number)
            except BaseException as error:  # noqa: BLE001  # raised below, in the calling thread
                errors.append(error)

    helpers = []
    try:
        for name in range(min(threads, count) - 1):
            helper = threading.Thread(target=run, name=f"strata-io-{name}", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no thread can start: the process is exiting, or has too many
                break
            helpers.append(helper)
        run()
    except BaseException as error:
        errors.append(error)  # so that the helpers stop, too
        raise
    finally:
        _join(helpers, errors)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # breaks a cycle: the errors refer to this frame, and this frame to the caller's memory


def _join(helpers: Sequence[threading.Thread], errors: list[BaseException]) -> None:
    """Return when all helpers have ended, even if interrupted: until then they use the caller's memory."""
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:  # noqa: BLE001  # `spread` raises it once all have ended
                errors.append(error)  # so that no further call begins


# -- writing ----------------------------------------------------------------------------------


def digests(chunks: Sequence[memoryview], *, threads: int = DEFAULT_THREADS) -> list[str]:
    """Return the digest of each of `chunks`."""
    found = [""] * len(chunks)
    shares = groups([len(chunk) for chunk in chunks], CHUNK_BYTES)

    def work(number: int) -> None:
        for index in shares[number]:
            found[index] = digest(chunks[index])

    spread(len(shares), work, threads=threads)
    return found


def write_image(
    sink: Sink,
    pieces: Sequence[memoryview],
    chunks: Sequence[memoryview] = (),
    *,
    known: Sequence[str] = (),
    threads: int = DEFAULT_THREADS,
    on_block: OnBlock = unobserved,
    ready: Callable[[int], None] = unobserved,
    block_bytes: int = CHUNK_BYTES,
) -> list[str]:
    """Write `pieces` one after the other to a sink that has begun; return the digests of `chunks`.

    `chunks` are consecutive parts of the pieces; if given, the last chunk must end where the pieces end. `known` has
    the digest of each chunk, or "" if it must be computed. Before a block is read from memory, `ready(n)` is
    called; it must return only once the first n bytes of the pieces are ready. The caller must finish the sink.
    """
    joined = _Joined(pieces, block_bytes=block_bytes)
    blocks = -(-joined.size_bytes // block_bytes)
    shares = groups([len(chunk) for chunk in chunks], block_bytes)
    found = list(known) or [""] * len(chunks)
    lead = joined.size_bytes - sum(map(len, chunks))
    ends = list(itertools.accumulate(map(len, chunks), initial=lead))
    reporting = threading.Lock()

    def work(number: int) -> None:
        hashed_to = ends[shares[number].stop] if number < len(shares) else 0
        ready(max(hashed_to, min((number + 1) * block_bytes, joined.size_bytes)))
        for index in shares[number] if number < len(shares) else ():
            found[index] = found[index] or digest(chunks[index])
        if number < blocks:
            start, end = number * block_bytes, min((number + 1) * block_bytes, joined.size_bytes)
            with joined.block(start, end) as block:
                sink.write_at(start, block)
            with reporting:
                on_block(end - start)

    spread(max(blocks, len(shares)), work, threads=threads)
    return found


def groups(sizes: Sequence[int], limit: int) -> list[range]:
    """Return ranges of consecutive items whose sizes add up to about `limit`."""
    found, first, total = [], 0, 0
    for index, size in enumerate(sizes):
        total += size
        if total >= limit:
            found.append(range(first, index + 1))
            first, total = index + 1, 0
    if first < len(sizes):
        found.append(range(first, len(sizes)))
    return found


class _Joined:
    """Pieces of memory presented as one consecutive range."""

    def __init__(self, pieces: Sequence[memoryview], *, block_bytes: int) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = list(itertools.accumulate(len(piece) for piece in self._pieces))
        self._buffers = BufferPool(block_bytes)

    @property
    def size_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @contextlib.contextmanager
    def block(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes `[start, end)`; bytes of several pieces are copied into one buffer."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, end)
        begin = self._ends[first] - len(self._pieces[first])
        if first == last:
            yield self._pieces[first][start - begin : end - begin]
            return
        with self._buffers.borrow() as joined:
            for index in range(first, last + 1):
                piece, begin = self._pieces[index], self._ends[index] - len(self._pieces[index])
                part = piece[max(start - begin, 0) : end - begin]
                offset = max(begin - start, 0)
                copy(joined[offset : offset + len(part)], part)
            yield joined[: end - start]


# -- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A chunk in storage and its target: `size_bytes` from `offset` of the object `name`, to `position` in memory.

    The bytes must have the digest `digest`; else `complaint` is the error's text.
    """

    name: str
    offset: int
    position: int
    size_bytes: int
    digest: str
    complaint: str


def read_chunks(
    storage: Storage,
    memory: memoryview,
    wanted: Sequence[Stored],
    *,
    threads: int = DEFAULT_THREADS,
    block_bytes: int = CHUNK_BYTES,
) -> None:
    """Read chunks to their positions in `memory`, and verify each.

    Neighbouring chunks are read in one request; at most `open_at_once()` objects are open at a time.
    `CheckpointCorrupt` with the complaint of a chunk that differs, or naming an object that is missing or too short.
    """
    by_name: dict[str, list[Stored]] = {}
    for chunk in wanted:
        by_name.setdefault(chunk.name, []).append(chunk)
    names, at_once = sorted(by_name), open_at_once()
    for start in range(0, len(names), at_once):
        with contextlib.ExitStack() as opened:
            sources: dict[str, Source] = {}
            for name in names[start : start + at_once]:
                with proving(name):
                    sources[name] = opened.enter_context(contextlib.closing(storage.source(name)))
            here = [chunk for name in sources for chunk in by_name[name]]
            _read_blocks(memory, here, sources, threads=threads, block_bytes=block_bytes)


def open_at_once() -> int:
    """Return the number of objects that may be open at a time: each takes two of the process's descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_AT_ONCE if limit == resource.RLIM_INFINITY else max(1, min(OPEN_AT_ONCE, limit // 8))


@dataclass(slots=True)
class _Block:
    """Bytes read in one request: from `offset` of an object to `position` of the memory.

    `chunks` are the numbers of the chunks that overlap with these bytes.
    """

    name: str
    offset: int
    position: int
    size_bytes: int
    chunks: list[int]


def _read_blocks(
    memory: memoryview,
    chunks: Sequence[Stored],
    sources: Mapping[str, Source],
    *,
    threads: int,
    block_bytes: int,
) -> None:
    blocks = _blocks(chunks, block_bytes)
    pending = collections.Counter(number for block in blocks for number in block.chunks)
    lock = threading.Lock()

    def work(number: int) -> None:
        block = blocks[number]
        target = memory[block.position : block.position + block.size_bytes]
        with proving(block.name):
            count = sources[block.name].read_into(block.offset, target)
        if count != block.size_bytes:
            raise CheckpointCorrupt(f"{block.name} ends after {block.offset + count} bytes")
        with lock:
            pending.subtract(block.chunks)
            whole = [chunks[index] for index in block.chunks if not pending[index]]
        for chunk in whole:
            if digest(memory[chunk.position : chunk.position + chunk.size_bytes]) != chunk.digest:
                raise CheckpointCorrupt(chunk.complaint)

    spread(len(blocks), work, threads=threads)


def _blocks(chunks: Sequence[Stored], block_bytes: int) -> list[_Block]:
    """Return the blocks to read: chunks adjacent in object and memory, joined and then cut at block boundaries."""
    blocks: list[_Block] = []
    for number, chunk in sorted(enumerate(chunks), key=lambda each: (each[1].name, each[1].offset)):
        at, end = chunk.offset, chunk.offset + chunk.size_bytes
        while at < end:
            size_bytes = min((at // block_bytes + 1) * block_bytes, end) - at
            block = _Block(chunk.name, at, chunk.position + at - chunk.offset, size_bytes, [number])
            if at % block_bytes and blocks and _follows(block, blocks[-1]):
                blocks[-1].size_bytes += size_bytes
                blocks[-1].chunks.append(number)
            else:
                blocks.append(block)
            at += size_bytes
    return blocks


def _follows(block: _Block, before: _Block) -> bool:
    return (before.name, before.offset + before.size_bytes, before.position + before.size_bytes) == (
        block.name,
        block.offset,
        block.position,
    )
