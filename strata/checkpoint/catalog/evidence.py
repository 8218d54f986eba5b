"""Evidence from storage alone about an attempt's folder: a good checkpoint, a corrupt one, or no checkpoint.

With two storages, the nearest copy that is proven whole counts for both. A checkpoint does not disappear if its copy
with a marker is damaged. If another copy is whole, that copy counts, and the log reports the damage; else the
checkpoint is CORRUPT.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.copies.tiers import copies
from strata.checkpoint.format.manifest import Manifest
from strata.checkpoint.format.marker import committed
from strata.checkpoint.storage.sink import Storage
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointCorrupt

_NAME: Final = re.compile(r"step-([0-9]{12})-gen-([0-9]{6,18})-([A-Za-z0-9][A-Za-z0-9._-]*)\Z")

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class Folder:
    """An attempt's folder, and the fields of its name."""

    name: str
    step: int
    generation: int
    attempt: str

    @staticmethod
    @functools.lru_cache(maxsize=4096)  # a save lists its root several times
    def parse(name: str) -> Folder | None:
        """Return the fields of the name, or None if it is not an attempt's folder."""
        match = _NAME.match(name)
        if match is None:
            return None
        return Folder(name=name, step=int(match[1]), generation=int(match[2]), attempt=match[3])

    @property
    def order(self) -> tuple[int, int]:
        return self.generation, self.step


def folders(names: Iterable[str]) -> list[Folder]:
    """Return the attempts' folders among the names in a storage root."""
    return [found for name in names if (found := Folder.parse(name)) is not None]


def newer_unknown(storage: Storage, folder: str, known: Collection[str], *, most: int = 10) -> list[Folder]:
    """Return the whole checkpoints that are newer than `folder` and whose attempts are not in `known`.

    Return at most the newest `most`, in order. A catalog that was rolled back does not know these checkpoints.
    """
    parent, _, name = folder.rpartition("/")
    this = Folder.parse(name)
    beside = folders(storage.list(parent)) if this is not None else []
    newer = sorted(
        (each for each in beside if this and each.order > this.order and each.attempt not in known),
        key=lambda each: each.order,
    )
    return [
        each for each in newer[-most:] if _is_whole(storage, f"{parent}/{each.name}" if parent else each.name)
    ]


def _is_whole(storage: Storage, folder: str) -> bool:
    try:
        return committed(storage, folder) is not None
    except CheckpointCorrupt:
        return False


def examine(storage: Storage, folder: Folder) -> CheckpointMetadata | None:
    """Return COMMITTED if a copy proves it; else CORRUPT if a marked copy is damaged; None if no copy has a marker.

    If another copy replaces a damaged one, the log names the damaged one.
    """
    found = CheckpointMetadata(
        id=folder.attempt,
        step=folder.step,
        generation=folder.generation,
        path=f"{storage.uri}/{folder.name}",
        state=CheckpointState.CORRUPT,
    )
    damage: list[str] = []
    for copy in copies(storage):
        try:
            proof = _proof(copy, folder)
        except CheckpointCorrupt as error:
            damage.append(error.message)
            continue
        if proof is not None:
            if damage:
                log.warning(
                    "step %d is taken from %s: %s", folder.step, copy.uri, "; of the copy: ".join(damage)
                )
            return _proven(found, *proof)
    return dataclasses.replace(found, reason=damage[0]) if damage else None


def _proof(storage: Storage, folder: Folder) -> tuple[Manifest, str] | None:
    proof = committed(storage, folder.name)
    if proof is not None:
        identity = proof[0].identity
        if (identity.step, identity.generation, identity.attempt) != (
            folder.step,
            folder.generation,
            folder.attempt,
        ):
            raise CheckpointCorrupt(f"{folder.name} holds another checkpoint")
    return proof


def _proven(found: CheckpointMetadata, manifest: Manifest, manifest_digest: str) -> CheckpointMetadata:
    return dataclasses.replace(
        found,
        state=CheckpointState.COMMITTED,
        checkpoint_type=CheckpointType(manifest.identity.type),
        epoch=manifest.identity.epoch,
        size_bytes=manifest.size_bytes,
        model_hash=manifest.model_hash,
        metadata=manifest.metadata,
        manifest_digest=manifest_digest,
        created_unix_ms=manifest.created_unix_ms,
        ranks=manifest.identity.world_size,
        acked=frozenset(range(manifest.identity.world_size)),
        sealed=True,
    )
