from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job import World
from strata.core.kv.records import Member, Worker, WorldHead
from strata.core.kv.view import Entry
from strata.core.worlds.placement import placed


def workers(**incarnations: int | tuple[int, int]) -> dict[str, Entry[Worker]]:
    """Return registered workers by name; each value is the incarnation, or (incarnation, slots)."""
    found = {}
    for name, value in incarnations.items():
        incarnation, slots = value if isinstance(value, tuple) else (value, 1)
        record = Worker(boot=BootId("b"), served_by=InstanceId("i"), slots=slots)
        found[name] = Entry(
            key=f"workers/{name}",
            record=record,
            create_revision=incarnation,
            mod_revision=incarnation,
        )
    return found


def world(members: tuple[Member, ...]) -> World:
    size = sum(member.slots for member in members)
    head = WorldHead(generation=1, epoch=1, members=len(members), size=size, reason="")
    return World(head, members)


def test_first_ranks_are_sums_of_slots() -> None:
    members = placed(None, workers(a=(5, 2), b=(6, 8), c=(7, 1)), most=3)
    assert [(m.first_rank, m.slots) for m in members] == [(0, 2), (2, 8), (10, 1)]


FIVE = world(placed(None, workers(a=1, b=2, c=3, d=4, e=5), most=5))


@pytest.mark.parametrize(
    ("before", "here", "most", "places"),
    [
        (None, workers(c=5, a=7, b=6), 10, "cba"),
        (None, workers(a=7, b=6, c=5, d=8), 2, "cb"),
        # on a shrink the highest ranks fill the holes
        (FIVE, workers(a=1, d=4, e=5), 10, "aed"),
        (FIVE, workers(a=1, b=2, e=5), 10, "abe"),
        (FIVE, workers(c=3), 10, "c"),
        # a newcomer fills a hole, all others keep their ranks, and a replacement is a newcomer
        (FIVE, workers(a=1, c=3, d=4, e=5, n=9), 5, "ancde"),
        (FIVE, workers(a=1, b=9, c=3, d=4, e=5, n=8), 6, "ancdeb"),
        # survivors have priority over surplus newcomers
        (FIVE, workers(a=1, b=2, e=5, n=8, m=9), 4, "abne"),
    ],
)
def test_survivors_keep_their_ranks_and_newcomers_fill_the_holes(
    before: World | None, here: dict[str, Entry[Worker]], most: int, places: str
) -> None:
    assert "".join(member.worker for member in placed(before, here, most=most)) == places


names_st = st.text("abcdefghij", min_size=1, max_size=2)


@given(
    st.dictionaries(names_st, st.integers(1, 3), min_size=1, max_size=12),
    st.dictionaries(names_st, st.tuples(st.booleans(), st.integers(1, 3)), max_size=20),
    st.integers(1, 14),
)
def test_places_are_dense_and_survivors_move_only_into_holes(
    before: dict[str, int], after: dict[str, tuple[bool, int]], most: int
) -> None:
    old = {name: (index + 1, slots) for index, (name, slots) in enumerate(before.items())}
    previous = world(placed(None, workers(**old), most=len(old)))
    place = {member.worker: member.group_rank for member in previous.members}
    here: dict[str, int | tuple[int, int]] = {}
    for index, (name, (survives, slots)) in enumerate(after.items()):
        here[name] = old[name] if survives and name in old else (100 + index, slots)
    registered = workers(**here)
    members = placed(previous, registered, most=most)

    assert len(members) == min(most, len(registered))
    assert [m.group_rank for m in members] == list(range(len(members)))
    first_rank = 0
    for member in members:
        assert member.first_rank == first_rank
        assert member.incarnation == registered[member.worker].create_revision
        first_rank += member.slots
    survivors = [m for m in members if m.worker in place and here[m.worker] == old[m.worker]]
    stayed = [m for m in survivors if place[WorkerId(m.worker)] == m.group_rank]
    moved = [m for m in survivors if place[WorkerId(m.worker)] != m.group_rank]
    assert all(place[WorkerId(m.worker)] >= len(members) for m in moved), "no hole made it move"
    assert len(stayed) + len(moved) == min(
        most, sum(name in old and here[name] == old[name] for name in here)
    ), "no survivor is left out for a newcomer"
