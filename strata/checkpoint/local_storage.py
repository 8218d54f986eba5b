"""Objects as files below one folder of a local or shared file system.

A file is written under a temporary name in its final folder, synced, renamed, and its folder is
synced: after a crash at any point the name shows the whole file or none. Folders are synced into
their parents when they are made. `create_once` links the synced temporary file to the name,
because a link, unlike a rename, does not replace. A hold is the kernel's lock on the file (flock),
which ends with the process.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path

from strata.checkpoint.digest import Bytes
from strata.checkpoint.sink import NotAnObject, ObjectMissing, OnStep, checked_name, unobserved
from strata.errors import StorageError

_HINTS = {
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
_TEMPORARY = ".tmp"
_WRITING = frozenset({"create", "write", "begin", "finish"})
"""What makes its own folders: if one cannot be made, it is no object that is missing."""


class LocalStorage:
    """The files below `root`, which need not exist yet.

    `nonce` returns a new random name at each call; temporary files carry it, so that no two
    writers share one.
    """

    def __init__(self, root: Path, *, nonce: Callable[[], str], on_step: OnStep = unobserved) -> None:
        self.root = root.expanduser().absolute()
        self._nonce = nonce
        self._on_step = on_step
        self._durable: set[Path] = set()
        self._holds: dict[str, BufferedReader] = {}

    @property
    def uri(self) -> str:
        return self.root.as_uri()

    # -- writing

    def sink(self, name: str) -> LocalSink:
        path = self._path(name)
        return LocalSink(path, self._temporary(path), ensure=self._ensure_folder, on_step=self._on_step)

    def create_once(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        temporary = self._temporary(path)
        with _as_storage_error("create", path):
            self._ensure_folder(path.parent)
            try:
                with temporary.open("xb") as file:
                    file.write(data)
                    file.flush()
                    self._on_step(f"sync {path.name}")
                    os.fsync(file.fileno())
                self._on_step(f"link {path.name}")
                try:
                    path.hardlink_to(temporary)
                    made = True
                except FileExistsError:
                    made = False
            finally:
                temporary.unlink(missing_ok=True)
            # also when another made it, who may have died before this
            self._on_step(f"sync folder of {path.name}")
            sync_folder(path.parent)
        return made

    def delete(self, name: str) -> None:
        path = self._path(name)
        self._on_step(f"delete {path.name}")
        with _as_storage_error("delete", path):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            sync_folder(path.parent)

    def delete_folder(self, folder: str) -> None:
        path = self._path(folder)
        self._on_step(f"delete folder {path.name}")
        with _as_storage_error("delete", path):
            if not path.is_dir():
                return
            for entry in path.iterdir():
                if entry.name.endswith(_TEMPORARY):
                    entry.unlink(missing_ok=True)
            self._durable.discard(path)
            path.rmdir()
            sync_folder(path.parent)

    # -- reading

    def read(self, name: str) -> bytes:
        path = self._path(name)
        with _as_storage_error("read", path):
            return path.read_bytes()

    def read_into(self, name: str, offset: int, buffer: memoryview) -> int:
        path = self._path(name)
        done = 0
        with _as_storage_error("read", path), path.open("rb", buffering=0) as file:
            while done < len(buffer):
                count = os.preadv(file.fileno(), [buffer[done:]], offset + done)
                if count == 0:
                    break
                done += count
        return done

    def size(self, name: str) -> int:
        path = self._path(name)
        with _as_storage_error("read", path):
            return path.stat().st_size

    def exists(self, name: str) -> bool:
        path = self._path(name)
        with _as_storage_error("read", path):
            return path.exists()

    def list(self, folder: str = "") -> list[str]:
        path = self._path(folder) if folder else self.root
        with _as_storage_error("list", path):
            try:
                names = [entry.name for entry in path.iterdir()]
            except FileNotFoundError:
                return []
        return sorted(name for name in names if not name.endswith(_TEMPORARY))

    # -- holding

    def hold(self, name: str) -> None:
        path = self._path(name)
        with _as_storage_error("hold", path):
            file = path.open("rb")
        # A file system without locks: then nobody can tell, and all count as held.
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)  # at once, but for others who just look whether it is held
        self._holds[name] = file

    def let_go(self, name: str) -> None:
        if (file := self._holds.pop(name, None)) is not None:
            file.close()

    def is_held(self, name: str) -> bool:
        if name in self._holds:
            return True
        path = self._path(name)
        with _as_storage_error("look at", path):
            try:
                file = path.open("rb")
            except FileNotFoundError:
                return False
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    # -- paths

    def _path(self, name: str) -> Path:
        """Return where `name` lies; a link in a folder's place leads nowhere outside of the root.

        The root itself may be one, or lie behind some: whoever chose it knows.
        """
        path = self.root / checked_name(name)
        with _as_storage_error("look at", path):
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
        """Make the folder `path`, at or below the root, durable.

        One that another process has just made is synced into its parent here too, once: that
        process may die before it does.
        """
        if path in self._durable:
            return
        if path == self.root:
            _make_folders(path.parent)
        else:
            self._ensure_folder(path.parent)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        sync_folder(path.parent)
        self._durable.add(path)


class LocalSink:
    """One file on its way to its name."""

    def __init__(
        self, path: Path, temporary: Path, *, ensure: Callable[[Path], None], on_step: OnStep
    ) -> None:
        self._path = path
        self._temporary = temporary
        self._ensure_folder = ensure
        self._on_step = on_step
        self._fd = -1
        self._size_bytes = 0

    def begin(self, size_bytes: int) -> None:
        self._on_step(f"begin {self._path.name}")
        with _as_storage_error("create", self._path):
            self._ensure_folder(self._path.parent)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._fd = os.open(self._temporary, flags, 0o644)
            self._size_bytes = size_bytes
            os.truncate(self._fd, size_bytes)

    def write_at(self, offset: int, chunk: Bytes) -> None:
        view = memoryview(chunk)
        if offset < 0 or offset + len(view) > self._size_bytes:
            raise StorageError(f"{len(view)} bytes at {offset} lie outside of {self._path}")
        self._on_step(f"write {self._path.name}")
        with _as_storage_error("write", self._path):
            while view:
                count = os.pwrite(self._fd, view, offset)
                view, offset = view[count:], offset + count

    def finish(self) -> None:
        with _as_storage_error("write", self._path):
            self._on_step(f"sync {self._path.name}")
            os.fsync(self._fd)
            self._close()
            if self._path.exists():
                raise StorageError(
                    f"{self._path} exists already", hint="two processes write as the same rank"
                )
            self._on_step(f"rename {self._path.name}")
            self._temporary.rename(self._path)
            self._on_step(f"sync folder of {self._path.name}")
            sync_folder(self._path.parent)

    def abort(self) -> None:
        self._close()
        # where a file is in a folder's place there is nothing of ours, and `begin` has said so
        with _as_storage_error("delete", self._temporary), contextlib.suppress(NotADirectoryError):
            self._temporary.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def _make_folders(path: Path) -> None:
    if path.is_dir():
        return
    _make_folders(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir()
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Return once the names in the folder `path` are durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _as_storage_error(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except (FileNotFoundError, NotADirectoryError) as error:
        if verb in _WRITING:
            hint = _HINTS.get(error.errno or 0)
            raise StorageError(f"cannot {verb} {path}: {error.strerror}", hint=hint) from error
        raise ObjectMissing(f"cannot {verb} {path}: {error.strerror}") from error
    except IsADirectoryError as error:
        raise NotAnObject(
            f"cannot {verb} {path}: it is a folder", hint="somebody else made it; move it away"
        ) from error
    except OSError as error:
        hint = _HINTS.get(error.errno or 0)
        raise StorageError(f"cannot {verb} {path}: {error.strerror}", hint=hint) from error
