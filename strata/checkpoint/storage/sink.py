"""The storage protocols: `Sink` and `Source` for one object, `Storage` for a folder of objects.

Names are relative, with `/` between their parts. An object appears under its name whole and durable, or not at all.
Errors are `StorageError`; `ObjectMissing` if there is no such object, `NotAnObject` if the name is not an object's
(a folder's, for example).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from strata.checkpoint.format.digest import Bytes
from strata.errors import CheckpointCorrupt, CheckpointIncomplete, InvalidArgument, StorageError

OnStep = Callable[[str], None]
"""Called with the name of each step before the step; a test may end the process at that step."""


def unobserved(*_: object, **_named: object) -> None:
    """Ignore a notification: of a step, of a block, of a copy's progress."""


class ObjectMissing(StorageError):
    """No object has that name."""

    code = "OBJECT_MISSING"


class NotAnObject(StorageError):
    """The name is not an object's: it is a folder, a pipe, or a file with more bytes than any document has."""

    code = "NOT_AN_OBJECT"


class NameTaken(StorageError):
    """The name of a new object is taken; an existing object is never replaced."""

    code = "NAME_TAKEN"


class Sink(Protocol):
    """One object being written: begin, any number of write_at, then finish or abort.

    Several threads may call `write_at` at once.
    """

    def begin(self, size_bytes: int) -> None:
        """Prepare to take exactly that many bytes."""
        ...

    def write_at(self, offset: int, chunk: Bytes) -> None:
        """Write bytes at their offset, in any order, each offset once; chunks at multiples of their size are fastest.

        The sink may borrow a read-only view until `finish` or `abort` returns; the caller must not change the memory
        until then. If the memory is writable, the caller may change it when this call returns.
        """
        ...

    def finish(self) -> None:
        """Return once the object is durable and visible under its name; `NameTaken` if another object has that name."""
        ...

    def abort(self) -> None:
        """Remove all remains of an unfinished object. Harmless after `finish` and when repeated."""
        ...


class Source(Protocol):
    """One object being read, by any number of threads at once."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` on; return the number of bytes read."""
        ...

    def close(self) -> None:
        """Close the object; harmless when repeated."""
        ...


class Storage(Protocol):
    """A folder of objects, named by `uri`."""

    @property
    def uri(self) -> str: ...

    def sink(self, name: str) -> Sink:
        """Return the sink of a new object."""
        ...

    def create_once(self, name: str, data: bytes) -> bool:
        """Create a small object unless it exists; return whether this call created it.

        Of several concurrent calls, exactly one returns True.
        """
        ...

    def hold(self, name: str) -> None:
        """Hold an object until `release` or the exit of this process; other processes see the hold by `is_held`."""
        ...

    def release(self, name: str) -> None:
        """End a hold; harmless without a hold."""
        ...

    def is_held(self, name: str) -> bool:
        """Return whether a process holds the object; True if the storage cannot tell."""
        ...

    def read(self, name: str) -> bytes:
        """Return a whole document; `NotAnObject` if it is larger than any document (`documents.parsing`)."""
        ...

    def source(self, name: str) -> Source:
        """Open an object for reading in parts; `ObjectMissing` is raised here or at the first read."""
        ...

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        ...

    def exists(self, name: str) -> bool:
        """Return whether an object or a folder has that name."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Return the sorted names directly in `folder`; none if there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object durably; harmless when there is none."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and the remains of unfinished sinks in it; the caller must remove finished objects first."""
        ...


def put(storage: Storage, name: str, data: bytes) -> None:
    """Write a small object whose name no other writer uses."""
    write_whole(storage.sink(name), data)


def write_whole(sink: Sink, data: bytes) -> None:
    """Write all bytes of an object in one call."""
    try:
        sink.begin(len(data))
        sink.write_at(0, data)
        sink.finish()
    finally:
        sink.abort()


@contextlib.contextmanager
def proving(name: str) -> Iterator[None]:
    """Turn `ObjectMissing` into `CheckpointIncomplete`, and `NotAnObject` into `CheckpointCorrupt`."""
    try:
        yield
    except ObjectMissing as error:
        raise CheckpointIncomplete(f"{name} is missing") from error
    except NotAnObject as error:
        raise CheckpointCorrupt(error.message, hint=error.hint) from error


def checked_name(name: str) -> str:
    """Return `name` if it cannot lead outside its storage; else raise `InvalidArgument`."""
    if any(part in {"", ".", ".."} or "\0" in part for part in name.split("/")):
        raise InvalidArgument(f"{name[:200]!r} is no name of an object")
    return name
