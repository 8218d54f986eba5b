"""The disk's best throughput, for the checkpoint benchmarks: raw loops of direct I/O.

A few threads transfer 8 MiB a call, from or to huge pages that were touched before. A write goes to a fresh file with
reserved space, and ends with a sync. These loops use no code of the library that is compared with them.
"""

from __future__ import annotations

import mmap
import os
import resource
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

BLOCK_BYTES = 8 << 20
PAGE_BYTES = 4096
THREADS = 3


class Pages:
    """Memory in huge pages, touched if `warm`; `view` begins at a page boundary."""

    def __init__(self, size_bytes: int, *, warm: bool = True) -> None:
        self.map = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self.map)
        for at in range(0, size_bytes if warm else 0, PAGE_BYTES):
            self.map[at] = 1


def raw_write(path: Path, pages: Pages) -> float:
    """Return the seconds of writing `pages`, whose size is a multiple of a block, to a fresh file."""
    size = len(pages.view)
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
    try:
        os.posix_fallocate(fd, 0, size)
        _by_threads(size, lambda at: os.pwrite(fd, pages.view[at : at + BLOCK_BYTES], at))
        os.fsync(fd)
    finally:
        os.close(fd)
    return time.perf_counter() - began


def raw_read(path: Path, pages: Pages) -> float:
    """Return the seconds of reading as many bytes as `pages` hold."""
    began = time.perf_counter()
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        _by_threads(len(pages.view), lambda at: os.preadv(fd, [pages.view[at : at + BLOCK_BYTES]], at))
    finally:
        os.close(fd)
    return time.perf_counter() - began


def _by_threads(size: int, act: Callable[[int], int]) -> None:
    offsets = iter(range(0, size, BLOCK_BYTES))
    lock = threading.Lock()

    def run() -> None:
        while True:
            with lock:
                at = next(offsets, None)
            if at is None:
                return
            if act(at) != min(BLOCK_BYTES, size - at):
                raise OSError("a short transfer")

    threads = [threading.Thread(target=run) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def forget(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache, so that the next read is cold."""
    for each in [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]:
        fd = os.open(each, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def cpu_s() -> float:
    """Return the CPU seconds of this process, including the kernel's for it."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def timed(act: Callable[[], object]) -> float:
    """Return the seconds that a call took."""
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def spread(values: list[float]) -> tuple[float, list[float]]:
    """Return the median and [least, greatest]."""
    return round(statistics.median(values), 3), [round(min(values), 3), round(max(values), 3)]
