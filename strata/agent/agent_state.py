"""Pure functions of a `WorldUpdate`: has a generation ended, does a member join, is the update outdated?"""

from __future__ import annotations

from strata.agent.environment import Place
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_FAILED, JOB_PHASE_PAUSED


def is_over(update: WorldUpdate | None, place: Place | None) -> bool:
    """Tell whether the generation of `place` has ended; without a place, no generation runs and the answer is True."""
    if place is None:
        return True
    if update is None:
        return False
    return update.world.generation != place.generation or update.phase == JOB_PHASE_FAILED


def waits_because(update: WorldUpdate) -> str | None:
    """Return why a member does not join this world; None if it does."""
    if update.world.forming:
        return update.world.reason
    if update.HasField("place"):
        return None
    if update.waits:
        return f"waits: {update.waits}"
    return f"the job has the {update.world.members} members it takes; this one stands by"


def is_outdated(update: WorldUpdate, newest: WorldUpdate | None) -> bool:
    """Tell whether a newer world or phase is known, so that the agent must not act on `update` any more."""
    return newest is not None and (newest.world.generation, newest.phase) != (
        update.world.generation,
        update.phase,
    )


def lacks_members(update: WorldUpdate | None, *, handled: int) -> bool:
    """Tell whether this member waits for other agents to join; a spare, or a member of a paused job, does not."""
    if update is None:
        return True
    if update.phase == JOB_PHASE_PAUSED:
        return False
    return update.world.forming or update.world.generation <= handled
