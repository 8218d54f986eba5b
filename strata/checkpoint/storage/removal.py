"""Removing a checkpoint's objects: the marker first, so that the remaining objects are no checkpoint any more."""

from __future__ import annotations

from strata.checkpoint.copies.tiers import FarUnreachable
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.storage.sink import Storage
from strata.errors import StorageError


def remove_objects(storage: Storage, folder: str) -> None:
    """Remove marker, manifest, images and the rest of an attempt's folder, in this order.

    May be repeated after an interruption at any point. If the marker cannot be removed, no other object is. If
    another object cannot be removed, the removal of the rest goes on: the first such error is raised at the end,
    with the other errors as notes.
    """
    storage.delete(f"{folder}/{MARKER}")
    names = sorted(
        storage.list(folder), key=lambda name: (name != GLOBAL_NAME, not name.endswith(".safetensors"))
    )
    first_error: StorageError | None = None
    for name in names:
        try:
            storage.delete(f"{folder}/{name}")
        except FarUnreachable:  # the other objects cannot be reached either
            raise
        except StorageError as error:
            if first_error is None:
                first_error = error
            else:
                first_error.add_note(error.message)
    if first_error is not None:
        raise first_error
    storage.delete_folder(folder)
