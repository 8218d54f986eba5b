"""An image on its way between memory and storage, a block of 8 MiB at a time, by a few threads.

Each thread takes the next block: of one to write it hashes the chunks and hands the bytes to the
sink; of one to read it asks the source, and proves each chunk whose last byte has come. So hashing
goes on while the device works, and all of it without the interpreter's lock. Blocks and chunks have
nothing to do with each other: chunks begin anew at each tensor, blocks lie where the sink takes
them best.

The calling thread is one of the few: a process that may start no thread any more, because it is
ending, still finishes its save.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import resource
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from strata.checkpoint.digest import CHUNK_BYTES, digest
from strata.checkpoint.memory import Rooms, copy
from strata.checkpoint.sink import NotAnObject, ObjectMissing, Sink, Source, Storage
from strata.errors import CheckpointCorrupt, CheckpointIncomplete

DEFAULT_THREADS: Final = 4
OPEN_AT_ONCE: Final = 64
"""How many images are open at a time, where a process may have that many files."""

OnBlock = Callable[[int], None]
"""Called with the size of each block when it is done, by one thread at a time; what it raises ends
the whole."""


def silent(count_bytes: int) -> None:
    """Tell nobody of a block."""


def spread(count: int, work: Callable[[int], None], *, threads: int) -> None:
    """Call `work(0)` to `work(count - 1)`, begun in this order by up to `threads` threads.

    Returns when all have ended. After an error none is begun any more, and the first one is raised
    when those under way have ended.
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
            except BaseException as error:  # noqa: BLE001  # raised below, in the thread that asked
                errors.append(error)

    helpers = []
    try:
        for name in range(min(threads, count) - 1):
            helper = threading.Thread(target=run, name=f"strata-io-{name}", daemon=True)
            try:
                helper.start()
            except RuntimeError:  # no thread to be had: the process is ending, or it has too many
                break
            helpers.append(helper)
        run()
    except BaseException as error:
        errors.append(error)  # the others stop, too
        raise
    finally:
        _join(helpers, errors)
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()  # it leads to this frame, and the frame to what the caller holds


def _join(helpers: Sequence[threading.Thread], errors: list[BaseException]) -> None:
    """Return when all have ended, also when interrupted: what they work on is let go of then."""
    for helper in helpers:
        while helper.is_alive():
            try:
                helper.join()
            except BaseException as error:  # noqa: BLE001  # raised by the caller, when none is left
                errors.append(error)  # and no more work is begun


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
    on_block: OnBlock = silent,
    ready: Callable[[int], None] = silent,
) -> list[str]:
    """Write `pieces`, one after the other, to a sink that has begun; return the digests of `chunks`.

    `chunks` are parts of the pieces, in their order; where they are given, the pieces end with them.
    Those whose digests are `known`, in the same order and "" for others, are not hashed again.
    Before any of its bytes is touched, `ready` is called with how many there must be by now, counted
    from the beginning. The sink is left for the caller to finish.
    """
    size = sink.block_bytes
    joined = _Joined(pieces, block_bytes=size)
    blocks = -(-joined.size_bytes // size)
    shares = groups([len(chunk) for chunk in chunks], size)
    found = list(known) or [""] * len(chunks)
    lead = joined.size_bytes - sum(map(len, chunks))
    ends = list(itertools.accumulate(map(len, chunks), initial=lead))
    telling = threading.Lock()

    def work(number: int) -> None:
        hashed_to = ends[shares[number].stop] if number < len(shares) else 0
        ready(max(hashed_to, min((number + 1) * size, joined.size_bytes)))
        for index in shares[number] if number < len(shares) else ():
            found[index] = found[index] or digest(chunks[index])
        if number < blocks:
            start, end = number * size, min((number + 1) * size, joined.size_bytes)
            with joined.block(start, end) as block:
                sink.write_at(start, block)
            with telling:
                on_block(end - start)

    spread(max(blocks, len(shares)), work, threads=threads)
    return found


def groups(sizes: Sequence[int], limit: int) -> list[range]:
    """Return runs of neighbours whose sizes come to about `limit` together."""
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
    """Pieces of memory as if they lay behind each other."""

    def __init__(self, pieces: Sequence[memoryview], *, block_bytes: int) -> None:
        self._pieces = [piece for piece in pieces if len(piece)]
        self._ends = list(itertools.accumulate(len(piece) for piece in self._pieces))
        self._rooms = Rooms(block_bytes)

    @property
    def size_bytes(self) -> int:
        return self._ends[-1] if self._ends else 0

    @contextlib.contextmanager
    def block(self, start: int, end: int) -> Iterator[memoryview]:
        """Yield the bytes `[start, end)`; those of several pieces are put together in a room."""
        first, last = bisect.bisect_right(self._ends, start), bisect.bisect_left(self._ends, end)
        begin = self._ends[first] - len(self._pieces[first])
        if first == last:
            yield self._pieces[first][start - begin : end - begin]
            return
        with self._rooms.room() as room:
            for index in range(first, last + 1):
                piece, begin = self._pieces[index], self._ends[index] - len(self._pieces[index])
                part = piece[max(start - begin, 0) : end - begin]
                offset = max(begin - start, 0)
                copy(room[offset : offset + len(part)], part)
            yield room[: end - start]


# -- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A chunk in storage, and where it goes: `size_bytes` from `offset` of the object `name`.

    It must have the digest; `complaint` says what is wrong if it has not.
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
    on_block: OnBlock = silent,
    block_bytes: int = CHUNK_BYTES,
) -> None:
    """Read chunks to their positions in `memory`, and prove each.

    Neighbours are read together, past where one ends and the next begins. Of many objects some are open
    at a time. `CheckpointCorrupt` with the complaint of a chunk that differs, or naming the object that
    is missing or too short.
    """
    by_name: dict[str, list[Stored]] = {}
    for chunk in wanted:
        by_name.setdefault(chunk.name, []).append(chunk)
    names, at_once = sorted(by_name), open_at_once()
    for start in range(0, len(names), at_once):
        with contextlib.ExitStack() as opened:
            sources: dict[str, Source] = {}
            for name in names[start : start + at_once]:
                with _proving(name):
                    sources[name] = opened.enter_context(contextlib.closing(storage.source(name)))
            here = [chunk for name in sources for chunk in by_name[name]]
            extents = _extents(here, sources)
            read_image(memory, extents, here, threads=threads, on_block=on_block, block_bytes=block_bytes)


