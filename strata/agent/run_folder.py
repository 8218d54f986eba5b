"""The temporary folder of one agent. If its owner was killed, the next agent to start on the node removes it.

A process killed by SIGKILL removes nothing. So each owner holds the kernel's lock (flock) on a file in its folder;
the lock ends with the process. The next process to start (the sweeper) removes the folders whose lock it can take.
Owner and sweeper follow these rules:

1. The owner makes the folder, then the file, then takes the lock. It uses the folder only if the file it locked is
   still the one in the folder. Otherwise a sweeper was faster, and the owner makes another folder.
2. A sweeper takes the lock and checks the file in the same way, so it never removes a folder in use.
3. A folder without the file belongs to another program, or its owner was killed during rule 1. The sweeper removes
   such a folder only if it is empty, named like a run folder, and at least a minute old.

A sweeper looks only at folders of its own user and follows no symlink. It skips folders of another host: on a shared
disk, a lock that was taken on another host may be invisible here.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from strata.errors import StorageError

PREFIX: Final = "strata-"
OWNER: Final = "owner"
"""The file that the owner locks; it contains the owner's host name."""
ATTEMPTS: Final = 10
EMPTY_S: Final = 60.0
_OURS: Final = re.compile(rf"{PREFIX}[a-z0-9_]{{8}}\Z")
"""Matches the names that `tempfile.mkdtemp` makes."""


@contextlib.contextmanager
def run_folder() -> Iterator[Path]:
    """Remove the folders of killed processes, then yield a new folder for this process; remove it at the end."""
    sweep(Path(tempfile.gettempdir()))
    folder, lock = _make()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def sweep(place: Path) -> list[Path]:
    """Remove the folders in `place` that killed processes of this user left; return them."""
    try:
        entries = [Path(entry) for entry in os.scandir(place) if _OURS.match(entry.name) and _is_own(entry)]
    except OSError:  # `_make` will probably fail in `place` too, and raise
        return []
    return [folder for folder in entries if _removed(folder)]


def _make() -> tuple[Path, int]:
    for attempts_left in reversed(range(ATTEMPTS)):
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with contextlib.suppress(FileNotFoundError):  # a sweeper was faster
            lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.write(lock, socket.gethostname().encode())
            # on a file system without locks, no sweeper can lock the file either
            if _locked(lock, folder) or not attempts_left:
                return folder, lock
            os.close(lock)
            shutil.rmtree(folder, ignore_errors=True)
    raise StorageError(f"no folder can be made in {tempfile.gettempdir()}: others remove it at once")


def _is_own(entry: os.DirEntry[str]) -> bool:
    try:
        return (
            entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
        )
    except OSError:
        return False


def _removed(folder: Path) -> bool:
    try:
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return _removed_if_empty(folder)
    except OSError:  # a symlink, a socket: not made by an agent
        return False
    try:
        if not stat.S_ISREG(os.fstat(lock).st_mode) or not _locked(lock, folder):
            return False
        if os.pread(lock, 256, 0) != socket.gethostname().encode():
            return False
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()
    finally:
        os.close(lock)


def _removed_if_empty(folder: Path) -> bool:
    try:
        found = folder.lstat()
        if stat.S_IMODE(found.st_mode) != 0o700 or time.time() - found.st_mtime < EMPTY_S:
            return False
        folder.rmdir()
    except OSError:  # the folder is not empty, or another process was faster
        return False
    return True


def _locked(lock: int, folder: Path) -> bool:
    """Take the lock, and tell whether the locked file is still the one in the folder."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(folder / OWNER))
    except FileNotFoundError:
        return False
