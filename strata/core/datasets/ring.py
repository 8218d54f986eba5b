"""ring-v1: consistent hashing that gives every shard an owner. Published in docs/ring.md, with test vectors.

It has two parts. The *ring* gives every shard a *home*, a member. The home depends only on the set of members (on
the names of their seats, see `core.datasets.assignment`). The *moved* shards are exceptions that keep every
member's load bounded; the assignment lists them. So a client computes the owners with a few lines in any language,
and only the leader must bound the loads.

The bound is not part of the ring, unlike in "consistent hashing with bounded loads". That scheme computes the
owners from the members alone, so it decides every full member's overflow again after each change. With 10,000
shards and 100 members that scheme moved 1.6 times the share of a member that leaves. The leader uses the previous
assignment, and moves only that share.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain, compress, repeat
from operator import itemgetter, ne
from typing import Final, NamedTuple

import xxhash

RING: Final = "ring-v1"
POINTS: Final = 32
"""The virtual nodes of a member."""
PERCENTS: Final = (4, 10, 20, 40)
"""A member receives shards up to the mean plus 4 %. The others follow if the moved shards would take too many bytes."""
MAX_MOVED_BYTES: Final = 40 * 1024
"""The limit for the moved shards as JSON."""
FEW: Final = 4
"""If so many members come or go, changing the latest ring takes less time than making a new one."""

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
    members = frozenset(workers)
    if not members:
        raise ValueError("a ring has one member or more")
    return _ring(members, shards).homes.copy()


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
        places = [float(position(f"shard/{shard}")) for shard in range(shards)]
        self.in_order = sorted(range(shards), key=places.__getitem__)
        self.places = [places[shard] for shard in self.in_order]
        turn = [0] * shards
        for index, shard in enumerate(self.in_order):
            turn[shard] = index
        # itemgetter picks at C speed, and returns a tuple only for two or more items
        self.by_number = itemgetter(*turn) if shards > 1 else tuple
        self.latest: _Ring | None = None

    def between(self, low: float, high: float) -> list[int]:
        """Return the shards after the position `low`, up to `high`; the ring continues from its end to its start."""
        first, end = bisect_right(self.places, low), bisect_right(self.places, high)
        return self.in_order[first:end] if low <= high else self.in_order[first:] + self.in_order[:end]


@lru_cache(maxsize=4)
def _shards(shards: int) -> _Shards:
    return _Shards(shards)


@lru_cache(maxsize=20_000)
def _points(member: str, shards: int) -> dict[float, tuple[int, str]]:
    """Return a member's points, in order, each with the number of shards up to it."""
    places = _shards(shards).places
    points = sorted(float(position(f"member/{member}/{k}")) for k in range(POINTS))
    return {point: (bisect_right(places, point), member) for point in points}


class _Ring(NamedTuple):
    """All points of some members, in order, and the homes by shard number."""

    members: frozenset[str]
    places: list[float]
    """The position of each point."""
    names: list[str]
    """The member of each point."""
    homes: list[str]

    def after(self, members: frozenset[str], shards: _Shards) -> _Ring:
        """Return the ring of these members. Changes only the homes near points that come or go."""
        ring = _Ring(members, self.places.copy(), self.names.copy(), self.homes.copy())
        # members that joined come first, so that the ring always has a point
        for member in (*members.difference(self.members), *self.members.difference(members)):
            for place in _points(member, len(self.homes)):
                ring._change(place, member, shards)
        return ring

    def _change(self, place: float, member: str, shards: _Shards) -> None:
        index = bisect_left(self.places, place)
        while self.places[index : index + 1] == [place] and self.names[index] < member:
            index += 1
        if member in self.members:
            self.places.insert(index, place)
            self.names.insert(index, member)
        else:
            del self.places[index], self.names[index]
        home = self.names[index % len(self.names)]
        for shard in shards.between(self.places[index - 1], place):
            self.homes[shard] = home


@lru_cache(maxsize=16)
def _ring(members: frozenset[str], shards: int) -> _Ring:
    """Return the ring of these members. Faster if they differ little from those of the latest call."""
    on_ring = _shards(shards)
    latest = on_ring.latest
    if (
        latest is not None
        and len(members ^ latest.members) <= FEW
        and len(latest.places) == POINTS * len(latest.members)
    ):
        ring = latest.after(members, on_ring)
    else:
        ring = _new_ring(members, on_ring)
    on_ring.latest = ring
    return ring


def _new_ring(members: frozenset[str], shards: _Shards) -> _Ring:
    """Return the ring of these members. Of equal points, it has one. Fast, because it iterates over points."""
    found: dict[float, tuple[int, str]] = {}
    for member in sorted(members, reverse=True):  # so that the smaller name wins if two points are equal
        found |= _points(member, len(shards.places))
    places = sorted(found)  # a merge of runs: each member's points are in order
    names: list[str] = []
    homes: list[str] = []
    start = 0
    for end, member in map(found.__getitem__, places):
        names.append(member)
        if end > start:
            homes += [member] * (end - start)
            start = end
    homes += [names[0]] * (len(shards.places) - len(homes))
    return _Ring(members, places, names, list(shards.by_number(homes)))


# -- the leader's part ------------------------------------------------------------------------


