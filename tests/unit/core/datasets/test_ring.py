from __future__ import annotations

import importlib.util
import json
from collections import Counter

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from strata.core.datasets import ring
from strata.core.datasets.ring import Moved, assign, bound, homes, owners, position
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


def divided(workers: list[str], shards: int, before: list[str] | None = None) -> list[str]:
    return owners(workers, shards, assign(workers, shards, before))


def moves(one: list[str], other: list[str]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=True))


# -- home workers -----------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [["a"], ["a", "b", "c"], HUNDRED[:17]])
@pytest.mark.parametrize("shards", [1, 2, 50, 333])
def test_homes_match_the_published_definition(workers: list[str], shards: int) -> None:
    assert homes(workers, shards) == as_published(workers, shards)


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

    spec = not_none(importlib.util.find_spec(ring.__name__))
    own = importlib.util.module_from_spec(spec)  # with caches of its own
    not_none(spec.loader).exec_module(own)
    vars(own)["position"] = at
    assert own.homes(["a", "b"], 5) == ["a", "b", "a", "a", "a"]
    assert own.homes(["c", "b"], 5) == ["b"] * 5, "of equal points the smaller name"
    assert own.homes(["a"], 1) == ["a"]


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


# -- the bound --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "shards", "most"),
    [(100, 10_000, 105), (3, 10, 4), (7, 7, 1), (7, 3, 1), (10, 1000, 105), (1, 50, 52)],
)
def test_the_bound_is_five_percent_or_rounding_up(workers: int, shards: int, most: int) -> None:
    assert bound(workers, shards) == most


@pytest.mark.parametrize("shards", [1000, 10_000])
@pytest.mark.parametrize("count", [10, 40, 100])
def test_a_member_that_leaves_moves_its_share_and_nothing_else(count: int, shards: int) -> None:
    before = divided(HUNDRED[:count], shards)
    share = Counter(before)
    for departed in range(0, count, 7):
        left = HUNDRED[:departed] + HUNDRED[departed + 1 : count]
        after = divided(left, shards, before)
        assert moves(before, after) == share[HUNDRED[departed]]
        assert max(Counter(after).values()) <= bound(count - 1, shards)


@pytest.mark.parametrize("shards", [1000, 10_000])
@pytest.mark.parametrize("count", [10, 40, 99])
def test_a_joining_member_moves_its_share_and_the_shards_over_the_bound(count: int, shards: int) -> None:
    before = divided(HUNDRED[:count], shards)
    after = divided(HUNDRED[: count + 1], shards, before)
    load = Counter(after)
    assert max(load.values()) <= bound(count + 1, shards)
    assert load[HUNDRED[count]] >= 0.5 * shards / (count + 1)
    limit = bound(count + 1, shards)
    forced = sum(max(0, owned - limit) for owned in Counter(before).values())
    assert moves(before, after) <= forced + shards / (count + 1)


def test_nothing_changes_without_a_change() -> None:
    moved = assign(HUNDRED, 5000)
    before = owners(HUNDRED, 5000, moved)
    assert assign(HUNDRED, 5000, before) == moved


def test_over_a_long_life_moves_stay_near_the_share_and_exceptions_few() -> None:
    shards, members, fresh = 3000, HUNDRED[:30], 0
    now = divided(members, shards)
    ratios, exceptions = [], []
    for turn in range(120):
        if turn % 3 == 1 or (turn % 3 == 0 and turn % 2):
            members = members[: turn % len(members)] + members[turn % len(members) + 1 :]
        else:
            fresh += 1
            members = [*members, f"new-{fresh}"]
        moved = assign(members, shards, now)
        after = owners(members, shards, moved)
        ratios.append(moves(now, after) * len(members) / shards)
        exceptions.append(sum(map(len, moved.values())))
        assert max(Counter(after).values()) <= bound(len(members), shards)
        now = after
    assert sum(ratios) / len(ratios) < 1.15
    assert max(exceptions) < 0.3 * shards


names = st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=12)


@given(names, names, st.integers(0, 120))
@settings(deadline=None)
def test_any_change_keeps_the_bound_and_drops_departed_members(
    one: set[str], other: set[str], shards: int
) -> None:
    before = divided(sorted(one), shards)
    after = divided(sorted(other), shards, before)
    load = Counter(after)
    assert set(load) <= other
    assert max(load.values(), default=0) <= bound(len(other), shards)
    assert len(after) == shards


def json_bytes(moved: Moved) -> int:
    return len(json.dumps(moved, separators=(",", ":")))


def test_the_balance_bound_yields_to_the_size_limit_of_moved_shards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    strict = assign(HUNDRED, 10_000)
    before = owners(HUNDRED, 10_000, strict)
    limit = json_bytes(strict) - 1
    monkeypatch.setattr(ring, "MAX_MOVED_BYTES", limit)
    for start in (None, before):
        loose = assign(HUNDRED, 10_000, start)
        assert loose
        assert json_bytes(loose) <= limit
        assert max(Counter(owners(HUNDRED, 10_000, loose)).values()) == 110
    monkeypatch.setattr(ring, "MAX_MOVED_BYTES", 3)
    assert assign(HUNDRED, 10_000) == {}


def test_another_number_of_shards_starts_a_new_assignment() -> None:
    assert assign(HUNDRED, 500, ["node-001"] * 400) == assign(HUNDRED, 500)
