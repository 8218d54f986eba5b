"""How a member stands to a world that it is told of. Pure."""

from __future__ import annotations

from strata.agent.environment import Place
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_FAILED, JOB_PHASE_PAUSED


def is_over(update: WorldUpdate | None, place: Place | None) -> bool:
    """Tell whether the generation of `place` has ended; without a place there is none that goes on."""
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
    """Tell whether what `update` asks for is not to be done any more, by the newest world known."""
    return newest is not None and (newest.world.generation, newest.phase) != (
        update.world.generation,
        update.phase,
    )


def lacks_members(update: WorldUpdate | None, *, handled: int) -> bool:
    """Tell whether it is for other agents that one waits: not as a spare, nor for a paused job."""
    if update is None:
        return True
    if update.phase == JOB_PHASE_PAUSED:
        return False
    return update.world.forming or update.world.generation <= handled
