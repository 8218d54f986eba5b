"""What each rank saved under one key: of the ranks' manifests alone, without their images."""

from __future__ import annotations

from collections.abc import Sequence

from strata.checkpoint.marker import read_manifest, read_rank_manifests
from strata.checkpoint.sink import Storage
from strata.checkpoint.state import Json, children


def texts_of_ranks(
    storage: Storage, folder: str, *, manifest_digest: str, path: Sequence[str]
) -> dict[int, str]:
    """Return the text that each rank had at `path`, key below key; ranks without one are absent.

    `CheckpointCorrupt` when a manifest differs from what was committed.
    """
    manifest = read_manifest(storage, folder, manifest_digest)
    found = {}
    for part in read_rank_manifests(storage, folder, manifest):
        value = _at(part.tree, path)
        if isinstance(value, str):
            found[part.rank] = value
    return found


def _at(tree: Json, path: Sequence[str]) -> Json:
    for key in path:
        tree = dict(children(tree) or ()).get(key)
    return tree
