"""Removing a checkpoint's objects: the marker first, so that the rest no longer counts."""

from __future__ import annotations

from strata.checkpoint.copies.tiers import FarAway
from strata.checkpoint.format.manifest import GLOBAL_NAME
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.storage.sink import Storage
from strata.errors import StorageError


def remove_objects(storage: Storage, folder: str) -> None:
    """Remove marker, manifest, images and the rest of an attempt's folder, in this order.

    May be repeated after it was interrupted anywhere. While the marker cannot be removed all stays;
    else what cannot be keeps nothing else from going: the first such error is raised at the end, with
    the others noted in it.
    """
    storage.delete(f"{folder}/{MARKER}")
    names = sorted(
        storage.list(folder), key=lambda name: (name != GLOBAL_NAME, not name.endswith(".safetensors"))
    )
    trouble: StorageError | None = None
    for name in names:
        try:
            storage.delete(f"{folder}/{name}")
        except FarAway:  # so are the others
            raise
        except StorageError as error:
            if trouble is None:
                trouble = error
            else:
                trouble.add_note(error.message)
    if trouble is not None:
        raise trouble
    storage.delete_folder(folder)
