"""Places of backups: a folder, or a prefix of S3.

A new file is complete before it is visible under its name, and `commit` returns once the file is durable. In a
folder, the file is written under a temporary name, synced and renamed. S3 itself shows an object completely or
not at all. An upload must know the size first, so the data is collected in an unnamed temporary file until
`commit`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Final, Protocol

from strata.checkpoint.storage.local_file import sync_folder
from strata.checkpoint.storage.opening import open_storage
from strata.checkpoint.storage.place import parse_place, scheme_of
from strata.checkpoint.storage.sink import NameTaken, ObjectMissing, Storage
from strata.controlplane.names import temporary
from strata.documents.parsing import NOTE
from strata.documents.reading import NotADocument, open_regular, read_regular
from strata.errors import ConfigError, StorageError

CHUNK_BYTES: Final = 8 << 20
"""The most bytes of a file in memory at a time."""
_FOLDER_HINTS: Final = {
    errno.ENOSPC: "free some space, or lower --keep",
    errno.EDQUOT: "the quota is used up; lower --keep",
    errno.EACCES: "let this user write there",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file",
}

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows progress of a task with a name and a size in bytes. Yields a function to call with the bytes done."""


def unobserved(_what: str, _total_bytes: int) -> AbstractContextManager[Callable[[int], None]]:
    """Show no progress."""
    return contextlib.nullcontext(lambda _count: None)


class NewFile(Protocol):
    """A file that does not have its name yet: any number of `write`, then `commit` or `discard`."""

    def write(self, piece: bytes) -> None:
        """Append bytes."""
        ...

    def commit(self, progress: Progress) -> None:
        """Return once the file is durable and visible under its name; `progress` shows an upload."""
        ...

    def discard(self) -> None:
        """Leave nothing behind. Harmless after `commit` and when repeated."""
        ...


class BackupPlace(Protocol):
    """The files of backups in one place. Every error is a `StorageError`; `uri` has no credentials."""

    @property
    def uri(self) -> str: ...

    def prepare(self) -> None:
        """Return if backups can be stored here, as far as a check before the backup can show; else raise."""
        ...

    def create(self, name: str) -> NewFile:
        """Start a file; `NameTaken` if a file of this name exists."""
        ...

    def names(self) -> list[str]:
        """Return the names of all files in the place, temporary ones included."""
        ...

    def size(self, name: str) -> int:
        """Return the size of a file in bytes."""
        ...

    def read(self, name: str) -> bytes:
        """Return a small file whole."""
        ...

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield a large file in pieces, from its beginning to its end."""
        ...

    def delete(self, name: str) -> None:
        """Remove a file; harmless if there is none."""
        ...


@contextlib.contextmanager
def creating(place: BackupPlace, name: str) -> Iterator[NewFile]:
    """Yield a new file; discard it at the end unless it was committed."""
    file = place.create(name)
    try:
        yield file
    finally:
        file.discard()


def put(place: BackupPlace, name: str, data: bytes) -> None:
    """Write a small file and commit it."""
    with creating(place, name) as file:
        file.write(data)
        file.commit(unobserved)


def open_place(text: str) -> BackupPlace:
    """Return the place that a path or `s3://bucket/prefix` names, without accessing or creating it."""
    if not text:
        raise ConfigError("no place for backups is given", hint="name a folder, or s3://bucket/prefix")
    if (scheme := scheme_of(text)) not in {"", "file", "s3"}:
        raise ConfigError(
            f"backups go to a folder or to S3, not to {scheme}:",
            hint="an object store that speaks S3 has an s3:// path, and AWS_ENDPOINT_URL",
        )
    place = parse_place(text)
    if isinstance(place, Path):
        return FolderPlace(place)
    try:
        return S3BackupPlace(open_storage(place, nonce=lambda: uuid.uuid4().hex))
    except ConfigError as error:
        if not isinstance(error.__cause__, ImportError):
            raise
        raise ConfigError("backups in S3 need boto3 and obstore", hint=error.hint) from error


# -- a folder


@contextlib.contextmanager
def _as_storage_error(verb: str, path: Path) -> Iterator[None]:
    try:
        yield
    except NotADocument as error:
        raise StorageError(f"cannot {verb} {path}: {error}") from error
    except FileNotFoundError as error:
        if verb in {"read", "look at"}:
            raise ObjectMissing(f"cannot {verb} {path}: {error.strerror}") from error
        hint = "make the folder above it first" if verb == "make" else None
        raise StorageError(f"cannot {verb} {path}: {error.strerror}", hint=hint) from error
    except OSError as error:
        hint = _FOLDER_HINTS.get(error.errno or 0)
        raise StorageError(f"cannot {verb} {path}: {error.strerror}", hint=hint) from error


class FolderPlace:
    """The files directly in `folder`, readable by their owner alone, since they hold etcd's password hashes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def uri(self) -> str:
        return self.folder.as_uri()

    def prepare(self) -> None:
        """Make the folder, but none above it: a missing folder above is probably a file system that is not mounted."""
        with _as_storage_error("make", self.folder):
            if not self.folder.is_dir():
                self.folder.mkdir(mode=0o700)
                sync_folder(self.folder.parent)
        self.names()

    def create(self, name: str) -> FolderFile:
        return FolderFile(self.folder / name)

    def names(self) -> list[str]:
        with _as_storage_error("list", self.folder):
            return sorted(os.listdir(self.folder))  # noqa: PTH208  # only names are needed

    def size(self, name: str) -> int:
        path = self.folder / name
        with _as_storage_error("look at", path):
            return path.stat().st_size

    def read(self, name: str) -> bytes:
        path = self.folder / name
        with _as_storage_error("read", path):
            return read_regular(path, most_bytes=NOTE.size_bytes)

    def pieces(self, name: str) -> Iterator[bytes]:
        path = self.folder / name
        with _as_storage_error("read", path), os.fdopen(open_regular(path), "rb", buffering=0) as file:
            while piece := file.read(CHUNK_BYTES):
                yield piece

    def delete(self, name: str) -> None:
        path = self.folder / name
        with _as_storage_error("remove", path):
            path.unlink(missing_ok=True)
            sync_folder(self.folder)


