"""torchdata's StatefulDataLoader: elastic if a DataLoader would be elastic; otherwise it resumes from its own state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.errors import ConfigError, InvalidArgument
from strata.training.group import end_group
from strata.training.loop.elastic_feed import ElasticFeed
from strata.training.loop.feeds import Feeding
from strata.training.loop.ordinary_feed import Fed
from strata.training.loop.stateful_feed import StatefulFeed
from strata.training.save.state import Position

torch = pytest.importorskip("torch")
StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
LENGTH = 50
BATCH = 4
EPOCH = 6
"""Batches of an epoch of `Stream`, which has 22 samples."""


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    end_group()  # the group of a run that was abandoned


class Stream(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]  # torch is not imported
    """A stream of numbers that continues from epoch to epoch, so that only its state tells the next number."""

    def __init__(self) -> None:
        self.at = 0
        self.seen: list[int] = []

    def __iter__(self) -> Iterator[int]:
        end = (self.at // 22 + 1) * 22
        while self.at < end:
            self.at += 1
            self.seen.append(self.at)
            yield self.at - 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.seen = state["at"], state["seen"]


class Again(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """A stream that restarts at the first number each epoch. After the last number its state is that of a new epoch."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 22:
            self.at += 1
            torch.rand(1)  # as an augmentation does
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Counted(Again):
    def __len__(self) -> int:
        return 22


class Estimated(Again):
    def __len__(self) -> int:
        return 12


class Backwards(torch.utils.data.Sampler):  # type: ignore[misc, name-defined]
    """A sampler of the program, without a state."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.count - 1, -1, -1))

    def __len__(self) -> int:
        return self.count


class Drawn(Backwards):
    """A sampler that draws at random; its state is the rest of the epoch."""

    left: Sequence[int] = ()

    def __iter__(self) -> Iterator[int]:
        self.left = self.left or torch.randperm(self.count).tolist()
        while self.left:
            first, *self.left = self.left
            yield first

    def state_dict(self) -> dict[str, Any]:
        return {"left": list(self.left)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


class Stateful(torch.utils.data.TensorDataset):  # type: ignore[misc, name-defined]
    """A map-style dataset with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def mapped(**settings: Any) -> Any:
    dataset = torch.utils.data.TensorDataset(torch.arange(LENGTH))
    return StatefulDataLoader(dataset, **{"batch_size": 5, "shuffle": True, **settings})


def stream(workers: int = 0, **settings: Any) -> Any:
    return StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=workers, **settings)


def feeding(rank: int = 0, world_size: int = 1, **settings: Any) -> Feeding:
    options = {"global_batch": None, "seed": 0, "uneven": True, "saved": {}, **settings}
    return Feeding(rank=rank, world_size=world_size, **options)


# -- map-style: elastic


