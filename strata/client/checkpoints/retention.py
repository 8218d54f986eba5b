"""Retention: delete the checkpoints that no rule keeps, for a process without coordinators; delete one step by
hand.

Under coordinators the leader decides by the same rules. These stay: the latest checkpoint, pinned and tagged
checkpoints, and all that the catalog refuses to delete. Saves that an earlier run never finished are deleted, too. If
a pass is interrupted, the next pass does the rest.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import Catalog, CheckpointMetadata
from strata.checkpoint.copies.tiers import FarUnreachable, TieredStorage, as_far_error
from strata.checkpoint.format.marker import committed
from strata.checkpoint.storage.removal import remove_objects
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.restore import steps_of
from strata.core.checkpoints.lifecycle import RESTORABLE_TYPES
from strata.core.checkpoints.references import Keep
from strata.core.checkpoints.retention_rules import Candidate, kept, newest_of_each_step
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointCorrupt, CheckpointNotFound, Refused, StorageError

if TYPE_CHECKING:
    from strata.client.checkpoints.upkeep import Upkeep

_THERE: Final = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})

log: Final = logging.getLogger("strata.checkpoint")


def excess(
    checkpoints: Sequence[CheckpointMetadata], keep: Keep, *, now_unix_ms: int
) -> list[CheckpointMetadata]:
    """Return the checkpoints to delete, the oldest first. `checkpoints` is in order, each committed or corrupt.

    Unless the rules keep everything, only the newest attempt at a step counts, and earlier attempts are deleted. A
    corrupt checkpoint stays until there are `keep.latest` newer good checkpoints.
    """
    candidates = [candidate_of(c) for c in checkpoints if c.state is CheckpointState.COMMITTED]
    if not keep.everything:
        candidates = newest_of_each_step(candidates)
    counted = {candidate.key for candidate in candidates}
    committed = [c for c in checkpoints if c.id in counted and c.checkpoint_type in RESTORABLE_TYPES]
    if not committed:
        return []
    oldest = (0, 0)
    if keep.latest and len(committed) >= keep.latest:
        oldest = committed[-keep.latest].order
    stays = kept(candidates, keep, now_unix_ms=now_unix_ms)
    return [
        c
        for c in checkpoints
        if not c.latest
        and not c.pinned
        and not c.tags
        and c.id not in stays
        and (c.state is CheckpointState.COMMITTED or c.order < oldest)
    ]


def newest_afar(catalog: LocalCatalog, storage: Storage, checkpoints: Sequence[CheckpointMetadata]) -> str:
    """Return the newest attempt that a training can start from with the far storage alone, or "".

    If this host were lost, only the copies in the far storage would be left. So the newest of these copies stays
    until the far storage has a newer copy.
    """
    if not isinstance(storage, TieredStorage):
        return ""
    for checkpoint in reversed(checkpoints):
        if checkpoint.checkpoint_type in RESTORABLE_TYPES:
            with contextlib.suppress(CheckpointCorrupt), as_far_error():
                if committed(storage.far, catalog.folder(checkpoint)) is not None:
                    return checkpoint.id
    return ""


def candidate_of(checkpoint: CheckpointMetadata) -> Candidate:
    return Candidate(
        key=checkpoint.id,
        type=checkpoint.checkpoint_type,
        step=checkpoint.step,
        counts=checkpoint.order,
        created_unix_ms=checkpoint.created_unix_ms,
        metadata=checkpoint.metadata,
    )


def retain(catalog: LocalCatalog, storage: Storage, keep: Keep, *, now_unix_ms: int) -> None:
    """Delete the checkpoints that no rule keeps; for one process with a storage root of its own.

    A failed removal does not stop the others; the first such error is raised at the end. While the far storage
    is unreachable, nothing more is removed.
    """
    failed: list[StorageError] = []
    try:
        for folder in catalog.leftovers():  # first: such a save may refer to an older checkpoint
            with _collect_error(failed, f"{folder}, an unfinished save,"):
                remove_objects(storage, folder)
        # the newest first: an Incremental is removed before the checkpoints that it refers to
        known = catalog.kept()
        going = excess(known, keep, now_unix_ms=now_unix_ms)
        spared = newest_afar(catalog, storage, known) if going else ""
        for checkpoint in reversed(going):
            if checkpoint.id != spared:
                with _collect_error(failed, f"step {checkpoint.step}"):
                    _remove(catalog, storage, checkpoint)
    except FarUnreachable as error:
        log.warning("old checkpoints stay for now: %s", error.message)
    if failed:
        raise failed[0]


@contextlib.contextmanager
def _collect_error(failed: list[StorageError], what: str) -> Iterator[None]:
    try:
        yield
    except FarUnreachable:
        raise
    except StorageError as error:
        log.warning("%s cannot be removed: %s", what, error.message)
        failed.append(error)


def _remove(catalog: LocalCatalog, storage: Storage, checkpoint: CheckpointMetadata) -> None:
    try:
        catalog.delete(checkpoint)
    except Refused as error:
        log.debug("step %d stays: %s", checkpoint.step, error.message)
        return
    remove_objects(storage, catalog.folder(checkpoint))
    catalog.deleted(checkpoint)
    log.info("step %d is deleted: %s", checkpoint.step, checkpoint.path)


def delete_step(catalog: Catalog, storage: Storage, upkeep: Upkeep | None, step: int) -> None:
    """Delete every checkpoint of `step`, the newest first; stop at the first refusal.

    The catalog refuses to delete checkpoints that are needed. Under coordinators (`upkeep`) this host removes the
    bytes in its storage, and the other hosts remove theirs in their next pass.
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
    if upkeep is not None:
        upkeep.clear()


def best_step(checkpoints: Sequence[CheckpointMetadata], keep: Keep) -> int | None:
    """Return the step of the best checkpoint; None without a metric, or if no checkpoint has that metric."""
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