class FolderFile:
    """A new file at `path`. Its temporary name is a lock: only the process that created it renames it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = path.with_name(temporary(path.name))
        self._committed = False
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with _as_storage_error("create", self._temporary):
            try:
                fd = os.open(self._temporary, flags, 0o600)
            except FileExistsError:
                raise NameTaken(f"{path} is being written by another process") from None
        self._file = os.fdopen(fd, "wb", buffering=0)
        if os.path.lexists(path):
            self.discard()
            raise NameTaken(f"{path} exists already")

    def write(self, piece: bytes) -> None:
        view = memoryview(piece)
        with _as_storage_error("write", self._temporary):
            while view:
                view = view[self._file.write(view) :]

    def commit(self, progress: Progress) -> None:
        with _as_storage_error("write", self._path):
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.rename(self._path)
            self._committed = True
            try:
                sync_folder(self._path.parent)
            except OSError:
                # the file's name may not survive a crash, and a backup that may lack a file must not count
                with contextlib.suppress(OSError):
                    self._path.unlink()
                raise

    def discard(self) -> None:
        self._file.close()
        if self._committed:
            return
        with _as_storage_error("remove", self._temporary):
            self._temporary.unlink(missing_ok=True)


# -- S3


class S3BackupPlace:
    """A checkpoint storage in S3, used for files of backups."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage

    @property
    def uri(self) -> str:
        return self._storage.uri

    def prepare(self) -> None:
        """Send one request to the server, which reveals a missing bucket and wrong credentials."""
        self.names()

    def create(self, name: str) -> S3File:
        if self._storage.exists(name):
            raise NameTaken(f"{self.uri}/{name} exists already")
        return S3File(self._storage, name)

    def names(self) -> list[str]:
        return self._storage.list()

    def size(self, name: str) -> int:
        return self._storage.size(name)

    def read(self, name: str) -> bytes:
        return self._storage.read(name)

    def pieces(self, name: str) -> Iterator[bytes]:
        size = self._storage.size(name)
        source = self._storage.source(name)
        try:
            buffer = bytearray(min(CHUNK_BYTES, size))
            offset = 0
            while offset < size:
                count = source.read_into(offset, memoryview(buffer)[: min(CHUNK_BYTES, size - offset)])
                if count == 0:
                    return
                yield bytes(memoryview(buffer)[:count])
                offset += count
        finally:
            source.close()

    def delete(self, name: str) -> None:
        self._storage.delete(name)


class S3File:
    """A file that is collected in an unnamed temporary file, and uploaded by `commit`."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        with _as_temporary_error():
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="strata-backup-")  # noqa: SIM115  # `discard` closes it

    def write(self, piece: bytes) -> None:
        with _as_temporary_error():
            self._file.write(piece)

    def commit(self, progress: Progress) -> None:
        with _as_temporary_error():
            size = self._file.tell()
            self._file.seek(0)
        sink = self._storage.sink(self._name)
        try:
            sink.begin(size)
            with progress("uploading", size) as advance:
                for offset in range(0, size, CHUNK_BYTES):
                    with _as_temporary_error():
                        piece = self._file.read(CHUNK_BYTES)
                    sink.write_at(offset, piece)
                    advance(len(piece))
                sink.finish()
        finally:
            sink.abort()

    def discard(self) -> None:
        self._file.close()


@contextlib.contextmanager
def _as_temporary_error() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"cannot keep the snapshot in {tempfile.gettempdir()} before it is uploaded: {error.strerror}",
            hint="set TMPDIR to a folder that has space for etcd's whole database",
        ) from error