def whole_epoch(loader: Any, world_size: int, at: Position, **settings: Any) -> list[list[int]]:
    """Return the samples of each remaining step of the epoch, over all ranks."""
    feeds = [feeding(rank, world_size, **settings).feed(loader, 1).epoch(at) for rank in range(world_size)]
    return [[i for fed in step for i in fed.batch[0].tolist()] for step in zip(*feeds, strict=True)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_shuffled_loader_yields_each_sample_once_over_all_ranks(workers: int) -> None:
    data = mapped(num_workers=workers)
    steps = whole_epoch(data, 2, Position())
    assert sorted(i for step in steps for i in step) == list(range(LENGTH))
    assert whole_epoch(mapped(), 2, Position()) == steps, "it is computed, not drawn"
    saved = feeding(0, 2).feed(data, 1).facts(Position())
    rest = whole_epoch(mapped(), 1, Position(epoch_samples=20), saved=saved)
    assert rest == steps[2:], "another world has the same steps"


def test_stateful_loaders_are_elastic_if_their_samplers_have_no_state() -> None:
    sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    dataset = mapped().dataset
    distributed = sampler.StatefulDistributedSampler(dataset, num_replicas=2, rank=0, seed=9)
    found = {
        "shuffled": mapped(),
        "in order": mapped(shuffle=False),
        "distributed": mapped(shuffle=None, sampler=distributed),
        "replaced": mapped(shuffle=None, sampler=sampler.RandomSampler(dataset, replacement=True)),
        "unbatched": mapped(batch_size=None, shuffle=False),
        "weighted": mapped(shuffle=None, sampler=torch.utils.data.WeightedRandomSampler([1.0] * LENGTH, 9)),
        "backwards": mapped(shuffle=None, sampler=Backwards(LENGTH)),
        "with a state": mapped(shuffle=None, sampler=Drawn(LENGTH)),
        "iterable": StatefulDataLoader(Stream(), batch_size=BATCH),
    }
    feeds = {name: feeding().feed(one, 1) for name, one in found.items()}
    elastic = {name for name, feed in feeds.items() if isinstance(feed, ElasticFeed)}
    assert elastic == found.keys() - {"unbatched", "with a state", "iterable"}
    assert all(isinstance(feed, StatefulFeed) for name, feed in feeds.items() if name not in elastic)
    assert isinstance(feed := feeds["distributed"], ElasticFeed)
    assert feed.sampler.seed == 9


def test_a_loader_that_cannot_resume_is_refused() -> None:
    batches = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(range(LENGTH)), 5, drop_last=False)
    for refused, why in (
        (mapped(shuffle=None, batch_size=1, batch_sampler=batches), "BatchSampler .* has no state_dict"),
        (StatefulDataLoader(Stateful(torch.arange(9)), batch_size=3), "dataset Stateful has a state_dict"),
        (stream(1, in_order=False), "in_order=False"),
        (stream(1, persistent_workers=True), "persistent_workers=True"),
    ):
        with pytest.raises(InvalidArgument, match=why):
            feeding(0, 2).feed(refused, 1)


class Derived(StatefulDataLoader):  # type: ignore[misc, valid-type]
    """A loader that Strata does not rebuild, because it does not know what a subclass does."""


def test_a_loader_that_reads_the_whole_dataset_on_every_rank_is_refused() -> None:
    """Strata does not divide a loader that is not elastic."""
    sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")
    dataset = mapped().dataset
    whole = {
        "derived": Derived(dataset, batch_size=5, shuffle=True),
        "derived, in order": Derived(dataset, batch_size=5),
        "torch's": Derived(dataset, batch_size=5, sampler=torch.utils.data.RandomSampler(dataset)),
        "no batches": mapped(batch_size=None),
        "no batches, in order": mapped(batch_size=None, shuffle=False),
    }
    for name, one in whole.items():
        with pytest.raises(ConfigError, match="each of 2 ranks would read every sample") as refused:
            feeding(1, 2).feed(one, 1)
        assert "DistributedSampler" in str(refused.value.hint), name
        if name != "torch's":
            assert isinstance(feeding().feed(one, 1), StatefulFeed), "one rank may"
    divided = sampler.StatefulDistributedSampler(dataset, num_replicas=2, rank=1)
    replaced = sampler.RandomSampler(dataset, replacement=True)
    for may in (divided, replaced):
        assert isinstance(feeding(1, 2).feed(Derived(dataset, sampler=may), 1), StatefulFeed)


# -- loaders that are not elastic resume from their own state


def train(
    root: Path, loader: Any, *, until: int = 10**9, epochs: int = 3, every: int = 5, accumulate: int = 1
) -> list[list[int]]:
    """Train, save every `every` steps, die in step `until`; return the samples of each step that began."""
    torch.manual_seed(1)
    run = strata.init(state={"noise": torch.zeros(1)}, storage_path=root, save_every_steps=every, data=loader)
    steps: list[list[int]] = [[] for _ in range(run.step)]
    for _ in range(epochs):
        for batch in run.steps(accumulate=accumulate):
            if len(steps) < run.begun:
                steps.append([])
            steps[-1] += _numbers(batch)
            if run.last_of_step:
                steps[-1].append(int(torch.randint(10**9, (1,))))  # the trainer's own randomness
            if run.begun == until and run.last_of_step:
                run.abandon("the test kills it")
                return steps
    run.close()
    return steps


