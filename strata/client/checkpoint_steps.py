"""What a user asks of one step: to delete it, or which one is the best."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from strata.checkpoint.catalog import Catalog, CheckpointMetadata
from strata.checkpoint.local_catalog import LocalCatalog
from strata.checkpoint.removal import remove_objects
from strata.checkpoint.sink import Storage
from strata.client.checkpoint_loading import steps_of
from strata.client.checkpoint_retention import candidate_of
from strata.core.checkpoint_records import Keep
from strata.core.checkpoints import RESTORABLE_TYPES
from strata.core.records import CheckpointState
from strata.core.retention_rules import kept
from strata.errors import CheckpointNotFound

if TYPE_CHECKING:
    from strata.client.checkpoint_keeping import Keeping

_THERE: Final = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})

log: Final = logging.getLogger("strata.checkpoint")


def delete_step(catalog: Catalog, storage: Storage, keeping: Keeping | None, step: int) -> None:
    """Delete every checkpoint of `step`, the newest first; the first refusal ends it.

    The catalog refuses what is needed. Under coordinators (`keeping`) this host removes the bytes it has, and
    the others theirs with their next pass.
    """
    known = catalog.all()
    there = [c for c in known if c.step == step and c.state in _THERE]
    if not there:
        raise CheckpointNotFound(f"no checkpoint of step {step} is committed; there are {steps_of(known)}")
    for checkpoint in reversed(there):
        catalog.delete(checkpoint)
        if isinstance(catalog, LocalCatalog):
            remove_objects(storage, catalog.folder(checkpoint))
            catalog.deleted(checkpoint)
            log.info("step %d is deleted: %s", checkpoint.step, checkpoint.path)
    if keeping is not None:
        keeping.clear()


def best_step(checkpoints: Sequence[CheckpointMetadata], keep: Keep) -> int | None:
    """Return the step that would stay if only the best one did; None without a metric, or a number under it."""
    if not keep.metric:
        return None
    whole = [
        c
        for c in checkpoints
        if c.state is CheckpointState.COMMITTED and c.checkpoint_type in RESTORABLE_TYPES
    ]
    only = Keep(best=1, metric=keep.metric, highest=keep.highest)
    best = kept(map(candidate_of, whole), only, now_unix_ms=0)
    return next((c.step for c in whole if c.id in best), None)
