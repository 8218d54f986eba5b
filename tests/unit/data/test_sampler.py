"""The elastic sampler: the same global batches for any world, each sample once, no padding."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.data.sampler import ElasticSampler, Piece, check_split, piece_count
from strata.errors import ConfigError, InvalidArgument


def steps(sampler: ElasticSampler, world_size: int, *, epoch: int = 0, done: int = 0) -> list[list[int]]:
    """Return each step's samples of all ranks, in the order of the ranks and their pieces."""
    by_rank = []
    for rank in range(world_size):
        taken: list[list[int]] = [[]]
        pieces = sampler.pieces(rank, world_size, done=done)
        for piece, indices in zip(pieces, sampler.indices(epoch, rank, world_size, done=done), strict=True):
            taken[-1] += indices
            if piece.last:
                taken.append([])
        by_rank.append(taken[:-1])
    return [list(chain(*parts)) for parts in zip(*by_rank, strict=True)]


@given(
    length=st.integers(1, 300),
    share=st.integers(1, 6),
    one=st.sampled_from([1, 2, 3, 4, 6, 12]),
    other=st.sampled_from([1, 2, 3, 4, 6, 12]),
    most=st.sampled_from([None, 1, 2, 3, 5]),
)
def test_any_world_has_the_same_global_batches(
    length: int, share: int, one: int, other: int, most: int | None
) -> None:
    sampler = ElasticSampler(length, global_batch=12 * share, most=most, seed=5, drop_last=True)
    assert steps(sampler, one) == steps(sampler, other)


@given(length=st.integers(12, 300), world=st.sampled_from([1, 2, 3, 4]), cut=st.integers(0, 20))
def test_each_sample_comes_once_across_a_change_of_world_size(length: int, world: int, cut: int) -> None:
    sampler = ElasticSampler(length, global_batch=12, most=4)
    first = steps(sampler, 3)[:cut]
    done = sum(map(len, first))
    rest = steps(sampler, world, done=done)
    seen = [i for step in first + rest for i in step]
    assert len(seen) == len(set(seen))
    # only the last batch is left out, if it is too small for the world
    assert length - len(seen) < max(world, 3)


def test_the_weights_of_a_step_are_those_of_its_samples() -> None:
    sampler = ElasticSampler(31, global_batch=10, most=3, uneven=True)
    for world in (1, 2, 3, 4):
        weights: dict[int, float] = {}
        for rank in range(world):
            number = 0
            for piece in sampler.pieces(rank, world):
                one = (
                    piece.weight / (piece.end - piece.begin) / world
                )  # the weight of each sample, after the mean over ranks
                for place in range(piece.begin, piece.end):
                    weights[place] = one * piece.step_samples
                number += piece.last
        assert weights.keys() == set(range(30)) | ({30} if world == 1 else set())
        assert all(abs(weight - 1) < 1e-9 for weight in weights.values())


def test_accumulation_follows_the_world() -> None:
    sampler = ElasticSampler(48, global_batch=48, most=16)
    sizes = {w: [p.end - p.begin for p in sampler.pieces(0, w)] for w in (1, 2, 3, 4)}
    assert sizes == {1: [16, 16, 16], 2: [12, 12], 3: [16], 4: [12]}
    assert [p.last for p in sampler.pieces(0, 1)] == [False, False, True]
    assert [p.weight for p in sampler.pieces(0, 2)] == [0.5, 0.5]


def test_the_rest_of_an_epoch_is_divided_or_dropped_or_left_out() -> None:
    def last(**settings: Any) -> list[Piece]:
        return list(ElasticSampler(11, global_batch=8, **settings).pieces(0, 2))[1:]

    assert last() == [Piece(begin=8, end=10, last=True, step_samples=3, weight=4 / 3)]
    assert last(drop_last=True) == []
    assert list(ElasticSampler(9, global_batch=8).pieces(0, 2, done=8)) == []
    assert ElasticSampler(11, global_batch=8).left_out(2) == 0
    assert ElasticSampler(11, global_batch=8, drop_last=True).left_out(2) == 3
    assert ElasticSampler(9, global_batch=8).left_out(2) == 1
    assert ElasticSampler(11, global_batch=8).steps_left(2) == 2
    assert ElasticSampler(11, global_batch=8).steps_left(2, done=11) == 0


