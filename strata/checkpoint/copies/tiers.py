"""Two storages as one: a near one that saves write to, and a far one that outlives the host.

An object is read from the near storage, and from the far storage if the near one lacks it or fails. Neither is
trusted: the reader verifies every byte. If the near copy of a checkpoint is corrupt, the reader reads the far storage
alone (`copies`). If both copies are damaged, `strata checkpoints repair` combines them into a whole one.

A checkpoint is written to the near storage and committed there; the copier copies it to the far storage. During a
transient failure of the near storage, a save writes directly to the far one (`save.retry`); `tiers_of` returns both.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

from strata.checkpoint.storage.sink import NotAnObject, ObjectMissing, Sink, Source, Storage
from strata.errors import StorageError

log: Final = logging.getLogger("strata.checkpoint")

_T = TypeVar("_T")


class FarUnreachable(StorageError):
    """The far storage could not be reached, so it is unknown whether it has objects that the near one lacks."""

    code = "FAR_AWAY"


@contextlib.contextmanager
def as_far_error() -> Iterator[None]:
    """Turn errors of the far storage into `FarUnreachable`."""
    try:
        yield
    except (ObjectMissing, NotAnObject):
        raise
    except StorageError as error:
        raise FarUnreachable(error.message, hint=error.hint, transient=error.transient) from error


class TieredStorage:
    """`near` in front of `far`."""

    def __init__(self, near: Storage, far: Storage) -> None:
        self.near = near
        self.far = far

    @property
    def uri(self) -> str:
        return self.near.uri

    # -- writing

    def sink(self, name: str) -> Sink:
        return self.near.sink(name)

    def create_once(self, name: str, data: bytes) -> bool:
        return self.near.create_once(name, data)

    def delete(self, name: str) -> None:
        with as_far_error():
            self.far.delete(name)
        self.near.delete(name)

    def delete_folder(self, folder: str) -> None:
        with as_far_error():
            self.far.delete_folder(folder)
        self.near.delete_folder(folder)

    # -- reading

    def read(self, name: str) -> bytes:
        return nearest(self.near, self.far, lambda storage: storage.read(name), name)

    def source(self, name: str) -> TieredSource:
        return TieredSource(self.near, self.far, name)

    def size(self, name: str) -> int:
        return nearest(self.near, self.far, lambda storage: storage.size(name), name)

    def exists(self, name: str) -> bool:
        if self.near.exists(name):
            return True
        with as_far_error():
            return self.far.exists(name)

    def list(self, folder: str = "") -> list[str]:
        """Return the names in both storages. Raise if either is unreachable: a partial list would mislead."""
        here = self.near.list(folder)
        with as_far_error():
            return sorted({*here, *self.far.list(folder)})

    # -- holds

    def hold(self, name: str) -> None:
        """Hold the object in both storages; if the far storage can be reached, other hosts see the hold there."""
        self.near.hold(name)
        try:
            self.far.create_once(name, self.near.read(name))
            self.far.hold(name)
        except StorageError as error:
            log.warning("%s has no record that %s is in use: %s", self.far.uri, name, error.message)

    def release(self, name: str) -> None:
        self.near.release(name)
        with contextlib.suppress(StorageError):  # if it fails, the hold expires later
            self.far.release(name)

    def is_held(self, name: str) -> bool:
        if self.near.is_held(name):
            return True
        with as_far_error():
            return self.far.is_held(name)


class TieredSource:
    """One object being read from the near storage; after a failure, only from the far one."""

    def __init__(self, near: Storage, far: Storage, name: str) -> None:
        self._far_storage = far
        self._name = name
        self._near_uri = near.uri
        self._opening = threading.Lock()
        self._far: Source | None = None
        self._near = nearest(near, far, lambda storage: storage.source(name), name)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        if self._far is None:
            try:
                return self._near.read_into(offset, buffer)
            except StorageError as error:
                self._turn_to_far(error)
        assert self._far is not None
        return self._far.read_into(offset, buffer)

    def _turn_to_far(self, error: StorageError) -> None:
        with self._opening:
            if self._far is not None:
                return
            if not isinstance(error, ObjectMissing):
                _log_fallback(self._name, self._near_uri, self._far_storage, error)
            try:
                with as_far_error():
                    self._far = self._far_storage.source(self._name)
            except ObjectMissing:
                raise error from None

    def close(self) -> None:
        self._near.close()
        if self._far is not None:
            self._far.close()


def nearest(near: Storage, far: Storage, read: Callable[[Storage], _T], name: str) -> _T:
    """Return the result of `read` for the near storage, or for the far one if the near one fails."""
    try:
        return read(near)
    except StorageError as error:
        if not isinstance(error, ObjectMissing):
            _log_fallback(name, near.uri, far, error)
        try:
            with as_far_error():
                return read(far)
        except ObjectMissing:
            raise error from None


def _log_fallback(name: str, near_uri: str, far: Storage, error: StorageError) -> None:
    log.warning("%s of %s is read from %s: %s", name, near_uri, far.uri, error.message)


def tiers_of(storage: Storage) -> list[Storage]:
    """Return the storages to which saves write, the near one first."""
    return [storage.near, storage.far] if isinstance(storage, TieredStorage) else [storage]


def copies(storage: Storage) -> list[Storage]:
    """Return the storages to try for a read: both (each file from the nearest), then the far one alone."""
    return [storage, storage.far] if isinstance(storage, TieredStorage) else [storage]
