"""Which checkpoints go, after each commit, where one process keeps the catalog: what no rule keeps.

Under coordinators the leader decides by the same rules. The latest one, pinned and tagged ones, and
whatever the catalog refuses to delete stay. What an earlier run
left half removed, or never finished, goes too. A pass that is interrupted is made up for by the
next one.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final

from strata.checkpoint.catalog import Catalog, CheckpointMetadata
from strata.checkpoint.local_catalog import LocalCatalog
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.marker import committed
from strata.checkpoint.removal import remove_objects
from strata.checkpoint.sink import Storage
from strata.checkpoint.tiers import FarAway, TieredStorage, from_afar
from strata.core.checkpoint_records import Keep
from strata.core.checkpoints import RESTORABLE_TYPES
from strata.core.records import CheckpointState
from strata.core.retention_rules import Candidate, kept, newest_of_each_step
from strata.errors import (
    CheckpointCorrupt,
    CheckpointNotFound,
    QuotaExceeded,
    Refused,
    StorageError,
    Unavailable,
)

log: Final = logging.getLogger("strata.checkpoint")

_ENDED = frozenset({CheckpointState.DELETING, CheckpointState.ABORTED})


def excess(
    checkpoints: Sequence[CheckpointMetadata], keep: Keep, *, now_unix_ms: int
) -> list[CheckpointMetadata]:
    """Return what goes of `checkpoints` (in their order), the oldest first.

    Unless everything is kept, of the attempts at a step only the newest counts, and the earlier ones go.
    A corrupt one stays until there are as many newer good ones as the rules count; an aborted save
    stays until there is a newer commit, while a slow rank may still write to it.
    """
    whole_or_not = [candidate_of(c) for c in checkpoints if c.state is CheckpointState.COMMITTED]
    if not keep.everything:
        whole_or_not = newest_of_each_step(whole_or_not)
    counted = {candidate.key for candidate in whole_or_not}
    committed = [c for c in checkpoints if c.id in counted and c.checkpoint_type in RESTORABLE_TYPES]
    if not committed:
        return []
    newest = committed[-1].order
    oldest = (0, 0)
    if keep.latest and len(committed) >= keep.latest:
        oldest = committed[-keep.latest].order
    stays = kept(whole_or_not, keep, now_unix_ms=now_unix_ms)
    return [
        c
        for c in checkpoints
        if not c.latest
        and not c.pinned
        and not c.tags
        and c.state is not CheckpointState.OPEN
        and c.id not in stays
        and (c.state is CheckpointState.COMMITTED or c.order < (newest if c.state in _ENDED else oldest))
    ]


def newest_afar(catalog: Catalog, storage: Storage, checkpoints: Sequence[CheckpointMetadata]) -> str:
    """Return the newest attempt that a training can begin from by the far storage alone; nothing without one.

    It is what is left if this host is lost, so it stays until a newer one is there.
    """
    if isinstance(storage, TieredStorage):
        for checkpoint in reversed(checkpoints):
            if checkpoint.checkpoint_type in RESTORABLE_TYPES and _is_whole(
                storage.far, catalog.folder(checkpoint)
            ):
                return checkpoint.id
    return ""


def _is_whole(far: Storage, folder: str) -> bool:
    with from_afar():
        try:
            return committed(far, folder) is not None
        except CheckpointCorrupt:
            return False


def candidate_of(checkpoint: CheckpointMetadata) -> Candidate:
    return Candidate(
        key=checkpoint.id,
        type=checkpoint.checkpoint_type,
        step=checkpoint.step,
        counts=checkpoint.order,
        created_unix_ms=checkpoint.created_unix_ms,
        metadata=checkpoint.metadata,
    )


def retain(catalog: Catalog, storage: Storage, keep: Keep, *, now_unix_ms: int) -> None:
    """Remove what the rules leave over; for one process with a storage root of its own.

    Of a save that was given up the marker is looked for first: if there is one, storage knows of
    a commit that the catalog does not, and nothing is removed. What cannot be removed keeps nothing
    else from going; the first such error is raised at the end.
    """
    trouble: StorageError | None = None
    try:
        if isinstance(catalog, LocalCatalog):  # first: a save that never ended may use an older one
            for folder in catalog.leftovers():
                try:
                    remove_objects(storage, folder)
                except FarAway:
                    raise
                except StorageError as error:
                    log.warning("%s, which never ended, cannot be removed: %s", folder, error.message)
                    trouble = trouble or error
        # the newest of them first: an Incremental goes before what it uses
        known = catalog.kept() if isinstance(catalog, LocalCatalog) else catalog.all()
        going = excess(known, keep, now_unix_ms=now_unix_ms)
        spared = newest_afar(catalog, storage, known) if going else ""
        for checkpoint in reversed(going):
            if checkpoint.id == spared:
                continue
            folder = catalog.folder(checkpoint)
            if checkpoint.state is CheckpointState.ABORTED and storage.exists(f"{folder}/{MARKER}"):
                log.error(
                    "step %d was given up, and storage has it as committed: %s", checkpoint.step, folder
                )
                continue
            try:
                _remove(catalog, storage, checkpoint, folder)
            except FarAway:
                raise
            except StorageError as error:
                log.warning("step %d cannot be removed: %s", checkpoint.step, error.message)
                trouble = trouble or error
    except (FarAway, Unavailable, QuotaExceeded) as error:
        # no coordinator just now, or more checkpoints than one answer holds: the pass after the next commit does the same work
        log.warning("old checkpoints stay for now: %s", error.message)
    if trouble is not None:
        raise trouble


def _remove(catalog: Catalog, storage: Storage, checkpoint: CheckpointMetadata, folder: str) -> None:
    try:
        catalog.delete(checkpoint)
    except (Refused, CheckpointNotFound) as error:
        log.debug("step %d stays: %s", checkpoint.step, error.message)
        return
    remove_objects(storage, folder)
    catalog.deleted(checkpoint)
    log.info("step %d is deleted: %s", checkpoint.step, checkpoint.path)
