"""Files written and read with direct I/O, past the page cache, if the file system allows it.

Direct I/O takes whole pages at aligned addresses. So the partial pages at both ends of a write go through the page
cache; no page is written half directly and half through the cache. Memory that is not aligned is copied through an
aligned buffer. If a file system refuses direct I/O (tmpfs, some overlays and network file systems), all bytes go
through the page cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from strata.checkpoint.format.digest import CHUNK_BYTES, Bytes
from strata.checkpoint.snapshot.memory import PAGE_BYTES, BufferPool, address_of, copy
from strata.checkpoint.storage.sink import NameTaken, NotAnObject, ObjectMissing, OnStep
from strata.checkpoint.storage.transient import of_errno
from strata.documents.reading import NotADocument, open_regular
from strata.errors import StorageError

DIRECT_BYTES: Final = 1 << 20
"""Smaller objects and requests go through the page cache, which is faster for them."""
_HINTS: Final = {
    errno.ENOSPC: "free some space, or keep fewer checkpoints",
    errno.EDQUOT: "the quota is used up; keep fewer checkpoints",
    errno.EROFS: "the file system is read-only",
    errno.EACCES: "check who owns the folder",
    errno.EPERM: "check who owns the folder, and that the file system has hard links",
    errno.EOPNOTSUPP: "the file system has no hard links; choose another for checkpoints",
    errno.EEXIST: "a part of the path is a file; choose another storage path",
    errno.ENOTDIR: "a part of the path is a file; choose another storage path",
    errno.ENAMETOOLONG: "choose a shorter storage path",
    errno.ELOOP: "a link in the path leads to itself",
    errno.EIO: "the device failed; look into the kernel's log",
}
_LASTING: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.EOPNOTSUPP, errno.ENAMETOOLONG, errno.ELOOP}
)
"""Errors about a permission, a name or a setting."""
_WRITING: Final = frozenset({"create", "write", "begin", "finish"})
"""The operations that create folders: their ENOENT means a folder that cannot be created, not a missing object."""
_REFUSED: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""The errors of file systems that do not support an operation."""

C_LIBRARY: Final = ctypes.CDLL(None, use_errno=True)


class _Descriptors:
    """An open file, with a second descriptor for direct I/O; -1 for a descriptor that is not open."""

    _fd = -1
    _direct = -1

    def close(self) -> None:
        """Close both descriptors; harmless when repeated."""
        (fd, self._fd), (direct, self._direct) = (self._fd, -1), (self._direct, -1)
        for each in (direct, fd):
            if each >= 0:
                os.close(each)


class LocalSink(_Descriptors):
    """One file being written. `write_at` may be called by several threads at once.

    If the file's name may not be durable, `finish` removes the name, so that the same writer can begin again. A
    `shared` name is not removed: another process may already know that the file exists.
    """

    def __init__(
        self,
        path: Path,
        temporary: Path,
        *,
        ensure: Callable[[Path], None],
        on_step: OnStep,
        shared: bool = False,
    ) -> None:
        self._shared = shared
        self._path = path
        self._temporary = temporary
        self._ensure_folder = ensure
        self._on_step = on_step
        self._size_bytes = 0
        self._buffers = BufferPool(CHUNK_BYTES)

    def begin(self, size_bytes: int) -> None:
        self._on_step(f"begin {self._path.name}")
        with as_storage_error("create", self._path):
            self._ensure_folder(self._path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._temporary, flags, 0o644)
            self._size_bytes = size_bytes
            if size_bytes < DIRECT_BYTES:
                os.truncate(self._fd, size_bytes)
                return
            # so that a full disk fails here already, and writes into reserved space need not wait for each other
            if not _reserve(self._fd, size_bytes):
                os.truncate(self._fd, size_bytes)
            self._direct = open_direct(self._temporary, os.O_WRONLY)

    def write_at(self, offset: int, chunk: Bytes) -> None:
        view = memoryview(chunk)
        if offset < 0 or offset + len(view) > self._size_bytes:
            raise StorageError(f"{len(view)} bytes at {offset} lie outside of {self._path}")
        self._on_step(f"write {self._path.name}")
        with as_storage_error("write", self._path):
            begin = -offset % PAGE_BYTES
            end = len(view) - (offset + len(view)) % PAGE_BYTES
            if self._direct < 0 or end <= begin:
                _write(self._fd, offset, view)
                return
            _write(self._fd, offset, view[:begin])
            self._write_directly(offset + begin, view[begin:end])
            _write(self._fd, offset + end, view[end:])

    def _write_directly(self, offset: int, pages: memoryview) -> None:
        try:
            if address_of(pages) % PAGE_BYTES == 0:
                _write(self._direct, offset, pages)
                return
            for at in range(0, len(pages), CHUNK_BYTES):
                part = pages[at : at + CHUNK_BYTES]
                with self._buffers.borrow() as aligned:
                    copy(aligned[: len(part)], part)
                    _write(self._direct, offset + at, aligned[: len(part)])
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            _write(self._fd, offset, pages)

    def finish(self) -> None:
        with as_storage_error("write", self._path):
            self._on_step(f"sync {self._path.name}")
            os.fsync(self._fd)
            self.close()
            self._on_step(f"link {self._path.name}")
            try:
                os.link(self._temporary, self._path)  # unlike a rename it does not replace an existing file
            except FileExistsError:
                if not self._path.samefile(self._temporary):  # same file: NFS lost an earlier reply
                    raise NameTaken(
                        f"{self._path} exists already", hint="two processes write as the same rank"
                    ) from None
            try:
                self._temporary.unlink(missing_ok=True)  # NFS may have lost an earlier reply
                self._on_step(f"sync folder of {self._path.name}")
                sync_folder(self._path.parent)
            except OSError:
                if not self._shared:
                    with contextlib.suppress(OSError):
                        self._path.unlink()
                raise

    def abort(self) -> None:
        self.close()
        # If a file has the folder's name, `begin` has raised the error, and this sink has created no file.
        with as_storage_error("delete", self._temporary), contextlib.suppress(NotADirectoryError):
            self._temporary.unlink(missing_ok=True)


