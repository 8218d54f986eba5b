"""Files that somebody else may have put there: opened without waiting, and never read beyond a size.

A pipe would be waited for, a device never ends, and a sparse file of 8 GiB takes 8 GiB of memory: so a file is opened
so that nothing waits, looked at, and read only if it is a regular one that is no larger than it may be. What another
process appends meanwhile counts.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Final

from strata.errors import ConfigError

MAX_PEM_BYTES: Final = 4 << 20
"""A file of certificates, of a key or of a password: the authorities of a whole system take 0.3 MB."""
_LEAST_BYTES: Final = 4096
_NO_FILE: Final = frozenset({errno.ENXIO, errno.ENODEV, errno.ELOOP})
"""How a socket, a device without a driver and a link to itself are refused."""


class NotADocument(ValueError):
    """There is something at the path, and it is no regular file, or a larger one than is read."""


def open_regular(path: Path, flags: int = os.O_RDONLY) -> int:
    """Return a descriptor of a regular file, at once; `NotADocument` for anything else.

    `OSError` as the operating system has it, `IsADirectoryError` for a folder.
    """
    try:
        fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in _NO_FILE:
            raise NotADocument("it is no regular file") from error
        raise
    except ValueError as error:  # a NUL in it, or text that no file system has
        raise NotADocument("its path is none") from error
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
    """Return what a regular file holds; `NotADocument` for anything else, or when that is more. `OSError`."""
    fd = open_regular(path)
    try:
        return read_open(fd, most_bytes=most_bytes)
    finally:
        os.close(fd)


def read_open(fd: int, *, most_bytes: int) -> bytes:
    """Return what there is from the beginning of an open regular file; `NotADocument` when it is more. `OSError`."""
    size_bytes = os.fstat(fd).st_size
    if size_bytes > most_bytes:
        raise NotADocument(f"it has {size_bytes} bytes, and at most {most_bytes} are read")
    pieces: list[bytes] = []
    done = 0
    # one byte more than there should be tells whether it grows; files of /proc say that they have none
    while piece := os.pread(fd, max(size_bytes - done, _LEAST_BYTES) + 1, done):
        pieces.append(piece)
        done += len(piece)
        if done > most_bytes:
            raise NotADocument(f"it has more than the {most_bytes} bytes that are read")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def read_config(
    path: Path, what: str = "", *, most_bytes: int = MAX_PEM_BYTES, private: bool = False
) -> bytes:
    """Return what a configuration file holds; `ConfigError`, naming `what` it is and where, when it cannot be.

    A `private` one is refused when others than its owner can read it.
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
