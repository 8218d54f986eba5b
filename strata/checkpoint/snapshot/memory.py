"""Memory that direct I/O takes: aligned, in huge pages, and copied without the interpreter's lock.

Fresh memory costs several times its copy in page faults, and pages of 4 KiB halve what a device
gives: so a block is asked for in huge pages, begins at one, and is used again and again.
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
"""What addresses, offsets and lengths of direct I/O are multiples of, on any device."""
HUGE_PAGE_BYTES: Final = 2 << 20
_MADV_HUGEPAGE: Final = 14
_MADV_WIPEONFORK: Final = 18
_MADV_KEEPONFORK: Final = 19
_MADV_POPULATE_WRITE: Final = 23
"""Of Linux, the last three of 4.14 and 5.14: the mmap module has no names for them before Python 3.14."""
_SMALL_BYTES: Final = 64 << 10
"""Below this a plain copy is quicker than leaving the interpreter's lock."""

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class _Buffer(ctypes.Structure):
    """CPython's `Py_buffer`, of its stable interface."""

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
    """Return where the bytes of a contiguous buffer begin; good as long as the buffer is."""
    buffer = _Buffer()
    _get_buffer(data, ctypes.byref(buffer), 0)
    try:
        return int(buffer.buf or 0)
    finally:
        _release_buffer(ctypes.byref(buffer))


def memory_at(address: int, size_bytes: int) -> memoryview:
    """Return a read-only view of memory that somebody else owns, and keeps while the view is used."""
    view: memoryview = _view_memory(address, size_bytes, _READ_ONLY)
    return view


def copy(into: memoryview, data: Bytes) -> None:
    """Copy a contiguous buffer into one of its size; other threads run meanwhile."""
    size_bytes = len(into)
    if size_bytes < _SMALL_BYTES:
        into[:] = data
        return
    if memoryview(data).nbytes != size_bytes:
        raise ValueError(f"{memoryview(data).nbytes} bytes do not fit into {size_bytes}")
    ctypes.memmove(address_of(into), address_of(data), size_bytes)


def fill(address: int, data: memoryview) -> None:
    """Copy `data` to memory that somebody else owns; other threads run meanwhile."""
    ctypes.memmove(address, address_of(data), len(data))


def allocate(size_bytes: int, *, inherited: bool) -> memoryview:
    """Return private zeroed memory from the start of a huge page on, in such where there are any.

    It has room up to the next multiple of `PAGE_BYTES`. What is not `inherited` is empty in a
    forked child. It is not left out of the child: at its addresses other memory could lie there then,
    which the end of the child's copy of this object would unmap.
    """
    room = -(-max(size_bytes, 1) // PAGE_BYTES) * PAGE_BYTES
    lead = HUGE_PAGE_BYTES if room >= HUGE_PAGE_BYTES else 0
    try:
        block = mmap.mmap(-1, room + lead, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        full = CheckpointError(
            f"there is no memory for {size_bytes} bytes: {error}",
            hint="give the process more memory, or spread the state over more ranks",
        )
        full.lasting = False  # who holds it now may end
        raise full from error
    for advice in (_MADV_HUGEPAGE,) if inherited else (_MADV_HUGEPAGE, _MADV_WIPEONFORK):
        with contextlib.suppress(OSError):  # a kernel without it
            block.madvise(advice)
    view = memoryview(block)
    skip = -address_of(view) % HUGE_PAGE_BYTES if lead else 0
    return view[skip : skip + room]


def keep_in_children(block: memoryview) -> None:
    """Let children that are forked from now on have a copy of a whole block that was not inherited.

    While a device writes into memory, a fork must not share it: the parent's next touch could move
    its page away from under the device.
    """
    _libc.madvise(address_of(block), len(block), _MADV_KEEPONFORK)


def populate(block: memoryview) -> None:
    """Have the kernel put pages behind `block` now; a kernel that cannot does so at the first touch."""
    address = address_of(block)
    begin, end = address - address % PAGE_BYTES, address + len(block)
    _libc.madvise(begin, end - begin, _MADV_POPULATE_WRITE)  # advice: what it fails of comes later


Pin = Callable[[memoryview], Callable[[], None] | None]
"""Makes memory known to a device; returns how to undo that, or None when it is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """An image that still lies in an arena: its header, and the digests of each tensor's chunks."""

    header: bytes
    digests: Mapping[str, Sequence[str]]


class Arena:
    """One block of memory that grows to the largest snapshot it had to hold.

    `held` is what lies at its beginning, if that is known: whoever writes there says so.
    """

    def __init__(self) -> None:
        self.held: Held | None = None
        self._block: memoryview | None = None
        self._holders = 0
        self._pinned = False
        self._unpin: Callable[[], None] | None = None

    def take(self, size_bytes: int) -> memoryview:
        """Return that much memory; what was taken before must not be used any more."""
        self.take_back()
        if self._block is None or len(self._block) < size_bytes:
            self.release()  # given back before more is asked for
            self._block = allocate(size_bytes, inherited=False)
            self._holders = sys.getrefcount(self._block.obj)
        return self._block[:size_bytes]

    def lend(self, size_bytes: int) -> memoryview:
        """Return that much memory for as long as anybody holds any of it."""
        block = self.take(size_bytes)
        self.held = None
        whole = memoryview(block.obj)  # it and all that is made of it count as one holder
        skip = address_of(block) - address_of(whole)
        return whole[skip : skip + size_bytes]

    def take_back(self) -> None:
        """Have what was lent for oneself again; leave it to whoever still holds any of it."""
        if self._block is not None and sys.getrefcount(self._block.obj) > self._holders:
            keep_in_children(self._block)
            self.release()

    def prepare(self, size_bytes: int) -> None:
        """Have pages behind that much memory now."""
        populate(self.take(size_bytes))

    def pin(self, pin: Pin) -> None:
        """Make what was taken known to a device, unless it is already, or that was refused."""
        if self._block is not None and not self._pinned:
            self._pinned, self._unpin = True, pin(self._block)

    def release(self) -> None:
        """Give the memory back, as soon as nobody uses it any more."""
        if self._unpin is not None:
            self._unpin()
        self._block, self._pinned, self._unpin = None, False, None
        self.held = None


class BufferPool:
    """Blocks of one size to work in for a moment, used again; as many as threads need at once."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._free: deque[memoryview] = deque()

    @contextlib.contextmanager
    def room(self) -> Iterator[memoryview]:
        try:
            room = self._free.pop()
        except IndexError:
            room = allocate(self._size_bytes, inherited=False)
        try:
            yield room
        finally:
            self._free.append(room)
