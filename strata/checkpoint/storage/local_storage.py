"""Objects as files below one folder of a local or shared file system.

A file is written in four steps: 1. write it under a temporary name in its final folder, 2. sync it, 3. link it to its
name, 4. sync the folder. So after a crash at any point the name has the whole file or does not exist; and a link,
unlike a rename, does not replace an existing file. A new folder is synced into its parent when it is made.

A hold is the kernel's lock on the file (flock), which ends with the process. On NFS, flock becomes a lock of all
bytes at the server, and an exclusive lock needs a descriptor open for writing. So on NFS a hold opens the file for
writing but never writes. On other file systems a hold opens the file for reading, so that a disk can be remounted
read-only.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from strata.checkpoint.storage.local_file import (
    LocalSink,
    LocalSource,
    as_storage_error,
    status_of,
    sync_folder,
)
from strata.checkpoint.storage.sink import NameTaken, OnStep, checked_name, unobserved, write_whole
from strata.documents.parsing import MAX_DOCUMENT_BYTES
from strata.documents.reading import open_regular, read_regular
from strata.errors import StorageError

_TEMPORARY = ".tmp"
_NO_LOCKS = frozenset({errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS})
"""The errors of file systems without locks, and of NFS 3 if its lock service does not answer."""
_HELD = frozenset({errno.EWOULDBLOCK, errno.EACCES})


class LocalStorage:
    """The files below `root`, which need not exist yet.

    `nonce` returns a new random name at each call, for temporary files: no two writers share a temporary file.
    """

    def __init__(self, root: Path, *, nonce: Callable[[], str], on_step: OnStep = unobserved) -> None:
        self.root = root.expanduser().absolute()
        self._nonce = nonce
        self._on_step = on_step
        self._durable: set[Path] = set()
        self._holds: dict[str, BinaryIO] = {}

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    # -- writing

    def sink(self, name: str) -> LocalSink:
        return self._sink(self._path(name), shared=False)

    def _sink(self, path: Path, *, shared: bool) -> LocalSink:
        return LocalSink(
            path, self._temporary(path), ensure=self._ensure_folder, on_step=self._on_step, shared=shared
        )

    def create_once(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        try:
            write_whole(self._sink(path, shared=True), data)
        except NameTaken:
            self._on_step(f"sync folder of {path.name}")
            with as_storage_error("create", path):
                sync_folder(
                    path.parent
                )  # the process that created the object may have died before it synced the folder
            return False
        return True

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._on_step(f"delete {path.name}")
        with as_storage_error("delete", path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            sync_folder(path.parent)

    def delete_folder(self, folder: str) -> None:
        path = self._path(folder)
        self._on_step("delete folder")
        with as_storage_error("delete", path):
            if not _is_folder(path):
                return
            first_error: OSError | None = None
            for entry in path.iterdir():
                if entry.name.endswith(_TEMPORARY):
                    try:
                        entry.unlink(missing_ok=True)
                    except OSError as error:  # the loop still removes the others
                        first_error = first_error or error
            if first_error is not None:
                raise first_error
            self._durable.discard(path)
            path.rmdir()
            sync_folder(path.parent)

    # -- reading

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with as_storage_error("read", path):
            return read_regular(path, most_bytes=MAX_DOCUMENT_BYTES)

    def source(self, name: str) -> LocalSource:
        return LocalSource(self._path(name))

    def size(self, name: str) -> int:
        path = self._path(name)
        with as_storage_error("read", path):
            return path.stat().st_size

    def exists(self, name: str) -> bool:
        path = self._path(name)
        with as_storage_error("read", path):
            return status_of(path) is not None

    def list(self, folder: str = "") -> list[str]:
        path = self._path(folder) if folder else self.root
        with as_storage_error("list", path):
            try:
                names = os.listdir(path)  # noqa: PTH208  # a root may have thousands of names, and no `Path` is needed
            except FileNotFoundError:
                return []
        return sorted(name for name in names if not name.endswith(_TEMPORARY))

    # -- holds

    def hold(self, name: str) -> None:
        path = self._path(name)
        with as_storage_error("hold", path):
            file = self._locked(path, os.O_RDONLY) or self._locked(path, os.O_RDWR)
        if file is not None:
            self._holds[name] = file

    @staticmethod
    def _locked(path: Path, flags: int) -> BinaryIO | None:
        """Return the locked file; None if the lock needs a descriptor for writing and `flags` is read-only."""
        file = _opened(path, flags)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits only for processes in `is_held`, which lock for a moment
        except OSError as error:
            if error.errno not in _NO_LOCKS:  # without locks, `is_held` is always true
                file.close()
                if error.errno == errno.EBADF and flags == os.O_RDONLY:
                    return None
                raise
        return file

    def release(self, name: str) -> None:
        if (file := self._holds.pop(name, None)) is not None:
            file.close()

    def is_held(self, name: str) -> bool:
        if name in self._holds:
            return True
        path = self._path(name)
        with as_storage_error("look at", path):
            try:
                file = _opened(path, os.O_RDONLY)
            except FileNotFoundError:
                return False
        with file, as_storage_error("look at", path):
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in _NO_LOCKS or error.errno in _HELD:
                    return True
                raise
        return False

    # -- paths

    def _path(self, name: str) -> Path:
        """Return the path of `name`; `StorageError` if a symbolic link in the path leads outside the root.

        The root itself may be a link, or be reached through links: the user chose it.
        """
        path = self.root / checked_name(name)
        with as_storage_error("look at", path):
            inside = os.path.realpath(path.parent)
            root = os.path.realpath(self.root)
        if os.path.commonpath((inside, root)) != root:
            raise StorageError(
                f"{path} lies outside of {self.root}: {inside}",
                hint="put the folder itself in the place of the link, or mount it there",
            )
        return path

    def _temporary(self, path: Path) -> Path:
        return path.with_name(f".{path.name}.{self._nonce()}{_TEMPORARY}")

    def _ensure_folder(self, path: Path) -> None:
        """Create the folder `path` durably.

        If another process has created a folder at or below the root, this process syncs that folder into its parent
        once, too: the other process may die before its own sync.
        """
        if path in self._durable or (not path.is_relative_to(self.root) and _is_folder(path)):
            return
        self._ensure_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        sync_folder(path.parent)
        self._durable.add(path)


def _opened(path: Path, flags: int) -> BinaryIO:
    """Return a regular file for locking; its contents are not read."""
    fd = open_regular(path, flags)
    return os.fdopen(fd, "rb" if flags == os.O_RDONLY else "r+b")


def _is_folder(path: Path) -> bool:
    found = status_of(path)
    return found is not None and stat.S_ISDIR(found.st_mode)
