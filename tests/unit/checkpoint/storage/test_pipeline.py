from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from strata.checkpoint.format.digest import CHUNK_BYTES, digest
from strata.checkpoint.storage.pipeline import Stored, digests, read_chunks, spread, write_image
from strata.errors import CheckpointCorrupt, StorageError
from tests.unit.checkpoint.memory_storage import MemorySink, MemoryStorage

LIMIT_S = 20
BLOCK = 64


def some_bytes(count: int, seed: int = 0) -> memoryview:
    return memoryview(bytearray(random.Random(seed).randbytes(count)))


# -- distribution of work ---------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 2, 50])
def test_each_number_is_processed_once_by_all_available_threads(count: int, threads: int) -> None:
    done: list[int] = []
    together = threading.Barrier(max(1, min(count, threads)))

    def work(number: int) -> None:
        if number < together.parties:
            together.wait(LIMIT_S)
        done.append(number)

    spread(count, work, threads=threads)
    assert sorted(done) == list(range(count))


def test_an_error_starts_no_more_work_and_is_raised_once_all_threads_end() -> None:
    failed, ended, begun = threading.Event(), threading.Event(), []

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            assert failed.wait(LIMIT_S)
            ended.set()
        elif number == 1:
            failed.set()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        spread(1000, work, threads=2)
    assert ended.is_set(), "the other one was waited for"
    assert len(begun) < 1000


def test_an_interrupt_is_raised_after_the_other_threads_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    join, go, ended = threading.Thread.join, threading.Event(), threading.Event()
    joins: list[threading.Thread] = []
    main = threading.get_ident()

    def interrupted(self: threading.Thread, timeout: float | None = None) -> None:
        joins.append(self)
        if len(joins) == 1:
            go.set()
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    helping = threading.Event()

    def work(number: int) -> None:
        if threading.get_ident() == main:
            assert helping.wait(10)
        else:
            helping.set()
            assert go.wait(10)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        spread(2, work, threads=2)
    assert ended.is_set()


def test_the_caller_does_all_work_if_no_thread_can_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    done: list[int] = []
    spread(5, done.append, threads=3)
    assert done == [0, 1, 2, 3, 4]


# -- writing ----------------------------------------------------------------------------------


def written(pieces: Sequence[memoryview], **more: Any) -> tuple[bytes, list[str]]:
    storage = MemoryStorage()
    sink = MemorySink(storage, "x")
    sink.begin(sum(map(len, pieces)))
    found = write_image(sink, pieces, block_bytes=BLOCK, **more)
    sink.finish()
    return storage.objects["x"], found


@pytest.mark.parametrize(
    "sizes", [[], [0], [1], [64], [65], [200, 0, 3], [1] * 130, [63, 1, 64, 2, 300], [10, 500, 10]]
)
@pytest.mark.parametrize("threads", [1, 3])
def test_pieces_are_written_contiguously(sizes: list[int], threads: int) -> None:
    data = some_bytes(sum(sizes))
    pieces, at = [], 0
    for size in sizes:
        pieces.append(data[at : at + size])
        at += size
    counts: list[int] = []
    got, found = written(pieces, chunks=pieces, threads=threads, on_block=counts.append)
    assert got == bytes(data)
    assert found == [digest(piece) for piece in pieces]
    assert sum(counts) == len(data)


def test_digests_cover_chunks_larger_than_the_written_bytes() -> None:
    data = some_bytes(1000)
    got, found = written([data[:10]], chunks=[data[:500], data[500:]])
    assert got == bytes(data[:10])
    assert found == [digest(data[:500]), digest(data[500:])]


def test_blocks_are_reported_singly_and_a_callback_error_ends_the_write() -> None:
    class EnoughError(Exception):
        pass

    counts = []

    def on_block(count: int) -> None:
        counts.append(count)
        if len(counts) == 3:
            raise EnoughError

    with pytest.raises(EnoughError):
        written([some_bytes(64 * 100)], threads=1, on_block=on_block)
    assert len(counts) == 3


def test_an_error_of_the_sink_reaches_the_caller() -> None:
    storage = MemoryStorage()
    sink = MemorySink(storage, "x")
    sink.begin(640)
    storage.fail(StorageError("disk full"), "write", times=1)
    with pytest.raises(StorageError, match="disk full"):
        write_image(sink, [some_bytes(640)], threads=3, block_bytes=BLOCK)


def test_digests_of_many_chunks() -> None:
    data = [some_bytes(size, seed=size) for size in (0, 1, CHUNK_BYTES, 7, CHUNK_BYTES - 1)]
    assert digests(data) == [digest(chunk) for chunk in data]
    assert digests([]) == []


