from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata.core.ids import BootId, InstanceId, WorkerId
from strata.core.job import World
from strata.core.placement import placed
from strata.core.records import Member, Worker, WorldHead
from strata.core.view import Entry


def workers(**incarnations: int | tuple[int, int]) -> dict[str, Entry[Worker]]:
    """Return registered workers by name: the incarnation, or that and the slots."""
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


def names(before: World | None, here: dict[str, Entry[Worker]], *, most: int = 10) -> list[str]:
    return [member.worker for member in placed(before, here, most=most)]


def world(members: tuple[Member, ...]) -> World:
    size = sum(member.slots for member in members)
    head = WorldHead(generation=1, epoch=1, members=len(members), size=size, reason="")
    return World(head, members)


def test_the_first_world_is_in_order_of_registration() -> None:
    assert names(None, workers(c=5, a=7, b=6)) == ["c", "b", "a"]


def test_the_earliest_are_in_and_the_rest_stand_by() -> None:
    assert names(None, workers(a=7, b=6, c=5, d=8), most=2) == ["c", "b"]


def test_first_ranks_are_sums_of_slots() -> None:
    members = placed(None, workers(a=(5, 2), b=(6, 8), c=(7, 1)), most=3)
    assert [(m.first_rank, m.slots) for m in members] == [(0, 2), (2, 8), (10, 1)]


def five() -> World:
    return world(placed(None, workers(a=1, b=2, c=3, d=4, e=5), most=5))


def test_on_a_shrink_the_highest_ranks_fill_the_holes() -> None:
    assert names(five(), workers(a=1, d=4, e=5)) == ["a", "e", "d"]
    assert names(five(), workers(a=1, b=2, e=5)) == ["a", "b", "e"]
    assert names(five(), workers(c=3)) == ["c"]


def test_a_newcomer_fills_a_hole_and_everybody_else_stays() -> None:
    assert names(five(), workers(a=1, c=3, d=4, e=5, n=9), most=5) == ["a", "n", "c", "d", "e"]


def test_a_replacement_is_a_newcomer() -> None:
    assert names(five(), workers(a=1, b=9, c=3, d=4, e=5, n=8), most=6) == list("ancdeb")


def test_survivors_go_before_newcomers_that_are_too_many() -> None:
    assert names(five(), workers(a=1, b=2, e=5, n=8, m=9), most=4) == ["a", "b", "n", "e"]


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