def _numbers(batch: Any) -> list[int]:
    found: list[int] = (batch[0] if isinstance(batch, list) else batch).tolist()
    return found


def check(tmp_path: Path, make: Any, *, deaths: Sequence[int], **options: Any) -> None:
    """Assert that a training that dies in these steps trains on the same samples as an undisturbed one."""
    wanted = train(tmp_path / "one", make(), **options)
    for until in deaths:
        some = train(tmp_path / "two", make(), until=until, **options)
        resumed = next((n for n, step in enumerate(some) if step), 0)
        assert resumed > 0 or until == deaths[0], "it went on from a save"
        assert some[resumed:] == wanted[resumed:until]
    rest = train(tmp_path / "two", make(), **options)
    resumed = next((n for n, step in enumerate(rest) if step), len(rest))
    assert resumed > 0
    assert rest[resumed:] == wanted[resumed:]


@pytest.mark.parametrize(
    ("workers", "settings"),
    [(0, {}), (2, {}), (2, {"snapshot_every_n_steps": 3})],
)
def test_a_stream_resumes_at_the_next_sample(workers: int, settings: dict[str, Any], tmp_path: Path) -> None:
    check(tmp_path, lambda: stream(workers, **settings), deaths=[3 * EPOCH - 4, 3 * EPOCH - 1])


@pytest.mark.parametrize("every", [1, 2, EPOCH])
def test_a_stream_resumes_after_the_last_batch_of_an_epoch(every: int, tmp_path: Path) -> None:
    check(tmp_path, stream, deaths=[EPOCH + 1, 2 * EPOCH], every=every)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("kind", [Again, Counted, Estimated])