# -- reading ----------------------------------------------------------------------------------


class Read:
    """An in-memory object of several blocks, and its checks."""

    def __init__(self, size: int = 2 * BLOCK + 100) -> None:
        self.storage = MemoryStorage()
        self.data = memoryview(os.urandom(size))
        self.storage.objects["x"] = bytes(self.data)
        self.memory = memoryview(bytearray(size))
        cuts = [0, 10, 40, 50, BLOCK - 1, BLOCK + 1, 2 * BLOCK, size]
        self.checks = [
            Stored(
                name="x",
                offset=a,
                position=a,
                size_bytes=b - a,
                digest=digest(self.data[a:b]),
                complaint=f"{a} is wrong",
            )
            for a, b in itertools.pairwise(cuts)
        ]

    def run(self, threads: int = 3) -> None:
        read_chunks(self.storage, self.memory, self.checks, threads=threads, block_bytes=BLOCK)


@pytest.mark.parametrize("threads", [1, 3])
def test_neighbouring_chunks_are_read_together_in_any_order(threads: int) -> None:
    read = Read(size=10 * BLOCK + 3)
    reads: list[str] = []
    read.storage.fault = lambda verb, name: reads.append(name) if verb == "read" else None
    random.Random(threads).shuffle(read.checks)
    read.run(threads)
    assert read.memory == read.data
    assert len(reads) == 11, "as many as there are blocks"


@pytest.mark.parametrize("at", [0, 9, 10, 49, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 99])
@pytest.mark.parametrize("harm", ["a bit", "cut"])
def test_a_changed_or_truncated_object_is_detected(at: int, harm: str) -> None:
    read = Read()
    broken = bytearray(read.data if harm == "a bit" else read.data[:at])
    if harm == "a bit":
        broken[at] ^= 4
    read.storage.objects["x"] = bytes(broken)
    with pytest.raises(CheckpointCorrupt, match="x ends after|is wrong" if harm == "cut" else "is wrong"):
        read.run()


MANY = """
import resource, sys
from pathlib import Path
from strata.checkpoint.format.chunk_map import ChunkPlace
from strata.checkpoint.format.digest import digest
from strata.checkpoint.format.entries import ImageRef
from strata.checkpoint.storage.local_storage import LocalStorage
from strata.checkpoint.storage.pipeline import Stored, read_chunks
from strata.checkpoint.storage.sink import put
from strata.checkpoint.restore.verify import Images
import itertools
names = itertools.count()
storage = LocalStorage(Path(sys.argv[1]), nonce=lambda: f"n{next(names)}")
count = int(sys.argv[2])
for n in range(count):
    put(storage, f"f/{n}", bytes([n % 251]) * 4096)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[3]),) * 2)
memory = memoryview(bytearray(count * 4096))
read_chunks(storage, memory, [
    Stored(name=f"f/{n}", offset=0, position=n * 4096, size_bytes=4096,
           digest=digest(bytes([n % 251]) * 4096), complaint=f"{n}")
    for n in range(count)
])
assert all(memory[n * 4096] == memory[n * 4096 + 4095] == n % 251 for n in range(count))
with Images(storage, "f") as images:
    for n in (*range(count), *range(count)):
        place = ChunkPlace(image=ImageRef(folder="f", image=f"{n}", size_bytes=4096), offset=0,
                           size_bytes=4096, digest=digest(bytes([n % 251]) * 4096))
        images.read(place, memoryview(bytearray(4096)), what="x")
"""


@pytest.mark.parametrize("limit", [24, 64])
def test_any_number_of_images_is_read_with_few_open_files(tmp_path: Path, limit: int) -> None:
    """A large world's checkpoint, or an Incremental with many bases, has more images than a process may open."""
    arguments = [str(tmp_path), "100", str(limit)]
    done = subprocess.run([sys.executable, "-c", MANY, *arguments], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_chunks_of_several_objects_come_to_their_places() -> None:
    read = Read()
    read.storage.objects["y"] = b"#" * 7 + bytes(read.data[40:50])
    wanted = [
        replace(check, name="y", offset=7) if check.position == 40 and check.size_bytes else check
        for check in read.checks
    ]
    read.storage.objects["x"] = bytes(read.data[:40]) + b"?" * 10 + bytes(read.data[50:])
    read.checks = wanted
    read.run()
    assert read.memory == read.data
    del read.storage.objects["y"]
    with pytest.raises(CheckpointCorrupt, match="y is missing"):
        read.run()
