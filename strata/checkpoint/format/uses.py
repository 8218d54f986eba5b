"""`uses.json`: the attempts to whose images an attempt refers; written to its folder when the attempt begins.

Without coordinators no catalog records references. A process that deletes a checkpoint reads the `uses.json` of
all attempts, including those in progress. The document contains its own digest, because a misread name would let
needed images be deleted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Final

from strata.checkpoint.format.manifest import VERSION, as_corrupt, read_object, read_sealed, sealed
from strata.checkpoint.format.marker import committed, read_manifest, read_marker
from strata.checkpoint.storage.sink import ObjectMissing, Storage, put
from strata.documents.parsing import file_name
from strata.errors import CheckpointCorrupt

NAME: Final = "uses.json"


def write_uses(storage: Storage, folder: str, uses: Collection[str]) -> None:
    """Record that the attempt in `folder` refers to images in the folders `uses`, which have the same parent."""
    body = {"format": "strata-uses", "version": VERSION, "folders": sorted(uses)}
    put(storage, f"{folder}/{NAME}", sealed(body))


def forget_uses(storage: Storage, folder: str) -> None:
    """Remove the record and the folder, which contains nothing else."""
    storage.delete(f"{folder}/{NAME}")
    storage.delete_folder(folder)


def read_uses(storage: Storage, folder: str) -> frozenset[str]:
    """Return the folders to which the attempt in `folder` refers, by its record or its proven manifest.

    `CheckpointCorrupt` if the record is damaged and no proven manifest replaces it.
    """
    name = f"{folder}/{NAME}"
    try:
        body = read_sealed("strata-uses", read_object(storage, name), what=name)
        with as_corrupt(name):
            return frozenset(map(file_name, body["folders"]))
    except ObjectMissing:
        return _of_manifest(storage, folder)
    except CheckpointCorrupt:
        proof = committed(storage, folder)
        if proof is None:
            raise
        return frozenset(proof[0].uses)


def _of_manifest(storage: Storage, folder: str) -> frozenset[str]:
    """Return the references of an attempt without a record (a Full, or the record was lost) from its manifest."""
    with contextlib.suppress(CheckpointCorrupt):  # an attempt that cannot be read needs no images
        marker = read_marker(storage, folder)
        if marker is not None:
            return frozenset(read_manifest(storage, folder, marker.manifest_digest).uses)
    return frozenset()
