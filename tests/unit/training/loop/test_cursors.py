"""Positions of shards: saved by the rank that advances them, restored by the rank that reads them next."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.errors import CheckpointError, InvalidArgument
from strata.training.loop.cursors import CursorBook, Cursors, merged


def book(rank: int, texts: Iterable[str] = (), own: str = "") -> CursorBook:
    return CursorBook(rank=rank, own=own, of_ranks=lambda: texts)


def test_a_cursor_position_belongs_to_one_epoch() -> None:
    cursors = Cursors({3: (1, 40)})
    assert (cursors.position(3, epoch=1), cursors.position(3, epoch=2), cursors.position(4)) == (40, 0, 0)
    with pytest.raises(CheckpointError, match="shard 3 is in epoch 1, not in 0"):
        cursors.position(3)
    cursors.advance(3, 0, epoch=2)
    cursors.advance(3, 7, epoch=2)
    assert cursors.position(3, epoch=2) == 7


@pytest.mark.parametrize(
    ("shard", "position", "epoch"), [(3, 39, 1), (3, 100, 0), (-1, 0, 0), (0, -1, 0), (0, 0, -1), (0.5, 0, 0)]
)
def test_no_shard_goes_backwards(shard: int, position: int, epoch: int) -> None:
    cursors = Cursors({3: (1, 40)})
    with pytest.raises(InvalidArgument):
        cursors.advance(shard, position, epoch=epoch)


def test_a_rank_saves_its_own_cursors_and_rank_0_the_unread_ones() -> None:
    before = ['{"a":{"1":[0,10],"2":[0,20]},"b":{"7":[0,1]}}']
    books = [book(rank, before) for rank in range(3)]
    books[0].of("a")
    books[1].of("a").advance(2, 30)
    books[2].of("b").advance(7, 5)
    assert [one.saved() for one in books] == [
        '{"a":{"1":[0,10],"2":[0,20]},"b":{"7":[0,1]}}',
        '{"a":{"2":[0,30]}}',
        '{"b":{"7":[0,5]}}',
    ]
    assert merged(one.saved() for one in books) == {"a": {1: (0, 10), 2: (0, 30)}, "b": {7: (0, 5)}}


def test_an_unread_cursor_book_saves_its_own_text_unchanged() -> None:
    def never() -> Iterable[str]:
        raise AssertionError("nobody asked")

    assert CursorBook(rank=0, own="kept", of_ranks=never).saved() == "kept"


@pytest.mark.parametrize("text", ["{", "[]", '{"a":3}', '{"a":{"x":[0,1]}}', '{"a":{"1":[0]}}'])
def test_an_invalid_cursor_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="cursors cannot be read"):
        book(1, [text]).of("a")


@given(st.data())
def test_no_shard_is_lost_or_goes_back_across_worlds_of_any_size(data: st.DataObject) -> None:
    """Worlds of any size follow one another, and in each any rank advances any of its own shards."""
    texts: list[str] = []
    expected: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        size = data.draw(st.integers(1, 4))
        books = [book(rank, texts) for rank in range(size)]
        owner = {shard: data.draw(st.integers(0, size - 1)) for shard in range(5)}
        for shard, rank in owner.items():
            cursors = books[rank].of("d")
            assert cursors.position(shard) == expected.get(shard, 0)
            if data.draw(st.booleans()):
                expected[shard] = expected.get(shard, 0) + data.draw(st.integers(0, 9))
                cursors.advance(shard, expected[shard])
        books[0].of("d")
        texts = [one.saved() for one in books]