def test_an_epoch_whose_last_step_was_saved_is_not_read_twice(
    kind: type[Again], workers: int, tmp_path: Path
) -> None:
    def make() -> Any:
        return StatefulDataLoader(kind(), batch_size=BATCH, num_workers=workers)

    check(tmp_path, make, deaths=[EPOCH + 1, 2 * EPOCH + 1], every=3)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_ordered_by_a_stateful_sampler_is_not_read_twice(workers: int, tmp_path: Path) -> None:
    def make() -> Any:
        return mapped(shuffle=None, sampler=Drawn(LENGTH), num_workers=workers)

    check(tmp_path, make, deaths=[LENGTH // 5 + 1, 2 * LENGTH // 5 + 1])


def test_a_save_does_not_change_the_next_batches(tmp_path: Path) -> None:
    """A save draws the next batch early, with the same random numbers as without the save."""
    loaders = [StatefulDataLoader(Again(), batch_size=BATCH) for _ in range(2)]
    assert train(tmp_path / "one", loaders[0], every=1) == train(tmp_path / "two", loaders[1], every=100)


def test_the_next_epoch_begins_where_an_abandoned_one_stopped() -> None:
    """The number of batches that a save drew early does not matter."""
    feed = feeding().feed(stream(), 1)
    fed(feed, Position(), 2)
    feed.facts(Position(epoch_batches=2))
    (first,) = fed(feed, Position(epoch=1), 1)
    assert first.batch[0].item() == 2 * BATCH


def test_a_stream_resumes_with_steps_of_several_batches(tmp_path: Path) -> None:
    """The last step of an epoch is known by the end of the loader, and the loader's state then records the end."""
    check(tmp_path, stream, deaths=[3, 4], every=1, accumulate=4)


def test_a_stateful_sampler_resumes(tmp_path: Path) -> None:
    check(tmp_path, lambda: mapped(shuffle=None, sampler=Drawn(LENGTH)), deaths=[8, 17], epochs=2)


def test_a_torchdata_sampler_resumes(tmp_path: Path) -> None:
    sampler = pytest.importorskip("torchdata.stateful_dataloader.sampler")

    def make() -> Any:
        own = sampler.RandomSampler(range(LENGTH), replacement=True, generator=torch.Generator())
        return mapped(shuffle=None, sampler=own)

    check(tmp_path, make, deaths=[8, 17], epochs=2)


def fed(feed: Any, position: Position, count: int) -> list[Fed]:
    batches = feed.epoch(position)
    return [next(batches) for _ in range(count)]


def test_a_save_within_a_step_records_only_complete_steps() -> None:
    """Batches drawn after the last complete step are drawn again."""
    feed = feeding().feed(stream(), 3)
    batches = feed.epoch(Position())
    seen = [next(batches).batch.tolist() for _ in range(5)]
    saved = feed.facts(Position(epoch_batches=3))
    again = feeding(saved=saved).feed(stream(), 3)
    rest = [one.batch.tolist() for one in again.epoch(Position(epoch_batches=3))]
    assert rest[:2] == seen[3:]
    assert len(rest) == EPOCH - 3


def test_an_abandoned_epoch_is_continued() -> None:
    feed = feeding().feed(stream(), 1)
    first = fed(feed, Position(), 2)
    feed.facts(Position(epoch_batches=2))
    (third,) = fed(feed, Position(epoch_batches=2), 1)
    assert [one.batch[0].item() for one in (*first, third)] == [0, BATCH, 2 * BATCH]


def test_loaders_that_take_turns_are_refused() -> None:
    """Loaders that follow one another are accepted: a save has the state of the loader that the epoch reads."""
    ranks = feeding()
    first, second = ranks.feed(stream(), 1), ranks.feed(stream(), 1)
    fed(first, Position(), EPOCH)
    fed(second, Position(epoch=1), 2)
    saved = second.facts(Position(epoch=1, epoch_batches=2))
    again = feeding(saved=saved).feed(stream(), 1)
    (third,) = fed(again, Position(epoch=1, epoch_batches=2), 1)
    assert third.batch[0].item() == 2 * BATCH
    with pytest.raises(InvalidArgument, match="take turns"):
        fed(first, Position(epoch=2), 1)


def test_a_world_of_another_size_is_refused() -> None:
    feed = feeding(0, 2).feed(stream(), 1)
    fed(feed, Position(), 3)
    saved = feed.facts(Position(epoch_batches=3))
    assert isinstance(feeding(0, 2, saved=saved).feed(stream(), 1), StatefulFeed)
    with pytest.raises(ConfigError, match="as data-parallel rank 0, and is 1 now"):
        feeding(1, 2, saved=saved).feed(stream(), 1)
    with pytest.raises(ConfigError, match=r"2 ranks saved the state .* and there are 3 ranks now") as refused:
        feeding(2, 3, saved=saved).feed(stream(), 1)
    assert "train on with 2 ranks" in str(refused.value.hint)
    assert isinstance(feeding(2, 3, saved=saved).feed(mapped(), 1), ElasticFeed), "another loader may go on"


def test_an_epoch_may_have_a_loader_and_an_accumulate_of_its_own() -> None:
    """No state was restored, so no loader's state comes from another world."""
    ranks, loader = feeding(), stream()
    fed(ranks.feed(loader, 1), Position(), EPOCH)
    (whole,) = [one for one in fed(ranks.feed(loader, 2), Position(epoch=1), 2) if one.last]
    assert whole.batches == 2
    (first,) = fed(ranks.feed(stream(), 1), Position(epoch=2), 1)
    assert first.batch[0].item() == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_run_resumes_after_an_ended_epoch(workers: int, tmp_path: Path) -> None:
    """Closing a run saves the last step of an epoch after the loader has ended."""
    wanted = train(tmp_path / "one", stream(workers), epochs=3)
    for epochs in (1, 2, 3):
        steps = train(tmp_path / "two", stream(workers), epochs=epochs)
        assert steps[(epochs - 1) * EPOCH :] == wanted[(epochs - 1) * EPOCH : epochs * EPOCH]
