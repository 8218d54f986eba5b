"""`LateLoader` and `LoopState`, which the integrations of frameworks share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.errors import ConfigError, InvalidArgument
from strata.integrations.late_loader import LateLoader
from strata.integrations.loop_state import LoopState, check_arguments
from strata.training.group import end_group

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    yield
    end_group()


def late(dataset: Any = None, **settings: Any) -> LateLoader:
    dataset = torch.arange(20) if dataset is None else dataset
    return LateLoader(torch.utils.data.DataLoader(dataset, batch_size=7, **settings))


def test_batches_are_counted_before_there_is_a_run_and_drawn_in_it(tmp_path: Path) -> None:
    loader = late()
    with pytest.raises(ConfigError, match="known only once the training begins"):
        len(loader)
    loader.plan(accumulate=2, world_size=1, global_batch=8)
    assert len(loader) == 6
    with pytest.raises(ConfigError, match="only within a training"):
        next(iter(loader))
    run = strata.init(state={}, storage_path=tmp_path, global_batch=8)
    loader.bind(run)
    loader.set_epoch(0)
    assert [batch.tolist() for batch in loader][:2] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    loader.ended()
    assert run.step == 3
    run.close()


class Endless(torch.utils.data.IterableDataset):  # type: ignore[misc,name-defined]
    def __iter__(self) -> Iterator[int]:
        return iter(range(10**9))


@pytest.mark.parametrize(
    "loader", [late(Endless()), LateLoader([1, 2]), LateLoader(strata.ElasticSampler(9, global_batch=3))]
)
def test_a_loader_without_assignable_samples_is_refused(loader: LateLoader) -> None:
    with pytest.raises(ConfigError, match="cannot assign the samples"):
        loader.plan(accumulate=1, world_size=1, global_batch=8)


def test_the_programs_own_state_stays_in_its_mapping() -> None:
    own: dict[str, Any] = {"tokens": 1}
    state = LoopState(own, lambda: "taken")
    assert dict(state) == {"tokens": 1, "loop": None}
    state["tokens"] = 5
    state["loop"] = {"epoch": 2}
    assert own == {"tokens": 5}
    assert state.restored == {"epoch": 2}
    state.begin()
    own["tokens"] += 1
    assert dict(state) == {"tokens": 6, "loop": "taken"}
    with pytest.raises(InvalidArgument, match="state has the key 'loop'"):
        LoopState({"loop": 1}, dict)


def test_arguments_of_the_framework_are_refused() -> None:
    check_arguments({"save_every_steps": 3})
    with pytest.raises(ConfigError, match="optim cannot be given here"):
        check_arguments({"optim": 1, "save_every_steps": 3})
    with pytest.raises(ConfigError, match="total_steps cannot be given here"):
        check_arguments({"total_steps": 1}, "total_steps")
