"""Where bytes go and come from: `Sink` and `Source` for one object, `Storage` for a folder of them.

Names are relative, with `/` between their parts. An object appears under its name whole and
durable, or not at all. Errors are `StorageError`; `ObjectMissing` when there is no such object, and
`NotAnObject` when there is something else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Protocol

from strata.checkpoint.format.digest import Bytes
from strata.errors import CheckpointCorrupt, CheckpointIncomplete, InvalidArgument, StorageError

OnStep = Callable[[str], None]
"""Told the name of each step before it is taken; whoever listens may end the process there."""


def unobserved(*_: object, **_named: object) -> None:
    """Take no notice of what is told: a step, a block, how far a copy is."""


class ObjectMissing(StorageError):
    """No object has that name."""

    code = "OBJECT_MISSING"


class NotAnObject(StorageError):
    """Something else than an object has that name: a folder, a pipe, or more bytes than any document has."""

    code = "NOT_AN_OBJECT"


class NameTaken(StorageError):
    """A new object's name has one already, which is never replaced."""

    code = "NAME_TAKEN"


class Sink(Protocol):
    """One object being written: begin, any number of write_at, then finish or abort.

    Several threads may call `write_at` at once.
    """

    def begin(self, size_bytes: int) -> None:
        """Prepare to take exactly that many bytes."""
        ...

    def write_at(self, offset: int, chunk: Bytes) -> None:
        """Take bytes for their place; in any order, each place once. Best are chunks, at multiples of their size.

        A read-only view may be borrowed until `finish` or `abort` returns, and must not change
        meanwhile; what is writable is the caller's own again at once.
        """
        ...

    def finish(self) -> None:
        """Return once the object is durable and visible under its name; `NameTaken` when another has that."""
        ...

    def abort(self) -> None:
        """Leave nothing behind. Harmless after `finish` and when repeated."""
        ...


class Source(Protocol):
    """One object being read, by any number of threads at once."""

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Fill `buffer` from `offset` on; return how many bytes there were."""
        ...

    def close(self) -> None:
        """End the reading; harmless when repeated."""
        ...


class Storage(Protocol):
    """A folder of objects, named by `uri`."""

    @property
    def uri(self) -> str: ...

    def sink(self, name: str) -> Sink:
        """Return the sink of a new object."""
        ...

    def create_once(self, name: str, data: bytes) -> bool:
        """Make a small object unless one has that name; tell whether it was made here.

        Of several that try at once, exactly one is told True.
        """
        ...

    def hold(self, name: str) -> None:
        """Keep an object held until `let_go`, or until this process ends, however it does."""
        ...

    def let_go(self, name: str) -> None:
        """End a hold; harmless when there is none."""
        ...

    def is_held(self, name: str) -> bool:
        """Tell whether anybody holds the object, or may: where that cannot be found out."""
        ...

    def read(self, name: str) -> bytes:
        """Return a document whole; `NotAnObject` for what is larger than any is (`documents.parsing`)."""
        ...

    def source(self, name: str) -> Source:
        """Open an object for reading, a large one in parts; `ObjectMissing` now or at the first."""
        ...

    def size(self, name: str) -> int:
        """Return the size of an object in bytes."""
        ...

    def exists(self, name: str) -> bool:
        """Tell whether an object or a folder has that name."""
        ...

    def list(self, folder: str = "") -> list[str]:
        """Return, in order, what lies directly in `folder`; nothing when there is no such folder."""
        ...

    def delete(self, name: str) -> None:
        """Remove an object durably; harmless when there is none."""
        ...

    def delete_folder(self, folder: str) -> None:
        """Remove a folder and what unfinished sinks left in it; finished objects must be gone."""
        ...


def put(storage: Storage, name: str, data: bytes) -> None:
    """Write a small object whose name nobody else uses."""
    write_whole(storage.sink(name), data)


def write_whole(sink: Sink, data: bytes) -> None:
    """Give a sink all of its bytes at once."""
    try:
        sink.begin(len(data))
        sink.write_at(0, data)
        sink.finish()
    finally:
        sink.abort()


@contextlib.contextmanager
def proving(name: str) -> Iterator[None]:
    """Take an object that is not there for a checkpoint that is not whole; one that is none, for a corrupt one."""
    try:
        yield
    except ObjectMissing as error:
        raise CheckpointIncomplete(f"{name} is missing") from error
    except NotAnObject as error:
        raise CheckpointCorrupt(error.message, hint=error.hint) from error


def checked_name(name: str) -> str:
    """Return `name` if it can only mean something below its storage; else `InvalidArgument`."""
    if any(part in {"", ".", ".."} or "\0" in part for part in name.split("/")):
        raise InvalidArgument(f"{name[:200]!r} is no name of an object")
    return name
