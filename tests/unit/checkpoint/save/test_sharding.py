"""Which rank writes which chunks of replicated tensors, and the source of each box in a restore."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.save import sharding
from strata.checkpoint.save.sharding import Box, gap, share, sources
from tests.not_none import not_none

SIZES = st.dictionaries(
    st.text("abc", min_size=1, max_size=3),
    st.one_of(st.integers(0, 40), st.integers(0, 6 * CHUNK_BYTES)),
    max_size=8,
)


@given(SIZES, st.integers(1, 7))
def test_every_chunk_falls_to_exactly_one_replica(sizes: dict[str, int], replicas: int) -> None:
    shares = [share(sizes, replica=replica, replicas=replicas) for replica in range(replicas)]
    for name, size in sizes.items():
        numbers = [number for each in shares for number in each[name]]
        assert sorted(numbers) == list(range(-(-size // CHUNK_BYTES)))


@given(SIZES, st.integers(1, 7))
def test_no_replica_writes_much_more_than_its_share(sizes: dict[str, int], replicas: int) -> None:
    total = sum(sizes.values())
    for replica in range(replicas):
        mine = sum(
            min(CHUNK_BYTES, sizes[name] - number * CHUNK_BYTES)
            for name, numbers in share(sizes, replica=replica, replicas=replicas).items()
            for number in numbers
        )
        assert mine <= total / replicas + CHUNK_BYTES


def test_the_order_in_which_a_replica_has_its_tensors_does_not_matter() -> None:
    sizes = {"b": 3 * CHUNK_BYTES, "a": CHUNK_BYTES, "c": 5}
    turned = dict(reversed(sizes.items()))
    assert share(sizes, replica=1, replicas=3) == share(turned, replica=1, replicas=3)


def grid(shape: tuple[int, ...], cuts: tuple[int, ...]) -> list[Box]:
    """Cut a tensor into boxes of `cuts` elements along each dimension."""
    axes = [
        [(start, min(step, size - start)) for start in range(0, size, step)]
        for size, step in zip(shape, cuts, strict=True)
    ]
    return [Box(tuple(a for a, _ in one), tuple(n for _, n in one)) for one in itertools.product(*axes)]


SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)


@given(st.data())
def test_any_box_is_found_in_any_partitioning(data: st.DataObject) -> None:
    shape: tuple[int, ...] = data.draw(SHAPES)
    steps = st.tuples(*(st.integers(1, 7) for _ in shape))
    pieces = grid(shape, data.draw(steps))
    wanted = data.draw(st.sampled_from(grid(shape, data.draw(steps))))
    assert gap(shape, pieces) is None
    found = not_none(sources(wanted, pieces))
    elements = sorted(
        index
        for number, box in found
        for index in itertools.product(*(range(s.start, s.stop) for s in box.slices()))
        if box.overlap(pieces[number]) == box
    )
    assert elements == sorted(itertools.product(*(range(s.start, s.stop) for s in wanted.slices())))


def test_a_grid_of_128_x_128_ranks_is_whole_and_no_two_parts_are_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharding, "MAX_COMPARED", 0)  # a million pairs would take seconds
    assert gap((256, 256), grid((256, 256), (2, 2))) is None


def test_equal_boxes_count_once() -> None:
    half = Box((0,), (2,))
    assert sources(Box((0,), (4,)), [half, half, Box((2,), (2,))]) == [(0, half), (2, Box((2,), (2,)))]


def test_missing_and_overlapping_boxes_are_reported() -> None:
    assert gap((4,), [Box((0,), (2,))]) == "2 of 4 elements are there"
    assert gap((4, 2), [Box((0, 0), (3, 2)), Box((2, 0), (2, 2))]) is not None
    assert "outside" in str(gap((4,), [Box((2,), (3,))]))
    assert gap((), [Box((), ())]) is None
    assert gap((0, 3), []) is None
    assert sources(Box((1,), (3,)), [Box((0,), (2,))]) is None


@pytest.mark.parametrize(
    ("box", "hull", "run"),
    [
        (Box((1, 0), (2, 4)), (4, 12), True),
        (Box((1, 1), (1, 2)), (5, 7), True),
        (Box((1, 1), (2, 2)), (5, 11), False),
        (Box((0, 0), (3, 4)), (0, 12), True),
    ],
)
def test_a_box_knows_its_hull_and_whether_it_is_contiguous(
    box: Box, hull: tuple[int, int], run: bool
) -> None:
    assert box.hull((3, 4)) == hull
    assert box.is_run((3, 4)) is run
    assert math.prod(box.shape) == box.count
