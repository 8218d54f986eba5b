"""A DCP load that finds corruption reports it to the coordinators; the load's error names the step to load instead.

DCP fills the state of all ranks while it reads, so a load in progress never falls back to another step by itself.
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
    """Return the result of `read` on a checkpoint, verified as by `Loading.proven`.

    A corruption error names the newest earlier step with intact manifests. The data of that step is not verified yet.
    """

    def begins() -> bool:
        """Return whether this world began from this checkpoint, and has saved nothing since."""
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
    """Return the error for a corrupt checkpoint, with a hint that names the step before it."""
    try:
        hint = _step_before(root, checkpoint)
    except StrataError as other:
        hint = f"which step before it is good is not known: {other.message}; {_HINT}"
    return CheckpointCorrupt(f"step {checkpoint.step} is corrupt: {why}", hint=hint)


def _step_before(root: OpenRoot, checkpoint: CheckpointMetadata) -> str:
    """Return a hint on how to load the newest intact step before `checkpoint`.

    The catalog gives the candidates, without those that the job abandoned by going back (PROTOCOLS 8.4). Other attempts
    at the same step are skipped: the hint can only name a step, and a load of that step would take the corrupt
    checkpoint.
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
