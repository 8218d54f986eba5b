"""`run.loader`: a framework's own loop draws the batches, and may leave an epoch early."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import strata
from strata.errors import ConfigError
from strata.training.loop.feeds import Feeding
from strata.training.loop.framework_loader import FrameworkLoader
from strata.training.save.state import Position


def sampler(length: int = 20, **settings: Any) -> strata.ElasticSampler:
    return strata.ElasticSampler(length, **{"global_batch": 8, "shuffle": False, **settings})


def started(root: Path) -> strata.Run:
    return strata.init(state={}, storage_path=root, save_every_steps=1)


def one_epoch(loader: FrameworkLoader, epoch: int, *, most: int | None = None) -> list[list[int]]:
    """Draw the batches of an epoch as a framework does: it may stop before the end."""
    loader.set_epoch(epoch)
    drawn = []
    for batch in loader:
        drawn.append(batch)
        if len(drawn) == most:
            break
    return drawn


def test_an_iteration_yields_the_batches_of_the_named_epoch(tmp_path: Path) -> None:
    run = started(tmp_path)
    loader = run.loader(sampler())
    iter(loader)  # a framework may only try whether this works
    assert [len(batch) for batch in one_epoch(loader, 0)] == [8, 8, 4]
    assert len(loader) == 3
    assert run.step == 3
    assert one_epoch(loader, 0) == []
    assert one_epoch(loader, 5, most=2) == [[*range(8)], [*range(8, 16)]]
    assert (run.epoch, run.step) == (5, 4), "nobody can know whether the body of the last batch has stepped"
    run.close()


def test_a_restored_run_yields_the_rest_of_its_epoch(tmp_path: Path) -> None:
    first = started(tmp_path)
    loader = first.loader(sampler())
    loader.set_epoch(1)
    ahead = iter(loader)
    next(ahead)
    next(ahead)  # the first step is complete now
    first.abandon("killed")

    run = started(tmp_path)
    loader = run.loader(sampler())
    assert one_epoch(loader, run.epoch) == [[*range(8, 16)], [*range(16, 20)]]
    assert len(loader) == 3, "of the whole epoch"
    run.close()


@pytest.mark.parametrize(
    ("length", "world", "settings", "pieces"),
    [
        (20, 1, {}, 3),
        (20, 2, {"most": 2}, 5),
        (20, 3, {"most": 1}, 5),
        (20, 5, {}, 2),
        (20, 2, {"drop_last": True, "most": 1}, 8),
        (5, 2, {"most": 2}, 2),
        (20, 1, {"count": 4}, 12),
        (20, 2, {"count": 4}, 10),
        (20, 4, {"count": 2}, 5),
    ],
)
def test_the_length_is_the_number_of_pieces(
    length: int, world: int, settings: dict[str, Any], pieces: int
) -> None:
    elastic = sampler(length, **settings)
    assert elastic.pieces_an_epoch(world) == pieces
    for rank in range(world):
        assert len(list(elastic.pieces(rank, world))) == pieces


def test_accumulated_batches_of_an_ordinary_loader(tmp_path: Path) -> None:
    run = started(tmp_path)
    loader = run.loader([[1], [2], [3], [4]], accumulate=2)
    assert len(loader) == 4
    one_epoch(loader, 0)
    assert run.step == 2
    run.close()


def test_a_loader_without_a_length_has_none(tmp_path: Path) -> None:
    run = started(tmp_path)
    with pytest.raises(TypeError, match="no length"):
        len(run.loader(iter([[1]])))
    run.close()


def test_a_step_has_as_many_batches_in_every_world() -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.arange(24), batch_size=2)
    for world in (1, 2, 3):
        feeding = Feeding(rank=0, world_size=world, global_batch=12, seed=0, uneven=True, saved={})
        feed = feeding.feed(loader, 2, fixed=True)
        sizes = [(len(fed.batch), fed.last) for fed in feed.epoch(Position())]
        assert sizes == [(6 // world, False), (6 // world, True)] * 2
        assert feed.size() == 4


def test_the_last_step_of_an_epoch_is_saved_when_the_framework_has_ended_it(tmp_path: Path) -> None:
    """The framework drops the iterator after the last batch, without a request for another one."""
    torch = pytest.importorskip("torch")
    model = torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    run = strata.init(model=model, optim=optim, storage_path=tmp_path, save_every_steps=1)
    loader = run.loader(sampler(16))
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = iter(loader)
        for number in range(2):
            next(batches)
            optim.step()
            assert run.saves.saved_step == max(0, 2 * epoch + number) or run.step == 0
        del batches
        loader.ended()
        assert run.step == run.saves.saved_step == 2 * (epoch + 1)
    run.close()
    assert run.saves.saved_step == 4


def test_a_step_without_a_step_of_the_optimizer_ends_with_its_epoch(tmp_path: Path) -> None:
    """A scaler of mixed precision skips the optimizer's step after an overflow."""
    run = started(tmp_path)
    loader = run.loader(sampler(8))
    batches = iter(loader)
    next(batches)
    assert run.step == 0
    loader.ended()
    loader.ended()
    assert run.step == run.saves.saved_step == 1
    run.close()


def test_more_batches_than_samples_are_refused() -> None:
    torch = pytest.importorskip("torch")
    loader = torch.utils.data.DataLoader(torch.arange(24), batch_size=2)
    feeding = Feeding(rank=0, world_size=3, global_batch=12, seed=0, uneven=True, saved={})
    assert feeding.feed(loader, 4, fixed=True).size() == 8
    with pytest.raises(ConfigError, match="12 samples cannot be 5 batches on each of 3 ranks"):
        feeding.feed(loader, 5, fixed=True)
    even = Feeding(rank=0, world_size=2, global_batch=12, seed=0, uneven=False, saved={})
    with pytest.raises(ConfigError, match="12 samples cannot be 4 batches of equal size on each of 2 ranks"):
        even.feed(loader, 4, fixed=True)
    assert even.feed(loader, 3, fixed=True).size() == 6
