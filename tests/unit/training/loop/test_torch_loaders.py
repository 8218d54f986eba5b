"""A run with torch: ordinary DataLoaders become elastic, and the steps of a script's own loop are counted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.errors import ConfigError, DatasetMismatch
from strata.training.group import end_group
from strata.training.loop.elastic_feed import ElasticFeed
from strata.training.loop.feeds import Feeding, Met
from strata.training.loop.ordinary_feed import OrdinaryFeed
from strata.training.save.state import Position

torch = pytest.importorskip("torch")
LENGTH = 50


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    end_group()  # the group of a run that was abandoned


def loader(**settings: Any) -> Any:
    dataset = torch.utils.data.TensorDataset(torch.arange(LENGTH))
    return torch.utils.data.DataLoader(dataset, **{"batch_size": 5, "shuffle": True, **settings})


def feeding(rank: int = 0, world_size: int = 1, **settings: Any) -> Feeding:
    options = {"global_batch": None, "seed": 0, "uneven": True, "saved": {}, **settings}
    return Feeding(rank=rank, world_size=world_size, **options)


def epoch(loader: Any, world_size: int, at: Position, *, accumulate: int = 1, **settings: Any) -> list[int]:
    """Return the samples of the rest of an epoch, step by step, in a world of this size."""
    feeds = [
        feeding(rank, world_size, **settings).feed(loader, accumulate).epoch(at) for rank in range(world_size)
    ]
    seen: list[int] = []
    while True:
        step = [_step(feed) for feed in feeds]
        if not any(step):
            return seen
        for part in step:
            seen += part


def _step(feed: Any) -> list[int]:
    seen: list[int] = []
    for fed in feed:
        seen += fed.batch[0].tolist()
        if fed.last:
            break
    return seen


@pytest.mark.parametrize("workers", [0, 2])
def test_any_world_resumes_at_the_next_sample(workers: int) -> None:
    data = loader(num_workers=workers)
    whole = epoch(data, 2, Position())
    assert sorted(whole) == list(range(LENGTH))
    saved = feeding(0, 2).feed(data, 1).facts(Position())
    assert saved == {"length": LENGTH, "global_batch": 10, "seed": 0, "per_rank": 5}
    rest = epoch(data, 1, Position(epoch_samples=20), saved=saved)
    assert rest == whole[20:]


def test_accumulation_keeps_the_batches_of_a_step() -> None:
    data = loader()
    saved = feeding(0, 4).feed(data, 1).facts(Position())
    one = feeding(0, 1, saved=saved).feed(data, 1)
    assert [len(fed.batch[0]) for fed in one.epoch(Position())] == [20, 20, 10]
    saved = feeding(0, 2).feed(data, 2).facts(Position())
    split = list(feeding(0, 1, saved=saved).feed(data, 2).epoch(Position()))
    assert [len(fed.batch[0]) for fed in split] == [5] * 10
    assert [fed.last for fed in split] == [False, False, False, True] * 2 + [False, True]
    with pytest.raises(ConfigError, match="cannot be split evenly over 3 ranks"):
        feeding(0, 3, saved=saved, uneven=False).feed(data, 2)


def test_a_world_that_does_not_divide_the_batch_trains_on_the_same_samples() -> None:
    """With the weights, all samples count equally: the ranks' mean gradient equals the gradient of one rank alone."""
    data = loader()
    saved = feeding(0, 2).feed(data, 2).facts(Position())
    whole = epoch(data, 2, Position(), accumulate=2)
    assert epoch(data, 3, Position(epoch_samples=20), accumulate=2, saved=saved) == whole[20:]
    feeds = [feeding(rank, 3, saved=saved).feed(data, 2) for rank in range(3)]
    batches = [list(feed.epoch(Position())) for feed in feeds]
    assert [[len(fed.batch[0]) for fed in fed_] for fed_ in batches] == [
        [4, 3, 4, 3, 4],
        [4, 3, 4, 3, 3],
        [3, 3, 3, 3, 3],
    ]
    assert len({tuple(fed.last for fed in fed_) for fed_ in batches}) == 1
    first = [fed_[:2] for fed_ in batches]
    mean = sum(fed.batch[0].double().mean() * fed.weight for fed_ in first for fed in fed_) / 3
    assert mean.item() == pytest.approx(sum(whole[:20]) / 20)