@given(
    length=st.integers(1, 300),
    global_batch=st.integers(1, 40),
    worlds=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    most=st.sampled_from([None, 1, 2, 3, 5]),
    cuts=st.lists(st.integers(0, 4), min_size=4, max_size=4),
)
def test_any_world_takes_its_shares_of_the_same_global_batches(
    length: int, global_batch: int, worlds: list[int], most: int | None, cuts: list[int]
) -> None:
    """A sequence of worlds of any size trains on one epoch, cut into the same global batches."""
    worlds = [min(world, global_batch) for world in worlds]
    sampler = ElasticSampler(length, global_batch=global_batch, most=most, seed=3)
    seen: list[int] = []
    for world, cut in zip(worlds, cuts, strict=False):
        for step in steps(sampler, world, done=len(seen))[:cut]:
            assert len(step) == min(global_batch, length - len(seen))
            seen += step
    assert seen == sampler.order(0).take(0, len(seen))


@given(
    global_batch=st.integers(1, 60),
    length=st.integers(1, 200),
    world=st.integers(1, 12),
    most=st.sampled_from([None, 1, 2, 3, 4, 7]),
)
def test_all_ranks_have_the_same_number_of_pieces_in_each_step(
    global_batch: int, length: int, world: int, most: int | None
) -> None:
    """Each piece is a backward pass, and so a collective of all ranks: every rank must have the same number."""
    world = min(world, global_batch)
    sampler = ElasticSampler(length, global_batch=global_batch, most=most)
    by_rank = [list(sampler.pieces(rank, world)) for rank in range(world)]
    assert len({tuple(piece.last for piece in pieces) for pieces in by_rank}) == 1
    sizes = [piece.end - piece.begin for pieces in by_rank for piece in pieces]
    assert all(size >= 1 for size in sizes)
    assert most is None or all(size <= max(most, 2) for size in sizes)


def test_shares_differ_by_one_sample_at_most() -> None:
    shares_ = [[piece.end - piece.begin for piece in sampler_of(10).pieces(rank, 3)] for rank in range(3)]
    assert shares_ == [[4], [3], [3]]


def sampler_of(global_batch: int) -> ElasticSampler:
    return ElasticSampler(global_batch, global_batch=global_batch)


def test_an_impossible_even_split_is_refused_with_the_nearest_valid_sizes() -> None:
    with pytest.raises(ConfigError) as refused:
        next(ElasticSampler(100, global_batch=48, uneven=False).pieces(0, 5))
    assert "48 samples cannot be split evenly over 5 ranks" in refused.value.message
    assert "4 or 6 ranks" in refused.value.hint
    assert "45 or 50" in refused.value.hint


def test_a_world_with_more_ranks_than_samples_is_refused() -> None:
    check_split(48, 5, uneven=True)
    with pytest.raises(
        ConfigError, match="a global batch of 4 samples leaves none for 1 of 5 ranks"
    ) as refused:
        check_split(4, 5, uneven=True)
    assert "at most 4 ranks, or with a global batch of at least 5" in refused.value.hint


@pytest.mark.parametrize(
    ("parts", "most", "uneven", "count"),
    [
        ([7], 4, False, 7),
        ([7], 4, True, 2),
        ([12, 12], 5, False, 3),
        ([3, 3], None, False, 1),
        ([5, 4], 4, True, 2),
        ([2, 1], 1, True, 1),
    ],
)
def test_the_piece_count_divides_all_parts_evenly_unless_uneven_is_allowed(
    parts: list[int], most: int | None, uneven: bool, count: int
) -> None:
    assert piece_count(parts, most, uneven=uneven) == count


@pytest.mark.parametrize("bad", [{"length": 0}, {"global_batch": 0}, {"most": 0}, {"length": 2.5}])
def test_invalid_sampler_arguments_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ElasticSampler(**{"length": 10, "global_batch": 2, **bad})
