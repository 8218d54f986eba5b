"""A load by DCP that finds damage: the coordinators are told, and the error names what to load instead.

DCP fills the state while it reads, on all ranks, so no other step is taken by itself in the middle of a load.

What one host found counts once a second one has read it, too. So a process that has loaded by DCP looks at what
others find, as one with a `CheckpointManager` does.
"""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.marker import read_manifest, read_rank_manifests
from strata.client.checkpoint_catalog import CoordinatedCatalog
from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.client.checkpoint_keeping import Keeping
from strata.client.checkpoint_port import SessionPort
from strata.client.checkpoint_tiers import MISSING_HINT, Damage
from strata.core.checkpoint_tiers import PRIMARY
from strata.core.checkpoints import RESTORABLE_TYPES
from strata.core.records import CheckpointState
from strata.errors import CheckpointCorrupt, CheckpointIncomplete, StorageError, StrataError
from strata.integrations.dcp.room import Room

_HINT: Final = "put the damaged file back from a copy"

log: Final = logging.getLogger("strata.checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Looking:
    """Who looks, and for which session and generation. The session, which it observes, holds it."""

    keeping: weakref.ref[Keeping]
    port: weakref.ref[SessionPort]
    generation: int


_LOOKING: Final[dict[object, _Looking]] = {}
"""By member and root: nobody is told when a load ends."""


def look(room: Room, port: SessionPort | None, config: CheckpointManagerConfig) -> None:
    """Read, from now on and as long as the session lasts, what other hosts find damaged in this root.

    Once for each session, generation and root, however many loads there are, and by one process of each host.
    """
    if port is None or not isinstance(room.catalog, CoordinatedCatalog):
        return
    place = port.uid, port.job, port.worker_id, room.storage.uri
    before = _LOOKING.get(place)
    keeping = before.keeping() if before is not None else None
    if before is not None and keeping is not None:
        if before.port() is port and before.generation == port.generation:
            return
        keeping.close()
    # what stays is not a reader's matter
    keeping = Keeping(room.catalog, room.storage, replace(config, keep_count=None))
    _LOOKING[place] = _Looking(
        keeping=weakref.ref(keeping), port=weakref.ref(port), generation=port.generation
    )


def removed(checkpoint: CheckpointMetadata, room: Room) -> bool:
    """Tell whether a checkpoint that reads as damaged is merely one that was removed meanwhile."""
    if isinstance(room.catalog, CoordinatedCatalog):
        here = [one for one in room.catalog.all() if one.id == checkpoint.id]
        return not here or here[0].state is CheckpointState.DELETING
    return not room.storage.exists(f"{room.catalog.folder(checkpoint)}/{MARKER}")


def told(
    error: CheckpointCorrupt, checkpoint: CheckpointMetadata, room: Room, config: CheckpointManagerConfig
) -> CheckpointCorrupt:
    """Return what to raise for damage that was read twice, once the coordinators know of it, if there are any.

    It names the newest step before that whose manifests are proven; its data is proven when it is loaded.
    """
    with contextlib.suppress(StrataError):  # the damage is what is to be raised
        _report(error, checkpoint, room, config)
    try:
        hint = _hint(checkpoint, room)
    except StrataError as other:
        hint = f"which one is good before it is not known: {other.message}; {_HINT}"
    return untold(error, checkpoint, hint=hint)


def untold(
    error: CheckpointCorrupt, checkpoint: CheckpointMetadata, *, hint: str = _HINT
) -> CheckpointCorrupt:
    """Return what to raise for damage where nobody can be told, and nothing be looked for."""
    if isinstance(error, CheckpointIncomplete):
        return CheckpointIncomplete(
            f"step {checkpoint.step} is not whole: {error.message}", hint=MISSING_HINT
        )
    return CheckpointCorrupt(f"step {checkpoint.step} is corrupt: {error.message}", hint=hint)


def _hint(checkpoint: CheckpointMetadata, room: Room) -> str:
    for other in _before(checkpoint, room):
        folder = room.catalog.folder(other)
        try:
            manifest = read_manifest(room.storage, folder, other.manifest_digest)
            read_rank_manifests(room.storage, folder, manifest)
        except CheckpointCorrupt as error:
            log.error("step %d, which is before it, is corrupt as well: %s", other.step, error.message)  # noqa: TRY400  # the reason says it all
        except StorageError as error:
            return f"whether step {other.step} before it is good is not known: {error.message}; {_HINT}"
        else:
            step = other.step
            return f'step {step} is the one before: load it by checkpoint_id="{step}", or by StrataReader(…, step={step})'
    return f"no good checkpoint is before it; {_HINT}"


def _before(checkpoint: CheckpointMetadata, room: Room) -> Iterator[CheckpointMetadata]:
    """Yield those of other steps that a load may take instead, the newest first.

    The coordinators say which they are: of a history that the job left behind by going back there is none
    (PROTOCOLS 8.4). A step is what the hint names, and that of the damaged one names the damaged one.
    """
    catalog = room.catalog
    if isinstance(catalog, CoordinatedCatalog):
        other = catalog.before(checkpoint)
        while other is not None:
            if other.step != checkpoint.step:
                yield other
            other = catalog.before(other)
        return
    for one in sorted(catalog.all(), key=lambda c: c.order, reverse=True):
        if (
            one.order < checkpoint.order
            and one.step != checkpoint.step
            and one.state is CheckpointState.COMMITTED
            and one.checkpoint_type in RESTORABLE_TYPES
        ):
            yield one


def _report(
    error: CheckpointCorrupt, checkpoint: CheckpointMetadata, room: Room, config: CheckpointManagerConfig
) -> None:
    """Say what is wrong; where this world begins from it, and has saved nothing yet, wait for what others find."""
    catalog = room.catalog
    if not isinstance(catalog, CoordinatedCatalog) or isinstance(error, CheckpointIncomplete):
        return
    point, latest = catalog.restore_point(), catalog.latest()
    begins = point is not None and latest is not None and point.id == latest.id == checkpoint.id
    keeping = Keeping(catalog, room.storage, replace(config, keep_count=None), looks=False)
    try:
        damage = Damage(tier=PRIMARY, complaint=error.message)
        keeping.report(checkpoint, [damage], begins=begins)
    finally:
        keeping.close()
