"""ring-v1: consistent hashing that gives every shard an owner. Published in docs/ring.md, with test vectors.

It has two parts. The *ring* gives every shard a *home*, a member. The home depends only on the set of members (on
the names of their seats, see `core.datasets.assignment`). The *moved* shards are exceptions that keep every
member's load bounded; the assignment lists them. So a client computes the owners with a few lines in any language,
and only the leader must enforce the bound.

The bound is not part of the ring, unlike in "consistent hashing with bounded loads". That scheme computes the
owners from the members alone, so it decides every full member's overflow again after each change. With 10,000
shards and 100 members that scheme moved 1.6 times the share of a member that leaves. The leader uses the previous
assignment, and moves only that share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import itemgetter, ne, sub
from typing import Final, NamedTuple

import xxhash

RING: Final = "ring-v1"
POINTS: Final = 32
"""The virtual nodes of a member."""
BOUND_PERCENT: Final = 5
"""A member's load is at most the mean plus this percentage, or else the mean rounded up to a whole shard."""
MAX_MOVED_BYTES: Final = 40 * 1024
"""The limit for the moved shards as JSON; above it the bound is relaxed."""

Moved = Mapping[str, Sequence[int]]
"""By owner: the shards that this member owns although their home on the ring is another member."""


# -- the published part -----------------------------------------------------------------------


def position(text: str) -> int:
    """Return the position of `text` on the ring: the upper 53 bits of its xxh3-64 (seed 0, UTF-8).

    53 bits are exact in a double, the only number type of some languages.
    """
    return xxhash.xxh3_64_intdigest(text.encode()) >> 11


def homes(workers: Iterable[str], shards: int) -> list[str]:
    """Return the home of every shard: the member of the first point at or after the shard's position.

    The position of shard 7 is `position("shard/7")`. The k-th point of member w, with k from 0 to 31, is at
    `position("member/w/k")`. After the last point comes the first. Of two equal points, the one of the smaller name
    counts.
    """
    members = tuple(sorted(set(workers)))
    if not members:
        raise ValueError("a ring has one member or more")
    return list(_homes(members, shards))


def owners(workers: Iterable[str], shards: int, moved: Moved) -> list[str]:
    """Return the owner of every shard: its entry among the moved shards, else its home."""
    found = homes(workers, shards)
    for worker, taken in moved.items():
        for shard in taken:
            found[shard] = worker
    return found


class _Shards:
    """The positions of a dataset's shards on the ring; they do not depend on the members."""

    def __init__(self, shards: int) -> None:
        placed = sorted((float(position(f"shard/{shard}")), shard) for shard in range(shards))
        self.places = [place for place, _shard in placed]
        self.turn = [0] * shards
        for turn, (_place, shard) in enumerate(placed):
            self.turn[shard] = turn
        # itemgetter picks at C speed, and returns a tuple only for two or more items
        self.by_number = itemgetter(*self.turn) if shards > 1 else tuple


@lru_cache(maxsize=4)
def _shards(shards: int) -> _Shards:
    return _Shards(shards)


@lru_cache(maxsize=20_000)
def _points(worker: str, shards: int) -> dict[float, tuple[int, str]]:
    """Return a worker's points, in order, each with the number of shards up to it."""
    places = _shards(shards).places
    points = sorted(float(position(f"member/{worker}/{k}")) for k in range(POINTS))
    return {point: (bisect_right(places, point), worker) for point in points}


class _Ring(NamedTuple):
    """All points in order, each with the number of shards up to it and with its member."""

    points: list[float]
    ends: list[int]
    members: list[str]

    def without(self, departed: set[str]) -> _Ring:
        """Return the ring without these members. Requires that no two points are equal."""
        stays = [member not in departed for member in self.members]
        return _Ring(
            list(compress(self.points, stays)),
            list(compress(self.ends, stays)),
            list(compress(self.members, stays)),
        )

    def homes(self, shards: int) -> tuple[str, ...]:
        """Return the homes by shard number. Fast, because it iterates over points, not shards."""
        lengths = map(sub, self.ends, [0, *self.ends])
        found = list(chain.from_iterable(map(repeat, self.members, lengths)))
        found += [self.members[0]] * (shards - len(found))
        return _shards(shards).by_number(found)


@lru_cache(maxsize=16)
def _ring(workers: tuple[str, ...], shards: int) -> _Ring:
    found: dict[float, tuple[int, str]] = {}
    for worker in reversed(workers):  # so that the smaller name wins if two points are equal
        found.update(_points(worker, shards))
    points = sorted(found)  # a merge of runs: each worker's points are in order
    ends, members = zip(*map(found.__getitem__, points), strict=True)
    return _Ring(points, list(ends), list(members))


def _ring_after(before: Iterable[str], workers: tuple[str, ...], shards: int) -> _Ring:
    """Return the ring of `workers`; much faster if `workers` are `before` with some members removed."""
    known = tuple(sorted(before))
    departed = set(known).difference(workers)
    if departed and len(known) - len(departed) == len(workers):
        ring = _ring(known, shards)
        if len(ring.points) == POINTS * len(known):
            return ring.without(departed)
    return _ring(workers, shards)


