"""Bounded reading of files that another user may have written: opened without blocking, read up to a size limit.

Opening a pipe blocks, reading a device never ends, and reading a sparse file of 8 GiB takes 8 GiB of memory. So a
file is opened without blocking, and read only if it is a regular file within the size limit. Bytes that another
process appends meanwhile count towards the limit.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from strata.errors import ConfigError

MAX_PEM_BYTES: Final = 4 << 20
"""The limit for a file of certificates, a key or a password: all authorities of an operating system take 0.3 MB."""
_LEAST_BYTES: Final = 4096
_NO_FILE: Final = frozenset({errno.ENXIO, errno.ENODEV, errno.ELOOP})
"""The error codes of opening a socket, a device without a driver, or a symlink to itself."""


class NotADocument(ValueError):
    """The path is not a regular file, or the file exceeds the size limit."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file without blocking; raise `NotADocument` for anything else.

    `OSError` from the operating system is passed on; a folder raises `IsADirectoryError`.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotADocument("it is no regular file") from error
        raise
    except ValueError as error:  # a NUL in the path, or text that cannot be encoded
        raise NotADocument("its path is not valid") from error
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(mode):
            raise NotADocument("it is no regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_regular(path: Path, *, most_bytes: int) -> bytes:
    """Return a regular file's content; raise `NotADocument` for anything else or a larger file, or `OSError`."""
    fd = open_regular(path)
    try:
        return read_open(fd, most_bytes=most_bytes)
    finally:
        os.close(fd)


def read_open(fd: int, *, most_bytes: int) -> bytes:
    """Return an open regular file's content from its beginning; raise `NotADocument` if it is larger, or `OSError`."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes > most_bytes:
        raise NotADocument(f"it has {size_bytes} bytes, and at most {most_bytes} are read")
    pieces: list[bytes] = []
    done = 0
    # One byte more than the size reveals a file that grows. Files of /proc report a size of 0.
    while piece := os.pread(fd, max(size_bytes - done, _LEAST_BYTES) + 1, done):
        pieces.append(piece)
        done += len(piece)
        if done > most_bytes:
            raise NotADocument(f"it has more than the {most_bytes} bytes that are read")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_config(
    path: Path, what: str = "", *, most_bytes: int = MAX_PEM_BYTES, private: bool = False
) -> bytes:
    """Return a configuration file's content; raise `ConfigError` with `what` and the path if it cannot be read.

    A `private` file is refused if users other than its owner can read it.
    """
    named = f"{what} {path}".lstrip()
    try:
        fd = open_regular(path)
        try:
            mode = stat.S_IMODE(os.fstat(fd).st_mode)
            if private and mode & 0o077:
                raise ConfigError(
                    f"{named} can be read by others: its mode is {mode:04o}", hint=f"chmod 600 {path}"
                )
            return read_open(fd, most_bytes=most_bytes)
        finally:
            os.close(fd)
    except NotADocument as error:
        raise ConfigError(f"cannot read {named}: {error}", hint="name a regular file") from None
    except OSError as error:
        raise ConfigError(
            f"cannot read {named}: {error.strerror}", hint="check its path and its owner"
        ) from None
