from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.datasets import ring
from strata.core.datasets.ring import Moved, assign, bound, homes, owners, position, receiving_limit
from tests.not_none import not_none

HUNDRED = [f"node-{index:03d}" for index in range(100)]


def as_published(workers: list[str], shards: int) -> list[str]:
    """Return the assignment by the definition in docs/ring.md, word by word."""
    points = sorted(
        (xxhash.xxh3_64(f"member/{w}/{k}".encode()).intdigest() >> 11, w) for w in workers for k in range(32)
    )
    found = []
    for shard in range(shards):
        at = xxhash.xxh3_64(f"shard/{shard}".encode()).intdigest() >> 11
        found.append(next((worker for point, worker in points if point >= at), points[0][1]))
    return found


def moves(one: list[str], other: list[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


def ring_with_positions(at: Callable[[str], int]) -> Any:
    """Return a copy of the module with other positions, and with caches of its own."""
    spec = not_none(importlib.util.find_spec(ring.__name__))
    own = importlib.util.module_from_spec(spec)
    not_none(spec.loader).exec_module(own)
    vars(own)["position"] = at
    return own


# -- home workers -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [["a"], ["a", "b", "c"], HUNDRED[:17]])
@pytest.mark.parametrize("shards", [1, 2, 50, 333])
def test_homes_match_the_published_definition(workers: list[str], shards: int) -> None:
    assert homes(workers, shards) == as_published(workers, shards)


@given(st.lists(st.sets(st.sampled_from(HUNDRED[:9]), min_size=1), max_size=6), st.integers(0, 60))
@settings(deadline=None)
def test_homes_do_not_depend_on_earlier_calls(requested: list[set[str]], shards: int) -> None:
    for members in requested:
        assert homes(members, shards) == as_published(sorted(members), shards)


def test_the_order_of_members_and_repetitions_do_not_matter() -> None:
    workers = HUNDRED[:9]
    assert homes(workers[::-1], 100) == homes(workers, 100)
    assert homes(workers + workers, 100) == homes(workers, 100)
    assert assign(workers[::-1], 100) == assign(workers, 100)


def test_only_shards_of_the_removed_member_change_their_home() -> None:
    all_homes, fewer = homes(HUNDRED, 5000), homes(HUNDRED[:50] + HUNDRED[51:], 5000)
    for one, other in zip(all_homes, fewer, strict=True):
        assert one == other or one == HUNDRED[50]


def test_a_shard_exactly_at_a_point_belongs_to_it() -> None:
    shards = {"shard/0": 20, "shard/1": 21, "shard/2": 41, "shard/3": 0, "shard/4": 51}
    first, others = {"a": 20, "b": 40, "c": 40}, {"a": 50, "b": 40, "c": 40}

    def at(text: str) -> int:
        if text.startswith("shard/"):
            return shards[text]
        _, worker, k = text.split("/")
        return (first if k == "0" else others)[worker]

    own = ring_with_positions(at)
    assert own.homes(["a", "b"], 5) == ["a", "b", "a", "a", "a"]
    assert own.homes(["c", "b"], 5) == ["b"] * 5, "of equal points the smaller name"
    assert own.homes(["a"], 1) == ["a"]


@pytest.mark.parametrize("history", [("a", "abc", "bc", "c"), ("c", "bc", "abc"), ("abc", "bc", "abc", "ab")])
def test_of_equal_points_the_smaller_name_counts_after_any_change(history: Sequence[str]) -> None:
    def at(text: str) -> int:
        kind, *name, number = text.split("/")
        return 3 * int(number) if kind == "shard" else 100 + int(number) * (1 if name == ["b"] else 2)

    changed = ring_with_positions(at)
    for members in history:
        assert changed.homes(members, 100) == ring_with_positions(at).homes(members, 100)


def test_positions_are_exact_in_a_double() -> None:
    for text in ("shard/0", "member/w/31", ""):
        assert 0 <= position(text) < 2**53
        assert int(float(position(text))) == position(text)


@pytest.mark.parametrize("empty", [homes, assign])
def test_a_ring_without_members_is_refused(empty: object) -> None:
    assert callable(empty)
    with pytest.raises(ValueError, match="one member or more"):
        empty([], 3)


def test_zero_shards_yield_an_empty_assignment() -> None:
    assert homes(["a"], 0) == []
    assert assign(["a", "b"], 0) == {}


# -- the leader's choice ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "shards", "receives", "owns"),
    [
        (100, 10_000, 104, 104),
        (101, 10_000, 102, 103),
        (40, 1_000, 26, 26),
        (3, 10, 4, 4),
        (7, 7, 1, 2),
        (7, 3, 1, 2),
        (1, 50, 52, 52),
    ],
)
def test_a_member_receives_up_to_four_percent_more_than_the_mean(
    workers: int, shards: int, receives: int, owns: int
) -> None:
    assert receiving_limit(workers, shards) == receives
    assert bound(workers, shards) == owns


class Divided:
    """The members, and the assignment of their shards."""

    def __init__(self, members: Sequence[str], shards: int) -> None:
        self.members, self.shards = members, shards
        self.moved = assign(members, shards)
        self.owners = owners(members, shards, self.moved)

    def after(self, members: Sequence[str]) -> Divided:
        found = copy(self)
        found.members, found.moved = members, assign(members, self.shards, self.members, self.moved)
        found.owners = owners(members, self.shards, found.moved)
        return found

    def load(self) -> int:
        return max(Counter(self.owners).values())

    def new_owners_since(self, before: Divided) -> list[tuple[str, str]]:
        """Return the owner before and after of every shard that moved."""
        return [pair for pair in zip(before.owners, self.owners, strict=True) if pair[0] != pair[1]]


@pytest.mark.parametrize("shards", [1000, 10_000])
@pytest.mark.parametrize("count", [10, 40, 100])
def test_a_member_that_leaves_moves_its_shards_and_no_other(count: int, shards: int) -> None:
    before = Divided(HUNDRED[:count], shards)
    for departed in HUNDRED[:count:7]:
        after = before.after([name for name in HUNDRED[:count] if name != departed])
        moves = after.new_owners_since(before)
        assert {old for old, _new in moves} == {departed}
        assert len(moves) == before.owners.count(departed)
        assert after.load() <= receiving_limit(count - 1, shards)


@pytest.mark.parametrize("shards", [1000, 10_000])
@pytest.mark.parametrize("count", [10, 40, 100])
def test_a_member_that_joins_moves_only_its_share(count: int, shards: int) -> None:
    before = Divided(HUNDRED[:count], shards)
    after = before.after([*HUNDRED[:count], "new"])
    moves = after.new_owners_since(before)
    assert {new for _old, new in moves} == {"new"}
    assert 0.5 * shards / (count + 1) < len(moves) <= math.ceil(shards / (count + 1))
    assert after.load() <= bound(count + 1, shards)


def test_members_that_join_together_get_a_share_each() -> None:
    before = Divided(HUNDRED[:20], 2000)
    after = before.after(HUNDRED[:30])
    assert {new for _old, new in after.new_owners_since(before)} == set(HUNDRED[20:30])
    assert all(45 < after.owners.count(name) <= 67 for name in HUNDRED[20:30])


def test_a_joining_member_takes_the_mean_rounded_up_from_the_fullest_member_first() -> None:
    moved = {"b": range(60), "c": range(60, 90), "a": range(90, 101)}
    with_d = owners("abcd", 101, assign("abcd", 101, "abc", moved))
    assert Counter(with_d) == {"a": 11, "b": 34, "c": 30, "d": 26}


@pytest.mark.parametrize("shards", [10_000, 14_321])
def test_loads_stay_within_five_percent_of_a_mean_of_a_hundred_shards(shards: int) -> None:
    now = Divided(HUNDRED, shards)
    sizes = (*range(100, 60, -1), *range(60, 101))
    for size in sizes:
        now = now.after(HUNDRED[:size])
        assert now.load() <= 1.05 * shards / size


def test_nothing_changes_without_a_change() -> None:
    before = Divided(HUNDRED, 5000)
    assert before.after(HUNDRED).moved == before.moved


def test_over_a_long_life_exceptions_stay_few() -> None:
    shards, fresh = 3000, 0
    now = Divided(HUNDRED[:30], shards)
    ratios, exceptions = [], []
    for turn in range(120):
        members = list(now.members)
        if turn % 3 == 1 or (turn % 3 == 0 and turn % 2):
            del members[turn % len(members)]
        else:
            fresh += 1
            members.append(f"new-{fresh}")
        after = now.after(members)
        ratios.append(len(after.new_owners_since(now)) * len(members) / shards)
        exceptions.append(sum(map(len, after.moved.values())))
        assert after.load() <= bound(len(members), shards)
        now = after
    assert sum(ratios) / len(ratios) < 1.05
    assert max(exceptions) < 0.25 * shards


names = st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=12)


