"""A load by DCP that finds damage: the coordinators are told, and the error names what to load instead.

DCP fills the state while it reads, on all ranks, so no other step is taken by itself in the middle of a load.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.marker import read_manifest, read_rank_manifests
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.restore import Loading
from strata.client.checkpoints.root import OpenRoot
from strata.errors import CheckpointCorrupt, CheckpointIncomplete, StrataError

_T = TypeVar("_T")

_HINT: Final = "put the damaged file back from a copy"

log: Final = logging.getLogger("strata.checkpoint")


def proven(root: OpenRoot, checkpoint: CheckpointMetadata, read: Callable[[Storage], _T]) -> _T:
    """Return what `read` finds of a checkpoint, as `Loading.proven` does.

    The error of damage names the newest step before whose manifests are proven; its data is proven when it is loaded.
    """

    def begins() -> bool:
        """Tell whether this world begins from it, and has saved nothing yet."""
        catalog = root.catalog
        if isinstance(catalog, LocalCatalog):
            return False
        point = catalog.restore_point()
        return point is not None and point.id == checkpoint.id and catalog.look(checkpoint).latest

    try:
        return Loading(root).proven(checkpoint, read, begins=begins)
    except CheckpointIncomplete:
        raise
    except CheckpointCorrupt as error:
        raise corrupt(root, checkpoint, error.message) from error


def corrupt(root: OpenRoot, checkpoint: CheckpointMetadata, why: str) -> CheckpointCorrupt:
    """Return the error of a checkpoint that is damaged, which names the step before."""
    try:
        hint = _step_before(root, checkpoint)
    except StrataError as other:
        hint = f"which step before it is good is not known: {other.message}; {_HINT}"
    return CheckpointCorrupt(f"step {checkpoint.step} is corrupt: {why}", hint=hint)


def _step_before(root: OpenRoot, checkpoint: CheckpointMetadata) -> str:
    """Return how to load the newest step before that is good.

    The catalog says which they are: of a history that the job left behind by going back there is none (PROTOCOLS
    8.4). A step is what the hint names, and that of the damaged one names the damaged one.
    """
    other = root.catalog.before(checkpoint)
    while other is not None:
        if other.step != checkpoint.step:
            folder, step = root.catalog.folder(other), other.step
            try:
                manifest = read_manifest(root.storage, folder, other.manifest_digest)
                read_rank_manifests(root.storage, folder, manifest)
            except CheckpointCorrupt as error:
                log.error("step %d, which is before it, is corrupt as well: %s", step, error.message)  # noqa: TRY400  # the reason says it all
            else:
                return f'step {step} is the one before: load it by checkpoint_id="{step}", or by StrataReader(…, step={step})'
        other = root.catalog.before(other)
    return f"no good checkpoint is before it; {_HINT}"