def receiving_limit(workers: int, shards: int, percent: int = PERCENTS[0]) -> int:
    """Return the load up to which one of this many members receives shards."""
    return max(_rounded_up(shards, workers), shards * (100 + percent) // (100 * workers))


def bound(workers: int, shards: int, percent: int = PERCENTS[0]) -> int:
    """Return the most shards that one of this many members owns, whichever members joined and left before.

    A member may own more than it would receive: if a member joins, the limit falls, and the new member takes its
    share and no more. docs/ring.md has the proof.
    """
    return _rounded_up(max(shards * (100 + percent), 100 * (shards + workers - 1)), 100 * workers)


def assign(
    workers: Iterable[str], shards: int, before: Iterable[str] = (), moved: Moved | None = None
) -> Moved:
    """Return the moved shards of an assignment that moves as few shards as possible from the one before it.

    `before`, `moved`: the members and the moved shards so far; no members if the shards have no owners yet. Only two
    kinds of shards get another owner: those of members that left, and a share for each member that joined. The result
    depends only on the arguments, and not on their order.
    """
    members, known = frozenset(workers), frozenset(before)
    if not members:
        raise ValueError("a ring has one member or more")
    for percent in PERCENTS if known else ():
        found = _Division(members, shards, owners(known, shards, moved or {})).changed(known, percent)
        if _json_bytes(found, shards) <= MAX_MOVED_BYTES:
            return found
    for percent in PERCENTS:
        found = _Division(members, shards).levelled(percent)
        if _json_bytes(found, shards) <= MAX_MOVED_BYTES:
            return found
    return {}


class _Division:
    """The owners and the loads while the leader chooses. At first each shard's owner is its home, or as given."""

    def __init__(self, members: frozenset[str], shards: int, owner: list[str] | None = None) -> None:
        self.members = members
        self.shards = range(shards)
        self.home = _ring(members, shards).homes
        self.owner = owner if owner is not None else self.home.copy()
        self.load = Counter(self.owner)
        self.touched: list[int] = []
        """All shards whose owner is another member than their home, and some others."""
        if owner is not None:
            self.touched += compress(self.shards, map(ne, owner, self.home))

    def levelled(self, percent: int) -> Moved:
        """Return the moved shards after members above the limit gave shards to the members with the fewest."""
        limit = receiving_limit(len(self.members), len(self.shards), percent)
        self._receive(self._released(len(self.shards), limit), self.members, limit)
        return self._moved()

    def changed(self, before: frozenset[str], percent: int) -> Moved:
        """Return the moved shards after the change from the members `before`."""
        limit = receiving_limit(len(self.members), len(self.shards), percent)
        departed, joined = before - self.members, self.members - before
        if departed:
            left = [shard for shard in self.touched if self.owner[shard] in departed]
            for member in departed:
                del self.load[member]
            self._receive(left, self.members, limit)
        if joined:
            share = _rounded_up(len(self.shards), len(self.members))
            at_home = [shard for shard in self.touched if self.home[shard] in joined]
            wanted = sum(max(0, share - self.load[member]) for member in joined)
            self._receive(self._released(wanted, limit, at_home), joined, share)
            for shard in at_home:
                owner, home = self.owner[shard], self.home[shard]
                if owner != home and self.load[home] < share:
                    self.load[owner] -= 1
                    self._give(shard, home)
        return self._moved()

    def _released(self, most: int, limit: int, first: Sequence[int] = ()) -> list[int]:
        """Take shards from members above the limit, one at a time from the fullest; return at most `most`.

        A member gives up the shards of `first`, then other shards whose home is elsewhere, then those at home.
        """
        above = {member: -load for member, load in self.load.items() if load > limit}
        excess = -sum(above.values()) - limit * len(above)
        quota = _to_smallest(min(most, excess), above)
        self.load.subtract(quota)
        if not quota:
            return []
        released: list[int] = []
        at_home = _shards(len(self.shards)).in_order

        def in_turn() -> Iterator[int]:
            return chain(reversed(first), reversed(self.touched), reversed(at_home))

        for shard in compress(in_turn(), map(quota.__contains__, map(self.owner.__getitem__, in_turn()))):
            owner = self.owner[shard]
            self.owner[shard] = ""
            released.append(shard)
            quota[owner] -= 1
            if quota[owner] == 0:
                del quota[owner]
                if not quota:
                    break
        self.touched += released
        return released

    def _receive(self, shards: Iterable[int], receivers: frozenset[str], limit: int) -> None:
        """Give each shard to its home if the home is below the limit, else to the member with the fewest."""
        homeless: list[int] = []
        for shard in shards:
            home = self.home[shard]
            if home in receivers and self.load[home] < limit:
                self._give(shard, home)
            else:
                homeless.append(shard)
        quota = _to_smallest(len(homeless), {member: self.load[member] for member in sorted(receivers)})
        for shard, member in zip(
            homeless, chain.from_iterable(map(repeat, quota, quota.values())), strict=True
        ):
            self._give(shard, member)

    def _give(self, shard: int, member: str) -> None:
        self.owner[shard] = member
        self.load[member] += 1

    def _moved(self) -> Moved:
        moved: dict[str, list[int]] = {}
        for shard in sorted(set(self.touched)):
            if self.owner[shard] != self.home[shard]:
                moved.setdefault(self.owner[shard], []).append(shard)
        return moved


def _to_smallest(amount: int, loads: Mapping[str, int]) -> dict[str, int]:
    """Return how many of `amount` shards each member gets if each goes to the member with the smallest load then."""
    if not amount:
        return {}

    def needed(level: int) -> int:
        return sum(level - load for load in loads.values() if load < level)

    levels = range(min(loads.values()), min(loads.values()) + amount + 1)
    level = levels[bisect_right(levels, amount, key=needed) - 1]  # the highest that all members can reach
    found = {member: level - load for member, load in loads.items() if load < level}
    rest = amount - sum(found.values())
    for member in sorted(member for member, load in loads.items() if load <= level)[:rest]:
        found[member] = found.get(member, 0) + 1
    return found


def _rounded_up(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _json_bytes(moved: Moved, shards: int) -> int:
    """Return the most bytes that the moved shards take as JSON."""
    return sum(len(worker) + 6 + len(taken) * (len(str(shards - 1)) + 1) for worker, taken in moved.items())
