"""Two damaged copies of a checkpoint that make one whole: each part is taken from whichever proves it.

A part is a document, or a chunk of 8 MiB. Only where neither copy is whole by itself are parts asked for
here. Nothing is mended in storage.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from strata.checkpoint.sink import NotAnObject, ObjectMissing, Storage
from strata.checkpoint.tiers import TieredStorage, from_afar
from strata.errors import CheckpointCorrupt, StorageError

_T = TypeVar("_T")


class Patchwork(TieredStorage):
    """Both storages, for a reader that proves each part by `proven`."""

    @property
    def uri(self) -> str:
        return f"{self.near.uri} and {self.far.uri} together"


def proven(storage: Storage, read: Callable[[Storage], _T]) -> _T:
    """Return what `read` finds: of a patchwork in the near storage, or in the far one if it proves nothing there.

    `read` raises `CheckpointCorrupt` for what is not as it was saved. Where neither proves anything, the error
    is that of what cannot be read, for it may be good; else of the damage that was found first; else of what
    is missing.
    """
    if not isinstance(storage, Patchwork):
        return read(storage)
    unread: StorageError | None = None
    missing: StorageError | None = None
    damage: CheckpointCorrupt | None = None
    for copy in (storage.near, storage.far):
        try:
            if copy is storage.near:
                return read(copy)
            with from_afar():
                return read(copy)
        except CheckpointCorrupt as error:
            damage = damage or error
        except (ObjectMissing, NotAnObject) as error:
            missing = missing or error
        except StorageError as error:
            unread = unread or error
    try:
        found = unread or damage or missing
        assert found is not None, "each copy returned or raised"
        raise found
    finally:
        unread = damage = missing = found = None  # they lead to this frame, and the frame to what was read


def copies(storage: Storage) -> list[Storage]:
    """Return what to load from, in the order to try: the nearest of each file, all from afar, both together."""
    if not isinstance(storage, TieredStorage):
        return [storage]
    return [storage, storage.far, Patchwork(storage.near, storage.far)]
