"""Any history of members that join, leave and are replaced, with the assignments that the leader makes."""

from __future__ import annotations

import json
import math
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.datasets.assignment import divided, owners_of
from strata.core.datasets.ring import MAX_MOVED_BYTES, bound
from strata.core.ids import WorkerId
from strata.core.kv.records import Assignment
from tests.unit.core.datasets.test_ring_page import printed_program

MOST_MEMBERS = 40
PUBLISHED_OWNERS = printed_program()


def choose(workers: list[str], shards: int, old: Assignment | None) -> Assignment:
    """Return the leader's assignment; the order of the workers must not matter."""
    found, again = (
        divided(tuple(map(WorkerId, order)), shards, old, epoch=1, generation=1)
        for order in (sorted(workers), sorted(workers, reverse=True))
    )
    assert (found.seats, found.moved) == (again.seats, again.moved)
    return found


def check(assignment: Assignment) -> None:
    """Every shard has one owner, by the published definition too; loads and exceptions are bounded."""
    owners = owners_of(assignment)
    published = PUBLISHED_OWNERS(assignment.workers, assignment.shards, assignment.seats, assignment.moved)
    assert owners == published
    assert len(owners) == assignment.shards
    assert set(owners) <= set(assignment.workers)
    assert max(Counter(owners).values()) <= bound(len(assignment.workers), assignment.shards)
    moved = [shard for taken in assignment.moved.values() for shard in taken]
    assert len(set(moved)) == len(moved)
    assert len(json.dumps(assignment.moved, separators=(",", ":"))) <= MAX_MOVED_BYTES


changes = st.tuples(st.sampled_from(("join", "leave", "replace")), st.integers(0, MOST_MEMBERS - 1))


@given(st.integers(1, MOST_MEMBERS), st.integers(1, 600), st.lists(changes, max_size=12))
@settings(deadline=None)
def test_in_any_history_only_the_shards_of_the_changed_member_move(
    count: int, shards: int, history: list[tuple[str, int]]
) -> None:
    workers = [f"w{number:02}" for number in range(count)]
    assignment = choose(workers, shards, None)
    check(assignment)
    for turn, (kind, chosen) in enumerate(history):
        before = owners_of(assignment)
        departed = workers[chosen % len(workers)] if kind != "join" else ""
        joined = f"x{turn:02}" if kind != "leave" else ""
        after = [name for name in [*workers, joined] if name and name != departed]
        if not 1 <= len(after) <= MOST_MEMBERS:
            continue
        workers, assignment = after, choose(after, shards, assignment)
        check(assignment)
        moves = [pair for pair in zip(before, owners_of(assignment), strict=True) if pair[0] != pair[1]]
        if departed:
            assert {old for old, _new in moves} <= {departed}
        if joined:
            assert {new for _old, new in moves} <= {joined}
        share = before.count(departed) if departed else math.ceil(shards / len(workers))
        assert len(moves) <= share