class LocalSource(_Descriptors):
    """One file being read. `read_into` may be called by several threads at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with as_storage_error("read", path):
            self._fd = open_regular(path)
            try:
                self._direct = open_direct(path, os.O_RDONLY)
            except OSError:
                os.close(self._fd)
                raise
        self._buffers = BufferPool(CHUNK_BYTES + 2 * PAGE_BYTES)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        with as_storage_error("read", self._path):
            if self._direct < 0 or len(buffer) < DIRECT_BYTES:
                return _read(self._fd, offset, buffer)
            try:
                if offset % PAGE_BYTES == 0 and address_of(buffer) % PAGE_BYTES == 0:
                    return self._read_pages(offset, buffer)
                return self._read_through_buffer(offset, buffer)
            except OSError as error:
                if error.errno not in _REFUSED:
                    raise
                return _read(self._fd, offset, buffer)

    def _read_pages(self, offset: int, buffer: memoryview) -> int:
        """Fill a buffer whose start is page-aligned both in the file and in memory."""
        whole, done = len(buffer) - len(buffer) % PAGE_BYTES, 0
        while done < whole and done % PAGE_BYTES == 0:
            count = os.preadv(self._direct, [buffer[done:whole]], offset + done)
            if count == 0:
                break
            done += count
        return done + _read(self._fd, offset + done, buffer[done:])

    def _read_through_buffer(self, offset: int, buffer: memoryview) -> int:
        done = 0
        while done < len(buffer):
            lead = (offset + done) % PAGE_BYTES
            part = min(len(buffer) - done, CHUNK_BYTES)
            with self._buffers.borrow() as aligned:
                window = -(-(lead + part) // PAGE_BYTES) * PAGE_BYTES
                count = min(self._read_pages(offset + done - lead, aligned[:window]) - lead, part)
                if count > 0:
                    copy(buffer[done : done + count], aligned[lead : lead + count])
                    done += count
            if count < part:
                break
        return done


def _write(fd: int, offset: int, view: memoryview) -> None:
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count


def _read(fd: int, offset: int, buffer: memoryview) -> int:
    """Fill the buffer up to the end of the file; return the number of bytes read."""
    done = 0
    while done < len(buffer):
        count = os.preadv(fd, [buffer[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done


def open_direct(path: Path, flags: int) -> int:
    """Return a descriptor for direct I/O, or -1 if the file system does not support it."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _REFUSED:
            return -1
        raise


def _reserve(fd: int, size_bytes: int) -> bool:
    """Reserve space for the whole file; return False if the file system cannot reserve space.

    `os.posix_fallocate` would write into every block in that case.
    """
    zero, size = ctypes.c_int64(0), ctypes.c_int64(size_bytes)
    while C_LIBRARY.fallocate(fd, 0, zero, size) != 0:
        code = ctypes.get_errno()
        if code in _REFUSED or code == errno.ENOSYS:
            return False
        if code != errno.EINTR:
            raise OSError(code, os.strerror(code))
    return True


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of `path`, or None if `path` does not exist; `OSError` if the system cannot tell.

    `Path.exists` and similar methods return False for some errors, in Python 3.14 for all of them.
    """
    try:
        return os.stat(path)  # noqa: PTH116  # see the docstring
    except (FileNotFoundError, NotADirectoryError):
        return None


def sync_folder(path: Path) -> None:
    """Return once the names in the folder `path` are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def as_storage_error(verb: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into storage errors, with a hint."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        if verb in _WRITING:
            hint = _HINTS.get(error.errno or 0)
            raise StorageError(f"cannot {verb} {path}: {error.strerror}", hint=hint) from error
        raise ObjectMissing(f"cannot {verb} {path}: {error.strerror}") from error
    except (IsADirectoryError, NotADocument) as error:
        found = "it is a folder" if isinstance(error, IsADirectoryError) else error
        raise NotAnObject(
            f"cannot {verb} {path}: {found}", hint="somebody else made it; move it away"
        ) from error
    except OSError as error:
        raise StorageError(
            f"cannot {verb} {path}: {error.strerror}",
            hint=_HINTS.get(error.errno or 0),
            transient=of_errno(error.errno),
            lasting=error.errno in _LASTING,
        ) from error
