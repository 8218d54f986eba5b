"""The order of an epoch: a permutation of its samples that is computed, not stored (docs/data.md has test vectors).

`Order(length, seed, epoch)[i]` is the sample at place `i`, found in constant time. So a training that resumes in
the middle of an epoch needs neither the epoch's beginning nor a list of its samples, and every world computes the
same order. The definition never changes; in a form for other languages:

    a = ceil(sqrt(length)),  b = ceil(length / a),  all arithmetic on 64 bits without sign
    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key = mix(mix(seed + G) + epoch + G),  key_r = mix(key + (r + 1) * G),  G = 0x9E3779B97F4A7C15
    i -> (l, h) = (i mod a, i div a)
    for r = 0 … 7:  r even:  l = (l + mix(key_r + h * G)) mod a
                    r odd:   h = (h + mix(key_r + l * G)) mod b
    -> h * a + l; while that is not below length, repeat with it as i

This is an alternating Feistel network over a times b places, a bijection, repeated until the result is below length.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, Protocol

ROUNDS: Final = 8
_GOLDEN: Final = 0x9E3779B97F4A7C15
_MASK: Final = (1 << 64) - 1
_FIRST: Final = 0xBF58476D1CE4E5B9
_SECOND: Final = 0x94D049BB133111EB
_WORTH_AN_ARRAY: Final = 64
_AHEAD: Final = 2048


def mix(z: int) -> int:
    """Return splitmix64's finaliser of 64 bits."""
    z &= _MASK
    z = ((z ^ (z >> 30)) * _FIRST) & _MASK
    z = ((z ^ (z >> 27)) * _SECOND) & _MASK
    return z ^ (z >> 31)


class EpochOrder(Protocol):
    """The samples of one epoch in training order."""

    def take(self, begin: int, end: int) -> list[int]:
        """Return the samples at the places from `begin` to before `end`."""
        ...

    def takes(self, ranges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
        """Yield the samples of each range of places; may compute some ranges ahead."""
        ...


class Order:
    """An epoch's order that is computed: `order-v1`, or the samples one after another if not `shuffle`."""

    def __init__(self, length: int, *, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.length = length
        self._shuffle = shuffle
        self._a = math.isqrt(max(length - 1, 0)) + 1
        self._b = -(-length // self._a) if length else 1
        key = mix(mix(seed + _GOLDEN) + epoch + _GOLDEN)
        self._keys = tuple(mix(key + (r + 1) * _GOLDEN) for r in range(ROUNDS))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:
        """Return the sample at `place`; `IndexError` outside the epoch."""
        if not 0 <= place < self.length:
            raise IndexError(f"place {place} of an epoch of {self.length} samples")
        if not self._shuffle:
            return place
        at = self._permute(place)
        while at >= self.length:
            at = self._permute(at)
        return at

    def take(self, begin: int, end: int) -> list[int]:
        """Return the samples at the places from `begin` to before `end`."""
        if not self._shuffle:
            return list(range(begin, end))
        numpy = sys.modules.get("numpy")
        if numpy is None or end - begin < _WORTH_AN_ARRAY:
            return [self[place] for place in range(begin, end)]
        if not 0 <= begin <= end <= self.length:
            raise IndexError(f"places {begin} to {end} of an epoch of {self.length} samples")
        return self._take_array(numpy, begin, end)

    def takes(self, ranges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
        """Yield the samples of each range of places, computed some thousand at a time if NumPy is imported."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not self._shuffle:
            for begin, end in ranges:
                yield self.take(begin, end)
            return
        ahead = iter(ranges)
        while some := _some(ahead):
            places = [numpy.arange(begin, end, dtype=numpy.uint64) for begin, end in some]
            if max(end for _begin, end in some) > self.length:
                raise IndexError(f"a place beyond an epoch of {self.length} samples")
            found = self._permuted(numpy, numpy.concatenate(places))
            at = 0
            for begin, end in some:
                yield found[at : at + end - begin]
                at += end - begin

    def _permute(self, place: int) -> int:
        a, b, keys = self._a, self._b, self._keys
        high, low = divmod(place, a)
        for r in range(0, ROUNDS, 2):
            low = (low + mix(keys[r] + high * _GOLDEN)) % a
            high = (high + mix(keys[r + 1] + low * _GOLDEN)) % b
        return high * a + low

    def _take_array(self, numpy: Any, begin: int, end: int) -> list[int]:
        """Do the same as `take` for many places."""
        return self._permuted(numpy, numpy.arange(begin, end, dtype=numpy.uint64))

    def _permuted(self, numpy: Any, at: Any) -> list[int]:
        """Return the samples at these places: NumPy's 64-bit arithmetic wraps around as in the definition."""
        u64 = numpy.uint64
        outside = numpy.ones(len(at), dtype=bool)
        while outside.any():
            at[outside] = self._permute_array(numpy, at[outside])
            outside = at >= u64(self.length)
        found: list[int] = at.tolist()
        return found

    def _permute_array(self, numpy: Any, places: Any) -> Any:
        u64 = numpy.uint64
        a, b, golden = u64(self._a), u64(self._b), u64(_GOLDEN)

        def mixed(z: Any) -> Any:
            z = (z ^ (z >> u64(30))) * u64(_FIRST)
            z = (z ^ (z >> u64(27))) * u64(_SECOND)
            return z ^ (z >> u64(31))

        low, high = places % a, places // a
        for r in range(0, ROUNDS, 2):
            # reduce before adding: the 64-bit sum must not wrap around
            low = (low + mixed(u64(self._keys[r]) + high * golden) % a) % a
            high = (high + mixed(u64(self._keys[r + 1]) + low * golden) % b) % b
        return high * a + low


class DrawnOrder:
    """An epoch's order that a program's own sampler gave as a list: an index may be repeated or missing."""

    def __init__(self, indices: Sequence[int]) -> None:
        self._indices = indices

    def takes(self, ranges: Iterable[tuple[int, int]]) -> Iterator[list[int]]:
        """Yield the samples of each range of places."""
        return (self.take(begin, end) for begin, end in ranges)

    def take(self, begin: int, end: int) -> list[int]:
        """Return the samples at the places from `begin` to before `end`."""
        return list(self._indices[begin:end])


def _some(ranges: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the next ranges of at least `_AHEAD` places together, or the remaining ones."""
    found: list[tuple[int, int]] = []
    count = 0
    for begin, end in ranges:
        found.append((begin, end))
        count += end - begin
        if count >= _AHEAD:
            break
    return found


def shares(total: int, parts: int) -> Sequence[int]:
    """Return `total` divided into `parts` numbers that differ by at most 1, the larger ones first."""
    each, more = divmod(total, parts)
    return [each + 1] * more + [each] * (parts - more)
