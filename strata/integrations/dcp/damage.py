"""A load by DCP that finds damage: the coordinators are told, and the error names what to load instead.

DCP fills the state while it reads, on all ranks, so no other step is taken by itself in the middle of a load.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from typing import Final

from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.marker import read_manifest, read_rank_manifests
from strata.client.checkpoint_catalog import CoordinatedCatalog
from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.client.checkpoint_keeping import Keeping
from strata.client.surroundings import random_id
from strata.core.checkpoints import RESTORABLE_TYPES
from strata.core.records import CheckpointState
from strata.errors import CheckpointCorrupt, StrataError
from strata.integrations.dcp.room import Room

_HINT: Final = "put the damaged file back from a copy"

log: Final = logging.getLogger("strata.checkpoint")


def told(
    error: CheckpointCorrupt, checkpoint: CheckpointMetadata, room: Room, config: CheckpointManagerConfig
) -> CheckpointCorrupt:
    """Return what to raise for damage that was read twice, once the coordinators know of it, if there are any.

    It names the newest step before that whose manifests are proven; its data is proven when it is loaded.
    """
    before = None
    with contextlib.suppress(StrataError):  # the damage is what is to be raised
        before = _before(checkpoint, room)
        _report(error, checkpoint, room, config)
    hint = f"no good checkpoint is before it; {_HINT}"
    if before is not None:
        step = before.step
        hint = f'step {step} is the one before: load it by checkpoint_id="{step}", or by StrataReader(…, step={step})'
    return CheckpointCorrupt(f"step {checkpoint.step} is corrupt: {error.message}", hint=hint)


def _before(checkpoint: CheckpointMetadata, room: Room) -> CheckpointMetadata | None:
    for other in sorted(room.catalog.all(), key=lambda c: c.order, reverse=True):
        if (
            other.order >= checkpoint.order
            or other.state is not CheckpointState.COMMITTED
            or other.checkpoint_type not in RESTORABLE_TYPES
        ):
            continue
        folder = room.catalog.folder(other)
        try:
            manifest = read_manifest(room.storage, folder, other.manifest_digest)
            read_rank_manifests(room.storage, folder, manifest)
        except CheckpointCorrupt as error:
            log.error("step %d, which is before it, is corrupt as well: %s", other.step, error.message)  # noqa: TRY400  # the reason says it all
        else:
            return other
    return None


def _report(
    error: CheckpointCorrupt, checkpoint: CheckpointMetadata, room: Room, config: CheckpointManagerConfig
) -> None:
    """Say what is wrong; where this world begins from it, and has saved nothing yet, wait for what others find."""
    catalog = room.catalog
    if not isinstance(catalog, CoordinatedCatalog):
        return
    point, latest = catalog.restore_point(), catalog.latest()
    begins = point is not None and latest is not None and point.id == latest.id == checkpoint.id
    keeping = Keeping(
        catalog,
        room.storage,
        keep=None,
        host=socket.gethostname(),
        looks=False,
        new_id=random_id,
        corrupt_wait_s=config.corrupt_wait_s,
    )
    try:
        keeping.damaged(checkpoint, error.message, begins=begins)
    finally:
        keeping.close()