def test_a_changed_batch_size_overrides_the_saved_one() -> None:
    saved = feeding(0, 2).feed(loader(), 1).facts(Position())
    assert feeding(0, 2, saved=saved).feed(loader(batch_size=3), 1).facts(Position())["global_batch"] == 6
    assert (
        feeding(0, 2, saved=saved, global_batch=30).feed(loader(), 1).facts(Position())["global_batch"] == 30
    )


class OnePerClass:
    """A sampler of the program's own: it draws from torch's generator, and shuffles by the epoch that it is kept."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        return iter([(i + self.epoch) % LENGTH for i in torch.randperm(self.length).tolist()])


class Endless(OnePerClass):
    """A sampler whose length is an estimate: it never ends."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class Counting(OnePerClass):
    """A sampler that draws other indices each time."""

    draws = 0

    def __iter__(self) -> Iterator[int]:
        self.draws += 1
        return iter(range(self.draws, self.draws + self.length))


def own_samplers() -> dict[str, Any]:
    data, dataset = torch.utils.data, loader().dataset
    generator = torch.Generator().manual_seed(5)
    weights = [float(i % 3) for i in range(LENGTH)]
    return {
        "weighted": data.WeightedRandomSampler(weights, 40),
        "weighted with a generator": data.WeightedRandomSampler(weights, 40, generator=generator),
        "replaced": data.RandomSampler(dataset, replacement=True),
        "a part": data.SubsetRandomSampler(range(10, 50)),
        "its own": OnePerClass(40),
    }


@pytest.mark.parametrize("name", own_samplers())
def test_a_sampler_that_draws_by_the_epoch_alone_is_elastic(name: str) -> None:
    def data() -> Any:
        return loader(shuffle=None, sampler=own_samplers()[name])

    torch.manual_seed(1)
    whole = epoch(data(), 2, Position(epoch=3))
    state = torch.get_rng_state()
    torch.manual_seed(2)
    saved = feeding(0, 2).feed(data(), 1).facts(Position())
    rest = epoch(data(), 5, Position(epoch=3, epoch_samples=20), saved=saved)
    assert rest == whole[20:]
    assert epoch(data(), 2, Position(epoch=4)) != whole
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state), (
        "drawing indices leaves the program's random states alone"
    )


def test_a_sampler_that_draws_other_indices_each_time_or_on_each_rank_is_its_ranks_own() -> None:
    ordinary = feeding().feed(loader(shuffle=None, sampler=Counting(20)), 1)
    assert isinstance(ordinary, OrdinaryFeed)
    endless = feeding().feed(loader(shuffle=None, sampler=Endless(20)), 1)
    assert type(endless) is OrdinaryFeed
    kept = OnePerClass(20)
    kept.set_epoch(7)
    feeding().feed(loader(shuffle=None, sampler=kept), 1)
    assert kept.epoch == 7, "the program's sampler stays as it is"
    other = feeding(meet=lambda batches, order, decides: Met(7, same=False))
    own = other.feed(loader(shuffle=None, sampler=OnePerClass(20)), 1)
    assert type(own) is OrdinaryFeed
    assert len(list(own.epoch(Position()))) == 4


