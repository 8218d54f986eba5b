"""Virtual ranks: which micro-batches a rank computes, how gradients are added up, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.data.place import DataPlace
from strata.errors import ConfigError, InvalidArgument
from strata.training.group import end_group
from strata.training.loop.feeds import Feeding
from strata.training.loop.gradient_sum import GradientSum
from strata.training.loop.virtual_ranks import VirtualFeed, block
from strata.training.save.state import Position

torch = pytest.importorskip("torch")
LENGTH, V = 54, 6


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    end_group()


def loader(**settings: Any) -> Any:
    dataset = torch.utils.data.TensorDataset(torch.arange(LENGTH))
    return torch.utils.data.DataLoader(dataset, **{"batch_size": 2, "shuffle": True, **settings})


def feeding(rank: int, world_size: int, **settings: Any) -> Feeding:
    options = {"global_batch": None, "seed": 0, "uneven": True, "saved": {}, "virtual": V, **settings}
    return Feeding(rank=rank, world_size=world_size, **options)


MicroBatch = tuple[list[int], float, float]
"""Samples, weight, and a random number of its body."""


def steps(world_size: int, at: Position) -> list[list[MicroBatch]]:
    """Return the micro-batches of each step over all ranks, in the order of the virtual ranks."""
    by_rank = []
    for rank in range(world_size):
        torch.manual_seed(99 + rank)
        mine: list[list[MicroBatch]] = [[]]
        for fed in feeding(rank, world_size).feed(loader(), 1).epoch(at):
            mine[-1].append((fed.batch[0].tolist(), fed.weight, torch.rand(1).item()))
            if fed.last:
                mine.append([])
        by_rank.append(mine[:-1])
    return [[each for rank in step for each in rank] for step in zip(*by_rank, strict=True)]


def test_every_world_computes_the_same_micro_batches_with_the_same_random_numbers() -> None:
    alone = steps(1, Position(epoch=2))
    assert [len(step) for step in alone] == [V] * 5
    assert sorted(i for step in alone for samples, _, _ in step for i in samples) == list(range(LENGTH))
    assert all(sum(weight for _, weight, _ in step) == pytest.approx(1.0) for step in alone)
    for world_size in range(2, V + 1):
        assert steps(world_size, Position(epoch=2)) == alone
    assert steps(4, Position(epoch=2, epoch_samples=24)) == alone[2:]


def test_samples_that_are_left_out_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    feeding(0, 2).feed(loader(batch_size=5), 1)
    assert "24 samples of each epoch are left out" not in caplog.text
    feeding(0, 2, virtual=7).feed(loader(batch_size=7), 1)
    assert "5 samples of each epoch are left out: fewer than there are ranks" in caplog.text


def test_another_number_of_virtual_ranks_has_another_global_batch() -> None:
    saved = feeding(0, 2).feed(loader(), 1).facts(Position())
    assert (saved["global_batch"], saved["virtual_ranks"]) == (2 * V, V)
    assert feeding(0, 3, saved=saved).feed(loader(), 1).facts(Position())["global_batch"] == 2 * V
    assert feeding(0, 3, saved=saved, virtual=9).feed(loader(), 1).facts(Position())["global_batch"] == 18


def test_a_rank_has_a_contiguous_block_of_virtual_ranks() -> None:
    assert [list(block(DataPlace(rank, 4), 6)) for rank in range(4)] == [[0, 1], [2, 3], [4], [5]]
    with pytest.raises(ConfigError, match="6 virtual ranks leave none for 1 of 7 ranks"):
        block(DataPlace(0, 7), 6)


def test_the_random_generators_after_a_step_do_not_depend_on_the_world() -> None:
    after = [
        [fed.seed_after for fed in feeding(rank, size).feed(loader(), 1).epoch(Position()) if fed.last]
        for rank, size in ((0, 1), (0, 4), (3, 4))
    ]
    assert after[0] == after[1] == after[2]
    assert len(set(after[0])) == 5
    assert None not in after[0]


def test_gradients_are_added_up_in_order_and_a_parameter_without_any_has_none() -> None:
    numbers = torch.tensor([1e8, 1.0, -1e8], dtype=torch.float32)
    summed, unused, once = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    total = GradientSum(lambda: [summed, unused, once], block_sizes=[3], rank=0)
    for number in numbers:
        summed.grad = number.repeat(2)
        once.grad = number.repeat(2) if number == 1 else None
        total.keep()
        assert summed.grad is None
    total.reduce()
    expected = ((numbers[0] + numbers[1]) + numbers[2]).item()
    assert summed.grad.tolist() == [expected, expected]
    assert expected != (numbers[0] + numbers[2] + numbers[1]).item(), "these sums depend on their order"
    assert unused.grad is None
    assert once.grad.tolist() == [1.0, 1.0]


def net() -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.SGD(model.parameters(), lr=1e-5)


def trained(folder: Path, **settings: Any) -> list[float]:
    model, optim = net()
    run = strata.init(model=model, optim=optim, storage_path=folder, **settings)
    for (batch,) in run.steps(loader()):
        ((model(batch.float().unsqueeze(1)) ** 2).mean() * run.weight).backward()
        if run.last_of_step:
            run.sum_gradients()
            assert model.weight.grad is not None
            optim.step()
            optim.zero_grad()
    run.close()
    return [model.weight.item(), model.bias.item()]


def test_a_step_has_the_gradient_of_its_global_batch(tmp_path: Path) -> None:
    virtual = trained(tmp_path / "virtual", virtual_ranks=V)
    assert virtual == pytest.approx(trained(tmp_path / "whole", global_batch=2 * V), rel=1e-5)


def test_an_optimizer_that_steps_too_early_is_refused(tmp_path: Path) -> None:
    model, optim = net()
    run = strata.init(model=model, optim=optim, storage_path=tmp_path, virtual_ranks=V)
    for (batch,) in run.steps(loader()):
        model(batch.float().unsqueeze(1)).sum().backward()
        with pytest.raises(InvalidArgument, match="before the step's last micro-batch"):
            optim.step()
        break
    run.abandon("the test ends it")


def test_a_loop_that_is_left_leaves_nothing_for_the_next_step(tmp_path: Path) -> None:
    """Neither after the optimizer's step, nor in the middle of a step, nor if the program skips the optimizer's step."""
    model, optim = net()
    optim.param_groups[0]["lr"] = 0.0  # the gradients of all steps belong to the same model
    run = strata.init(model=model, optim=optim, storage_path=tmp_path, virtual_ranks=V)

    def body(batch: Any) -> None:
        ((model(batch.float().unsqueeze(1)) ** 2).mean() * run.weight).backward()

    for (batch,) in run.steps(loader(), epoch=0):
        body(batch)
        if run.last_of_step:
            optim.step()
            break
    assert run.step == 1
    for number, (batch,) in enumerate(run.steps(loader(), epoch=1)):
        body(batch)
        if number == 1:
            break
    for (batch,) in run.steps(loader(), epoch=2):
        body(batch)
        if run.begun == 3 and run.last_of_step:  # the optimizer does not step in the step before
            run.sum_gradients()
            break
    found = model.weight.grad.item()
    run.abandon("the test ends it")
    samples = strata.ElasticSampler(LENGTH, global_batch=2 * V).order(2).take(2 * V, 4 * V)
    model.weight.grad = None
    (model(torch.tensor(samples).float().unsqueeze(1)) ** 2).mean().backward()
    assert found == pytest.approx(model.weight.grad.item(), rel=1e-5)


def test_the_position_is_the_same_on_ranks_of_different_blocks() -> None:
    counts = [
        [fed.batches for fed in feeding(rank, 4).feed(loader(), 1).epoch(Position()) if fed.last]
        for rank in (0, 3)
    ]
    assert counts[0] == counts[1] == [V] * 5


def test_parameters_that_are_unfrozen_later_are_summed(tmp_path: Path) -> None:
    model, optim = net()
    model.bias.requires_grad_(False)
    run = strata.init(model=model, optim=optim, storage_path=tmp_path, virtual_ranks=V)
    for (batch,) in run.steps(loader()):
        ((model(batch.float().unsqueeze(1)) ** 2).mean() * run.weight).backward()
        if run.last_of_step:
            run.sum_gradients()
            assert (model.bias.grad is not None) == (run.begun > 1)
            optim.step()
            optim.zero_grad()
            model.bias.requires_grad_(True)
    run.abandon("the test ends it")


def test_a_loop_that_strata_does_not_run_is_refused(tmp_path: Path) -> None:
    model, optim = net()
    run = strata.init(model=model, optim=optim, storage_path=tmp_path, virtual_ranks=V)
    with pytest.raises(ConfigError, match=r"virtual ranks need the loop of run\.steps"):
        run.loader(loader())
    run.abandon("refused")


def test_a_closure_is_refused(tmp_path: Path) -> None:
    model, optim = net()
    run = strata.init(model=model, optim=optim, storage_path=tmp_path, virtual_ranks=V)
    for _ in run.steps(loader()):
        if run.last_of_step:
            with pytest.raises(InvalidArgument, match="closure"):
                optim.step(lambda: 0.0)
            optim.step(None)
            break
    run.abandon("the test ends it")


class Wrapped(torch.nn.Module):  # type: ignore[misc, name-defined]
    """Looks like torch's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        self.module = net()[0]