def open_at_once() -> int:
    """Return how many objects may be open at a time: each takes two of a process's descriptors."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return OPEN_AT_ONCE if limit == resource.RLIM_INFINITY else max(1, min(OPEN_AT_ONCE, limit // 8))


def _extents(wanted: Sequence[Stored], sources: Mapping[str, Source]) -> list[Extent]:
    """Return what is read together."""
    extents: list[Extent] = []
    for chunk in sorted(wanted, key=lambda chunk: (chunk.name, chunk.offset)):
        before = extents[-1] if extents else None
        if (
            before is not None
            and before.name == chunk.name
            and before.offset + before.size_bytes == chunk.offset
            and before.position + before.size_bytes == chunk.position
        ):
            extents[-1] = replace(before, size_bytes=before.size_bytes + chunk.size_bytes)
        else:
            extents.append(
                Extent(
                    source=sources[chunk.name],
                    name=chunk.name,
                    offset=chunk.offset,
                    position=chunk.position,
                    size_bytes=chunk.size_bytes,
                )
            )
    return extents


@contextlib.contextmanager
def _proving(name: str) -> Iterator[None]:
    """Take an object that is not there for a checkpoint that is not whole; one that is none, for a corrupt one."""
    try:
        yield
    except ObjectMissing as error:
        raise CheckpointIncomplete(f"{name} is missing") from error
    except NotAnObject as error:
        raise CheckpointCorrupt(error.message) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """Bytes to read: `size_bytes` from `offset` of the source to `position` of the memory."""

    source: Source
    name: str
    offset: int
    position: int
    size_bytes: int


def read_image(
    memory: memoryview,
    extents: Sequence[Extent],
    checks: Sequence[Stored],
    *,
    threads: int = DEFAULT_THREADS,
    on_block: OnBlock = silent,
    block_bytes: int = CHUNK_BYTES,
) -> None:
    """Fill `memory` by `extents`, which do not overlap, and prove `checks`.

    `CheckpointCorrupt` with the complaint of a check that fails, or naming the object that is too
    short.
    """
    blocks = sorted(_blocks(extents, block_bytes), key=lambda block: block.position)
    starts = [block.position for block in blocks]
    touching: list[list[int]] = [[] for _ in blocks]
    pending = [0] * len(checks)
    for index, check in enumerate(checks):
        first = max(bisect.bisect_right(starts, check.position) - 1, 0)
        last = bisect.bisect_left(starts, check.position + check.size_bytes)
        pending[index] = max(last - first, 0)
        for number in range(first, last):
            touching[number].append(index)
    lock = threading.Lock()

    def work(number: int) -> None:
        block = blocks[number]
        room = memory[block.position : block.position + block.size_bytes]
        with _proving(block.name):
            count = block.source.read_into(block.offset, room)
        if count != block.size_bytes:
            raise CheckpointCorrupt(f"{block.name} ends after {block.offset + count} bytes")
        ready = []
        with lock:
            for index in touching[number]:
                pending[index] -= 1
                if not pending[index]:
                    ready.append(index)
        for index in ready:
            check = checks[index]
            if digest(memory[check.position : check.position + check.size_bytes]) != check.digest:
                raise CheckpointCorrupt(check.complaint)
        with lock:
            on_block(block.size_bytes)

    for check, count in zip(checks, tuple(pending), strict=True):
        if not count:
            raise CheckpointCorrupt(check.complaint)  # no extent brings any of it
    spread(len(blocks), work, threads=threads)


def _blocks(extents: Sequence[Extent], block_bytes: int) -> Iterator[Extent]:
    """Cut extents where their objects' blocks begin, so that all but the last are whole ones."""
    for extent in extents:
        at, end = extent.offset, extent.offset + extent.size_bytes
        while at < end:
            stop = min((at // block_bytes + 1) * block_bytes, end)
            yield Extent(
                source=extent.source,
                name=extent.name,
                offset=at,
                position=extent.position + at - extent.offset,
                size_bytes=stop - at,
            )
            at = stop