class Numbers(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """A stream, of which a real program gives each rank a part."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(30))


def test_only_a_dataloader_is_refused_in_another_world() -> None:
    at, saved = Position(epoch_batches=2, epoch_samples=8), {"world_size": 2}
    stream = torch.utils.data.DataLoader(Numbers(), batch_size=2)
    assert len(list(feeding(0, 2, saved=saved).feed(stream, 1).epoch(at))) == 13
    with pytest.raises(DatasetMismatch, match="2 ranks trained on this epoch, and there are 3 now"):
        next(feeding(0, 3, saved=saved).feed(stream, 1).epoch(at))
    assert [fed.batch for fed in feeding(0, 3, saved=saved).feed(range(4), 1).epoch(at)] == [2, 3]


def test_ranks_with_different_datasets_are_refused() -> None:
    with pytest.raises(DatasetMismatch, match="dataset 'pile': the ranks have different datasets"):
        feeding(meet=lambda batches, order, decides: Met(same=False)).feed(loader(), 1, dataset="pile")


def test_peers_of_one_data_parallel_place_get_the_same_batches() -> None:
    torch.manual_seed(0)
    first = [fed.batch[0].tolist() for fed in feeding(1, 2).feed(loader(), 1).epoch(Position())]
    torch.manual_seed(9)
    assert [fed.batch[0].tolist() for fed in feeding(1, 2).feed(loader(), 1).epoch(Position())] == first


def test_only_shuffled_sequential_and_distributed_loaders_are_elastic() -> None:
    data = torch.utils.data
    plain = loader()
    distributed = data.distributed.DistributedSampler(plain.dataset, num_replicas=2, rank=0, seed=9)
    keys = ["a"] * LENGTH
    found = {
        "shuffled": loader(),
        "in order": loader(shuffle=False),
        "distributed": loader(shuffle=None, sampler=distributed),
        "keys": loader(shuffle=None, sampler=keys),
        "unbatched": loader(batch_size=None, shuffle=False),
        "a list": [torch.zeros(2)],
    }
    feeds = {name: feeding(0, 2).feed(one, 1) for name, one in found.items()}
    elastic = {name for name, feed in feeds.items() if isinstance(feed, ElasticFeed)}
    assert elastic == {"shuffled", "in order", "distributed"}
    assert all(isinstance(feed, OrdinaryFeed) for name, feed in feeds.items() if name not in elastic)
    assert isinstance(feed := feeds["distributed"], ElasticFeed)
    assert feed.sampler.seed == 9


def net() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optim = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    return model, optim, torch.optim.lr_scheduler.StepLR(optim, step_size=1, gamma=0.5)


def train(root: Path, *, until: int, die: bool = False) -> tuple[strata.Run, list[float], dict[str, Any]]:
    """Train two epochs with a scheduler that steps after each; leave the loop after `until` steps."""
    model, optim, sched = net()
    run = strata.init(model=model, optim=optim, sched=sched, storage_path=root, save_every_steps=1)
    data, rates = loader(), []
    for _ in range(2):
        for (batch,) in run.steps(data):
            rates.append(optim.param_groups[0]["lr"])
            optim.zero_grad()
            (model(batch.float().unsqueeze(1)) + torch.rand(1)).pow(2).mean().mul(1e-5).backward()
            optim.step()
            if run.step + 1 == until:
                break
        if run.step >= until:
            break
        sched.step()
    if die:
        run.abandon("the test kills it")
    else:
        run.close()
    return run, rates, model.state_dict()


def test_a_resumed_training_ends_with_the_weights_of_an_undisturbed_training(tmp_path: Path) -> None:
    _, rates, wanted = train(tmp_path / "one", until=99)
    assert rates == [1.0] * 10 + [0.5] * 10
    first, some, _ = train(tmp_path / "two", until=14, die=True)
    assert first.step == 14, "a loop that is left behind optim.step() has completed its step"
    again, rest, found = train(tmp_path / "two", until=99)
    assert (again.step, len(some) + len(rest)) == (20, 21), "the 14th was not saved, and is trained again"
    assert rest == [0.5] * 7, "the scheduler did not step for the epoch that was passed over"
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_loop_left_before_the_optimizer_step_completes_no_step(tmp_path: Path) -> None:
    model, optim, _ = net()
    with strata.init(model=model, optim=optim, storage_path=tmp_path) as run:
        for _ in run.steps(loader()):
            break
        assert run.step == 0


def test_the_module_inside_of_ddp_is_saved(tmp_path: Path) -> None:
    model, _, _ = net()
    with strata.init(model=model, storage_path=tmp_path) as run:
        assert torch.distributed.is_initialized()
        run.step_done()
        run.save()
    assert not torch.distributed.is_initialized()
    other = torch.nn.Linear(1, 1)
    with strata.init(state={"other": 1}, storage_path=tmp_path / "none"):
        wrapped = torch.nn.parallel.DistributedDataParallel(other)
        with strata.init(model=wrapped, storage_path=tmp_path) as run:
            assert run.step == 1
    assert torch.equal(other.weight, model.weight)