@given(names, names, st.integers(0, 120))
@settings(deadline=None)
def test_any_change_gives_every_shard_to_a_member(one: set[str], other: set[str], shards: int) -> None:
    after = Divided(sorted(one), shards).after(sorted(other))
    assert len(after.owners) == shards
    assert set(after.owners) <= other


def json_bytes(moved: Moved) -> int:
    return len(json.dumps(moved, separators=(",", ":")))


def test_the_balance_bound_yields_to_the_size_limit_of_moved_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = Divided(HUNDRED, 10_000)
    limit = json_bytes(strict.moved) - 1
    monkeypatch.setattr(ring, "MAX_MOVED_BYTES", limit)
    loose = Divided(HUNDRED, 10_000)
    assert loose.moved
    assert json_bytes(loose.moved) <= limit
    assert loose.load() == 110
    monkeypatch.setattr(ring, "MAX_MOVED_BYTES", 3)
    assert assign(HUNDRED, 10_000) == {}


def test_a_change_keeps_to_the_size_limit_and_still_moves_only_the_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = Divided(HUNDRED, 10_000)
    joined = [*HUNDRED, "new"]
    limit = json_bytes(before.after(joined).moved) - 1
    monkeypatch.setattr(ring, "MAX_MOVED_BYTES", limit)
    after = before.after(joined)
    assert json_bytes(after.moved) <= limit
    assert {new for _old, new in after.new_owners_since(before)} == {"new"}
    monkeypatch.setattr(ring, "MAX_MOVED_BYTES", json_bytes(before.moved) // 2)
    after = before.after(joined)
    assert {new for _old, new in after.new_owners_since(before)} != {"new"}, "all shards were divided again"
    assert after.load() <= bound(101, 10_000, 40)
