"""Memory for direct I/O: aligned, in huge pages, and copied without the interpreter's lock.

The page faults of new memory take several times as long as a copy into it, and pages of 4 KiB halve a device's
throughput. So a block is allocated in huge pages, begins at a huge page's start, and is reused.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.digest import Bytes
from strata.errors import CheckpointError

PAGE_BYTES: Final = 4096
"""Addresses, offsets and lengths of direct I/O are multiples of this, on any device."""
HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_WIPEONFORK: Final = 18
_MADV_KEEPONFORK: Final = 19
_MADV_POPULATE_WRITE: Final = 23
"""Constants of Linux (18 and 19 since 4.14, 23 since 5.14); the mmap module lacks them before Python 3.14."""
_SMALL_BYTES: Final = 64 << 10
"""Below this size a plain copy is faster than releasing the interpreter's lock."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer` from its stable interface."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer: Final = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_Buffer), ctypes.c_int)
_release_buffer: Final = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_Buffer),)
_release_buffer.restype = None
_view_memory: Final = ctypes.pythonapi.PyMemoryView_FromMemory
_view_memory.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_view_memory.restype = ctypes.py_object
_READ_ONLY: Final = 0x100


def address_of(data: Bytes) -> int:
    """Return the address of a contiguous buffer's first byte; the buffer must outlive each use."""
    buffer = _Buffer()
    _get_buffer(data, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a read-only view of memory that another object owns and keeps while the view is used."""
    view: memoryview = _view_memory(address, size_bytes, _READ_ONLY)
    return view


def copy(into: memoryview, data: Bytes) -> None:
    """Copy a contiguous buffer into one of the same size, without the interpreter's lock."""
    size_bytes = len(into)
    if size_bytes < _SMALL_BYTES:
        into[:] = data
        return
    if memoryview(data).nbytes != size_bytes:
        raise ValueError(f"{memoryview(data).nbytes} bytes do not fit into {size_bytes}")
    ctypes.memmove(address_of(into), address_of(data), size_bytes)


def fill(address: int, data: memoryview) -> None:
    """Copy `data` to memory that another object owns, without the interpreter's lock."""
    ctypes.memmove(address, address_of(data), len(data))


def allocate(size_bytes: int, *, inherited: bool) -> memoryview:
    """Return private zeroed memory that begins at a huge page, in huge pages if the kernel has them.

    The size is `size_bytes` rounded up to a multiple of `PAGE_BYTES`. If not `inherited`, a forked child sees zeros.
    The memory stays mapped in the child. Otherwise the child could map other memory at the same addresses, and
    freeing the child's copy of this object would unmap that other memory.
    """
    whole_bytes = -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    lead = HUGE_PAGE_BYTES if whole_bytes >= HUGE_PAGE_BYTES else 0
    try:
        block = mmap.mmap(-1, whole_bytes + lead, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        full = CheckpointError(
            f"there is no memory for {size_bytes} bytes: {error}",
            hint="give the process more memory, or spread the state over more ranks",
        )
        full.lasting = False  # transient: the process that uses the memory now may exit
        raise full from error
    for advice in (_MADV_HUGEPAGE,) if inherited else (_MADV_HUGEPAGE, _MADV_WIPEONFORK):
        with contextlib.suppress(OSError):  # the kernel does not support this advice
            block.madvise(advice)
    view = memoryview(block)
    skip = -address_of(view) % HUGE_PAGE_BYTES if lead else 0
    return view[skip : skip + whole_bytes]


def keep_in_children(block: memoryview) -> None:
    """Let children that are forked from now on inherit a whole block that was allocated as not `inherited`.

    Must not be called while a device writes into the block: if a fork shared the block's pages, the parent's next
    write to a page could move that page, and the device would write to the old page.
    """
    _libc.madvise(address_of(block), len(block), _MADV_KEEPONFORK)


def populate(block: memoryview) -> None:
    """Have the kernel allocate pages for `block` now; a kernel without this call does so at the first access."""
    address = address_of(block)
    begin, end = address - address % PAGE_BYTES, address + len(block)
    _libc.madvise(begin, end - begin, _MADV_POPULATE_WRITE)  # a failure shows at the first access


Pin = Callable[[memoryview], Callable[[], None] | None]
"""Registers memory with a device; returns a function that unregisters it, or None if the device refuses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The last image in an arena, kept after its save: its header, and the digests of each tensor's chunks."""

    header: bytes
    digests: Mapping[str, Sequence[str]]


class Arena:
    """One block of memory, reused and grown to the largest snapshot so far.

    `held` is the image at the arena's beginning, or None; code that writes to the arena must set `held`.
    """

    def __init__(self) -> None:
        self.held: Held | None = None
        self._block: memoryview | None = None
        self._holders = 0
        self._pinned = False
        self._unpin: Callable[[], None] | None = None

    def take(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of the arena's memory; memory taken before must not be used any more."""
        self.take_back()
        if self._block is None or len(self._block) < size_bytes:
            self.release()  # frees the old block before a larger one is allocated
            self._block = allocate(size_bytes, inherited=False)
            self._holders = sys.getrefcount(self._block.obj)
        return self._block[:size_bytes]

    def lend(self, size_bytes: int) -> memoryview:
        """Return `size_bytes` of memory, which stay lent as long as any object references a part of them."""
        block = self.take(size_bytes)
        self.held = None
        whole = memoryview(block.obj)  # this view and all views made from it count as one reference
        skip = address_of(block) - address_of(whole)
        return whole[skip : skip + size_bytes]

    def take_back(self) -> None:
        """Take lent memory back; if an object still references a part of it, leave the block to that object."""
        if self._block is not None and sys.getrefcount(self._block.obj) > self._holders:
            keep_in_children(self._block)
            self.release()

    def prepare(self, size_bytes: int) -> None:
        """Allocate the pages of `size_bytes` of memory now."""
        populate(self.take(size_bytes))

    def pin(self, pin: Pin) -> None:
        """Register the taken memory with a device, unless that was done or refused before."""
        if self._block is not None and not self._pinned:
            self._pinned, self._unpin = True, pin(self._block)

    def release(self) -> None:
        """Free the memory once no object references it any more."""
        if self._unpin is not None:
            self._unpin()
        self._block, self._pinned, self._unpin = None, False, None
        self.held = None


class BufferPool:
    """Reusable work buffers of one size; the pool has as many buffers as were ever in use at the same time."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: deque[memoryview] = deque()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[memoryview]:
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = allocate(self._size_bytes, inherited=False)
        try:
            yield buffer
        finally:
            self._free.append(buffer)
