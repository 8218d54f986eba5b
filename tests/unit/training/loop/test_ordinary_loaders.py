"""Loaders that support iteration only: which batches a step gets, and where an epoch ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.errors import BarrierTimeout, DatasetMismatch, StrataError, Unavailable
from strata.training.loop.ordinary_feed import OrdinaryFeed
from strata.training.rank_context import Alone
from strata.training.save.state import Position
from strata.training.settings_agreement import LOADER_BARRIER, LOADER_ROUNDS, Loaders
from tests.unit.training.making import make_run
from tests.unit.training.room import LIMIT_S, Room


class Reusing:
    """A loader that reuses one buffer for all its batches, and has more batches than its length says."""

    def __init__(self, count: int, length: int | None = None) -> None:
        self.drawn = 0
        self._count = count
        if length is not None:
            self.length = length

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        buffer = np.zeros(2, dtype=np.int64)
        for number in range(self._count):
            self.drawn = number + 1
            buffer[:] = number
            yield buffer


class Sized(Reusing):
    """A loader that reports a length."""

    def __len__(self) -> int:
        return self.length


def batches(count: int = 6, size: int = 2) -> list[np.ndarray[Any, Any]]:
    return [np.arange(i * size, (i + 1) * size) for i in range(count)]


def test_a_batch_is_drawn_when_its_turn_has_come() -> None:
    """A loader may reuse a batch's memory for the next batch."""
    loader = Sized(5, 5)
    feed = OrdinaryFeed(loader, 3, 1, length=5)
    seen = [(fed.batch[0].item(), loader.drawn, fed.last, fed.weight) for fed in feed.epoch(Position())]
    third = 1 / 3
    assert seen == [
        (0, 1, False, third),
        (1, 2, False, third),
        (2, 3, True, third),
        (3, 4, False, 0.5),
        (4, 5, True, 0.5),
    ]
    again = [(fed.batch[0].item(), fed.last) for fed in feed.epoch(Position(epoch_batches=3))]
    assert again == [(3, False), (4, True)]


def test_of_a_loader_without_a_length_one_batch_is_drawn_early_at_most() -> None:
    loader = Reusing(7)
    seen = [(loader.drawn, fed.last) for fed in OrdinaryFeed(loader, 3, 1).epoch(Position())]
    assert seen == [
        (2, False),
        (3, False),
        (3, True),
        (5, False),
        (6, False),
        (6, True),
        (7, True),
    ]
    loader = Reusing(3)
    seen_alone = [(fed.batch[0].item(), loader.drawn) for fed in OrdinaryFeed(loader, 1, 1).epoch(Position())]
    assert seen_alone == [(0, 1), (1, 2), (2, 3)], "where a batch is a step none is drawn early"


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_length_that_is_an_estimate_leaves_nothing_out(world_size: int, tmp_path: Path) -> None:
    """All ranks report the same length, and each loader has more batches."""
    room = Room(world_size)
    seen: dict[int, list[tuple[int, bool]]] = {rank: [] for rank in range(world_size)}

    def train(rank: int) -> None:
        run = make_run(room.rank(rank), tmp_path / str(rank), state={}, wait_s=LIMIT_S)
        for _ in run.steps(Sized(6, 3), accumulate=2):
            seen[rank].append((run.begun, run.last_of_step))
        run.abandon("the end", code=0)

    ranks = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in seen]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
    whole = [(1, False), (1, True), (2, True), (3, False), (3, True), (4, True)]
    assert seen == dict.fromkeys(range(world_size), whole)


def test_a_loader_that_ends_early_within_a_step_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    fed = list(OrdinaryFeed(Sized(3, 4), 2, 1, length=4).epoch(Position()))
    assert [one.last for one in fed] == [False, True, False]
    assert "the loader ended with 3 of 4 batches" in caplog.text


def test_an_ordinary_loader_is_fast_forwarded_and_the_log_reports_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    at = Position(epoch_batches=2)
    for before, reported in ((2, 1), (4, 2), (None, 1)):
        caplog.clear()
        feed = OrdinaryFeed(batches(4), 1, 2, before=before, exact=False)
        assert [fed.batch.tolist() for fed in feed.epoch(at)] == [[4, 5], [6, 7]]
        assert len(caplog.records) == reported
    assert list(OrdinaryFeed(batches(1), 1, 1, exact=False).epoch(at)) == []
    assert "the loader ended 1 batches before this position" in caplog.text


def test_an_ordinary_loader_in_another_world_is_refused_in_the_middle_of_an_epoch() -> None:
    at = Position(epoch=3, epoch_batches=2, epoch_samples=8)
    feed = OrdinaryFeed(batches(4), 1, 2, before=4, dataset="pile")
    with pytest.raises(DatasetMismatch, match=r"'pile' at sample 8 of epoch 3: 4 ranks trained .* are 2 now"):
        next(feed.epoch(at))
    assert len(list(feed.epoch(Position(epoch=4)))) == 4, "the next epoch is not concerned"


