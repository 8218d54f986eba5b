"""The order of an epoch: a bijection that is the same on every machine, and can be computed at any position."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.order import Order, mix, shares


@given(length=st.integers(0, 400), seed=st.integers(0, 2**64 - 1), epoch=st.integers(0, 10**6))
def test_every_sample_comes_once(length: int, seed: int, epoch: int) -> None:
    order = Order(length, seed=seed, epoch=epoch)
    assert sorted(order[i] for i in range(length)) == list(range(length))


@given(length=st.integers(1, 10**12), seed=st.integers(0, 2**64 - 1), data=st.data())
def test_take_returns_the_same_samples_as_single_positions(
    length: int, seed: int, data: st.DataObject
) -> None:
    import numpy  # noqa: F401, PLC0415  # `take` uses numpy if the program has imported it

    begin = data.draw(st.integers(0, length - 1))
    end = min(length, begin + 100)
    order = Order(length, seed=seed, epoch=3)
    assert order.take(begin, end) == [order[i] for i in range(begin, end)]


@given(
    length=st.integers(1, 10**12),
    seed=st.integers(0, 2**64 - 1),
    sizes=st.lists(st.integers(0, 700), max_size=20),
    shuffle=st.booleans(),
)
def test_takes_returns_the_same_samples_as_take(
    length: int, seed: int, sizes: list[int], shuffle: bool
) -> None:
    ranges, at = [], 0
    for size in sizes:
        ranges.append((at, min(length, at + size)))
        at = ranges[-1][1]
    order = Order(length, seed=seed, epoch=1, shuffle=shuffle)
    assert list(order.takes(ranges)) == [order.take(begin, end) for begin, end in ranges]


def test_the_order_is_the_same_without_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    order = Order(1000, seed=7, epoch=1)
    with_arrays = order.take(0, 1000)
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert order.take(0, 1000) == with_arrays


def test_the_published_vectors() -> None:
    assert mix(1) == 0x5692161D100B05E5
    assert Order(10, seed=0, epoch=0).take(0, 10) == [4, 1, 6, 2, 3, 7, 0, 8, 9, 5]
    assert Order(10, seed=0, epoch=1).take(0, 10) == [2, 0, 6, 5, 1, 7, 3, 9, 8, 4]
    assert [Order(10**9, seed=42, epoch=7)[i] for i in (0, 1, 10**9 - 1)] == [232014606, 799643597, 697663331]


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = {
        tuple(Order(50, seed=seed, epoch=epoch).take(0, 50)) for seed in range(10) for epoch in range(10)
    }
    assert len(orders) == 100


def test_the_order_is_statistically_random() -> None:
    # every sample is about equally often at every position, and adjacent samples do not stay adjacent
    count, length = 2000, 20
    at = [[0] * length for _ in range(length)]
    for epoch in range(count):
        for place, sample in enumerate(Order(length, seed=1, epoch=epoch).take(0, length)):
            at[place][sample] += 1
    expected = count / length
    chi2 = sum((n - expected) ** 2 / expected for row in at for n in row)
    degrees = (length - 1) ** 2
    assert abs(chi2 - degrees) < 6 * (2 * degrees) ** 0.5
    order = Order(10_000, seed=3, epoch=0).take(0, 10_000)
    assert sum(abs(a - b) == 1 for a, b in pairwise(order)) < 20


def test_without_shuffle_the_order_is_that_of_the_data() -> None:
    assert Order(5, seed=9, epoch=9, shuffle=False).take(1, 4) == [1, 2, 3]
    assert Order(5, seed=9, epoch=9, shuffle=False)[4] == 4


@pytest.mark.parametrize("place", [-1, 5])
def test_a_position_outside_of_the_epoch_raises_index_error(place: int) -> None:
    with pytest.raises(IndexError):
        Order(5, seed=0, epoch=0)[place]


def test_shares_differ_by_one_at_most() -> None:
    assert shares(10, 3) == [4, 3, 3]
    assert shares(2, 3) == [1, 1, 0]
