"""Removing a checkpoint's objects: the marker first, so that the rest no longer counts."""

from __future__ import annotations

from strata.checkpoint.manifest import GLOBAL_NAME
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.sink import Storage


def remove_objects(storage: Storage, folder: str) -> None:
    """Remove marker, manifest, images and the rest of an attempt's folder, in this order.

    May be repeated after it was interrupted anywhere.
    """
    storage.delete(f"{folder}/{MARKER}")
    storage.delete(f"{folder}/{GLOBAL_NAME}")
    names = storage.list(folder)
    for name in sorted(names, key=lambda name: not name.endswith(".safetensors")):
        storage.delete(f"{folder}/{name}")
    storage.delete_folder(folder)