def test_a_loader_that_ends_before_the_position_is_refused() -> None:
    feed = OrdinaryFeed(batches(1), 1, 1)
    with pytest.raises(DatasetMismatch, match="the loader ended 1 batches before this position"):
        next(feed.epoch(Position(epoch_batches=2)))


def test_the_last_step_of_an_ordinary_loader_may_have_fewer_batches() -> None:
    """No batch's gradients are left for the next epoch, whether the length is known or not."""
    for loader, length in ((batches(5), 5), (iter(batches(5)), None)):
        feed = OrdinaryFeed(loader, 2, 1, length=length)
        fed = list(feed.epoch(Position()))
        assert [one.last for one in fed] == [False, True, False, True, True]
        assert [one.weight for one in fed] == [0.5, 0.5, 0.5, 0.5, 1.0]
        assert [(one.samples, one.batches) for one in fed if one.last] == [(4, 2), (4, 2), (2, 1)]


def test_loaders_of_different_lengths_end_at_the_same_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank with more batches is not left alone in a collective."""
    room = Room(2)
    seen: dict[int, list[int]] = {0: [], 1: []}

    def train(rank: int) -> None:
        run = make_run(room.rank(rank), tmp_path / str(rank), state={}, wait_s=LIMIT_S)
        for _ in range(2):
            for _batch in run.steps(data[rank]):
                seen[rank].append(run.begun)
        run.abandon("the end", code=0)

    data = {0: batches(5), 1: batches(3)}
    ranks = [threading.Thread(target=train, args=(rank,), daemon=True) for rank in data]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(LIMIT_S)
    assert seen == {0: [1, 2, 3, 4, 5, 6], 1: [1, 2, 3, 4, 5, 6]}
    assert "rank 0 leaves out 2 of its 5 batches of each epoch: rank 1 has 3" in caplog.text


def test_loaders_without_an_agreed_length_are_used_as_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Missing(Alone):
        world_size = 2

        def barrier(self, name: str, payload: bytes | None = None, **_: Any) -> dict[int, bytes]:
            raise BarrierTimeout("1 of 2 arrived", missing=["rank 1"])

    loaders = Loaders(Missing(world_size=1))
    assert [loaders.meet(5, "").shortest, loaders.meet(4, "").shortest] == [None, None]
    assert caplog.text.count("cannot learn if all ranks have the same data: 1 of 2 arrived") == 1, (
        "and nobody waits for the next one"
    )
    assert caplog.text.count("still waiting for another rank's loader") == LOADER_ROUNDS - 1


class Scripted(Alone):
    """One rank of two; each barrier round ends as the next item of `rounds` prescribes."""

    world_size = 2

    def __init__(self, *rounds: bytes | StrataError) -> None:
        super().__init__(world_size=1)
        self.rounds = [*rounds]

    def barrier(self, name: str, payload: bytes | None = None, **_: Any) -> dict[int, bytes]:
        outcome = self.rounds.pop(0)
        if isinstance(outcome, StrataError):
            raise outcome
        return {0: payload or b"", 1: outcome}


def reported(batches: int) -> bytes:
    return b'{"v":2,"batches":%d,"order":""}' % batches


def test_a_rank_that_is_late_with_its_loader_is_waited_for() -> None:
    late = BarrierTimeout("1 of 2 arrived", missing=["rank 1"])
    assert Loaders(Scripted(late, late, reported(3))).meet(5, "").shortest == 3


def test_agreed_lengths_are_kept_while_the_coordinators_are_lost() -> None:
    """If they were not kept, a rank would wait alone in a collective once the coordinators are lost."""
    loaders = Loaders(Scripted(reported(3), Unavailable("no outcome")))
    assert [loaders.meet(5, "").shortest for _ in range(3)] == [3, 3, 3]


def test_loaders_of_equal_length_are_compared_once() -> None:
    room = Room(2)
    others = threading.Thread(target=lambda: Loaders(room.rank(1)).meet(5, ""), daemon=True)
    others.start()
    loaders = Loaders(room.rank(0))
    assert [loaders.meet(length, "").shortest for length in (5, 4, None)] == [None] * 3
    assert [name for name, _ in room.rounds] == [LOADER_BARRIER]


def test_an_order_is_compared_once() -> None:
    room, found = Room(2), []

    def other() -> None:
        loaders = Loaders(room.rank(1))
        found.extend([loaders.meet(None, "a"), loaders.meet(None, "c")])

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    loaders = Loaders(room.rank(0))
    assert [loaders.meet(None, order).same for order in ("a", "a", "b")] == [True, True, False]
    thread.join(LIMIT_S)
    assert [one.same for one in found] == [True, False]
