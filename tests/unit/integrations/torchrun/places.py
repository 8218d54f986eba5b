"""Sample worlds and places, as an agent receives them."""

from __future__ import annotations

from strata.agent.environment import Place
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_RUNNING, World, WorldMember


def update(
    generation: int, *, members: int = 2, place: bool = True, phase: int = JOB_PHASE_RUNNING
) -> WorldUpdate:
    """Return the world of `generation`; it is forming if `members` is 0."""
    made = WorldUpdate(
        world=World(
            generation=generation,
            members=members,
            size=2 * members,
            forming=members == 0,
            reason="1 of at least 2 members are left",
        )
    )
    made.phase = phase  # type: ignore[assignment]  # a number, as on the wire
    if place:
        made.place.CopyFrom(WorldMember(worker_id="a", group_rank=1, slots=2, first_rank=2))
    return made


def place(generation: int, *, first_rank: int = 2) -> Place:
    """Return the place of agent `a` in `generation`: by default ranks 2 and 3 of 4."""
    world = update(generation)
    world.place.first_rank = first_rank
    return Place(
        job="gpt",
        worker_id="a",
        world=world.world,
        member=world.place,
        master_addr="10.0.0.1",
        master_port=4711,
        socket="/run/door",
        endpoints="c:1",
        detect_s=5.0,
    )