@lru_cache(maxsize=16)
def _homes(workers: tuple[str, ...], shards: int) -> tuple[str, ...]:
    return _ring(workers, shards).homes(shards)


# -- the leader's part ------------------------------------------------------------------------


def bound(workers: int, shards: int, percent: int = BOUND_PERCENT) -> int:
    """Return the most shards that one of this many members may own."""
    mean_rounded_up = -(-shards // workers)
    return max(mean_rounded_up, shards * (100 + percent) // (100 * workers))


def assign(workers: Iterable[str], shards: int, before: Sequence[str] | None = None) -> Moved:
    """Return the moved shards that keep every load within the bound.

    `before`: the owners so far, if any. Three kinds of shards then move: shards of members that left; shards whose
    home is a newcomer, until the newcomer has the mean load; and shards that the bound forces to move. The result
    depends only on the arguments, and not on the order of `workers`.
    """
    members = tuple(sorted(set(workers)))
    if not members:
        raise ValueError("a ring has one member or more")
    tries: list[tuple[int, Sequence[str] | None]] = []
    if before is not None and len(before) == shards:
        tries.append((BOUND_PERCENT, before))
    tries += [(BOUND_PERCENT * times, None) for times in (1, 2, 4, 8)]
    for percent, start in tries:
        moved = _assign(members, shards, start, bound(len(members), shards, percent))
        if _json_bytes(moved) <= MAX_MOVED_BYTES:
            return moved
    return {}


def _assign(
    members: tuple[str, ...], shards: int, before: Sequence[str] | None, limit: int
) -> dict[str, list[int]]:
    ring = _ring(members, shards) if before is None else _ring_after(set(before), members, shards)
    home = ring.homes(shards)
    owner = list(home if before is None else before)
    load = Counter(owner)
    joined = set(members) - load.keys() if before is not None else set()
    mean = shards // len(members)

    def give(shard: int, member: str) -> None:
        load[owner[shard]] -= 1
        load[member] += 1
        owner[shard] = member

    for shard in _homeless(members, home, owner, load, limit, joined):
        newcomer = min(joined, key=lambda name: (load[name], name), default=None)
        if newcomer is not None and load[newcomer] < mean:
            give(shard, newcomer)
        else:
            give(shard, _below_limit(shard, ring, shards, load, limit))
    if joined:
        turn = _shards(shards).turn
        for shard in sorted(compress(range(shards), map(joined.__contains__, home)), key=turn.__getitem__):
            if owner[shard] != home[shard] and load[home[shard]] < mean:
                give(shard, home[shard])
    moved: dict[str, list[int]] = {}
    for shard in compress(range(shards), map(ne, owner, home)):
        moved.setdefault(owner[shard], []).append(shard)
    return moved


def _homeless(
    members: tuple[str, ...],
    home: Sequence[str],
    owner: Sequence[str],
    load: Counter[str],
    limit: int,
    joined: set[str],
) -> list[int]:
    """Return the shards that must move, in ring order: those of members that left or own too many.

    A member that owns too many gives up shards in this order: shards whose home is a newcomer; other shards whose
    home is not this member; and then, of the shards whose home is this member, the last in ring order.
    """
    staying = set(members)
    concerned = {name for name, count in load.items() if name not in staying or count > limit}
    turn = _shards(len(owner)).turn
    theirs: dict[str, list[int]] = {name: [] for name in concerned}
    for shard in compress(range(len(owner)), map(concerned.__contains__, owner)):
        theirs[owner[shard]].append(shard)
    found: list[int] = []
    for name, owned in theirs.items():
        if name in staying:
            owned.sort(key=turn.__getitem__)
            found += _by_right_to_stay(name, owned, home, joined)[limit:]
        else:
            found += owned
    return sorted(found, key=turn.__getitem__)


def _by_right_to_stay(name: str, owned: Sequence[int], home: Sequence[str], joined: set[str]) -> list[int]:
    at_home: list[int] = []
    elsewhere: list[int] = []
    with_joined: list[int] = []
    for shard in owned:
        if home[shard] == name:
            at_home.append(shard)
        else:
            (with_joined if home[shard] in joined else elsewhere).append(shard)
    return at_home + elsewhere + with_joined


def _below_limit(shard: int, ring: _Ring, shards: int, load: Counter[str], limit: int) -> str:
    """Return the shard's home if its load is below the limit; else the next member on the ring below the limit."""
    points, _ends, at = ring
    on_ring = _shards(shards)
    index = bisect_left(points, on_ring.places[on_ring.turn[shard]]) % len(points)
    while load[at[index]] >= limit:
        index = (index + 1) % len(points)
    return at[index]


def _json_bytes(moved: Moved) -> int:
    return sum(
        len(worker) + 6 + len(taken) + sum(map(len, map(str, taken))) for worker, taken in moved.items()
    )
