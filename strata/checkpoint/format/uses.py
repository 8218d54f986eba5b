"""`uses.json`: the attempts whose images another one uses, said in its folder from its begin on.

Without coordinators there is no catalog to refer in. Whoever deletes a checkpoint looks at what all
attempts say, those under way included. It holds a digest of itself: a name that was misread would
let something go that is needed.
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
    """Say that the attempt in `folder` uses images in these folders beside it."""
    body = {"format": "strata-uses", "version": VERSION, "folders": sorted(uses)}
    put(storage, f"{folder}/{NAME}", sealed(body))


def forget_uses(storage: Storage, folder: str) -> None:
    """Take it back, and the folder with it, which has nothing else yet."""
    storage.delete(f"{folder}/{NAME}")
    storage.delete_folder(folder)


def read_uses(storage: Storage, folder: str) -> frozenset[str]:
    """Return the folders that the attempt in `folder` uses: none, unless it or its proven manifest says so.

    `CheckpointCorrupt` when it says it illegibly, and no manifest that is proven says it either.
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
    """Return what a committed attempt uses that does not say it: a Full nothing; or it was lost."""
    with contextlib.suppress(CheckpointCorrupt):  # then nothing of it can be read, whatever it uses
        marker = read_marker(storage, folder)
        if marker is not None:
            return frozenset(read_manifest(storage, folder, marker.manifest_digest).uses)
    return frozenset()
