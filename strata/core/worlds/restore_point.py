"""Where a worker resumes: the ranks that it runs now, and the part of the checkpoint for each rank.

Rank r reads the part that rank r of the saving world wrote, whichever worker ran that rank. If the saving world had
no rank r, then rank r has no part of its own, and takes the state common to all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from strata.core.checkpoints.lifecycle import find
from strata.core.checkpoints.tiers import ack_of
from strata.core.job import JobView, World
from strata.core.kv.records import CheckpointRecord
from strata.core.kv.view import Entry


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryPoint:
    """Where the current generation begins, for the ranks of one worker."""

    entry: Entry[CheckpointRecord]
    parts: Mapping[int, str]
    """The digest of each rank's part manifest; "" if the rank has no part."""


def ranks_of(world: World, worker: str) -> list[int]:
    """Return the ranks that a worker runs; none for a standby."""
    member = world.holder(worker)
    return [] if member is None else list(member.ranks)


def recovery_point(job: JobView, worker: str) -> RecoveryPoint | None:
    """Return where `worker` resumes in the current world; None if the world begins without a checkpoint."""
    world = job.world()
    if world is None or world.head.restore is None:
        return None
    entry = find(job, world.head.restore.step, world.head.restore.attempt)
    if entry is None:
        return None
    acks = {rank: ack_of(job, entry.record, rank) for rank in ranks_of(world, worker)}
    parts = {rank: ack.digest if ack is not None else "" for rank, ack in acks.items()}
    return RecoveryPoint(entry=entry, parts=parts)