Wrapped.__name__ = "DistributedDataParallel"


def with_norm() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(1, 4), torch.nn.BatchNorm1d(4))


@pytest.mark.parametrize(
    ("model", "settings", "why"),
    [
        (with_norm, {}, r"1 \(BatchNorm1d\) keeps statistics"),
        (Wrapped, {}, "so does DistributedDataParallel"),
        (lambda: net()[0], {"mesh": (0, 1)}, "virtual ranks and a mesh exclude each other"),
        (lambda: net()[0], {"virtual_ranks": -1}, "virtual_ranks is -1"),
        (lambda: net()[0], {"virtual_ranks": True}, "virtual_ranks is True"),
        (lambda: net()[0], {"optim": None}, "need the model and one torch optimizer"),
    ],
)
def test_what_would_depend_on_the_world_is_refused(
    model: Callable[[], Any], settings: dict[str, Any], why: str, tmp_path: Path
) -> None:
    made = model()
    optim = torch.optim.SGD(made.parameters(), lr=0.1)
    with pytest.raises((ConfigError, InvalidArgument), match=why):
        strata.init(
            **{"model": made, "optim": optim, "storage_path": tmp_path, "virtual_ranks": V, **settings}
        )


def test_only_elastic_loaders_have_virtual_ranks() -> None:
    with pytest.raises(
        ConfigError, match="virtual ranks need a loader whose samples Strata assigns, not a list"
    ):
        feeding(0, 2).feed([torch.zeros(2)], 1)
    with pytest.raises(InvalidArgument, match="each micro-batch is one batch"):
        feeding(0, 2).feed(loader(), 2)
    assert isinstance(feeding(0, 2).feed(strata.ElasticSampler(LENGTH, global_batch=12), 1), VirtualFeed)
