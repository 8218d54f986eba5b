"""What `strata.init` takes for replicated by itself."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from strata.training.state import replicated_in


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]  # not in their list
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def a_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))


def test_parameters_of_a_parallel_module_and_their_optimizer() -> None:
    model = DistributedDataParallel(a_network())
    paths = replicated_in(model=model, optim=torch.optim.AdamW(model.parameters()))
    assert paths == {
        "model.0.weight",
        "model.0.bias",
        "model.1.weight",
        "model.1.bias",
        "optim.state",
    }


def test_of_several_each_by_its_number() -> None:
    alike, own = DistributedDataParallel(nn.Linear(2, 2, bias=False)), nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(alike.parameters()), torch.optim.SGD(own.parameters())]
    assert replicated_in(model=[own, alike], optim=optimizers) == {"model.1.weight", "optim.0.state"}


def test_nothing_is_guessed() -> None:
    model = a_network()
    assert replicated_in(model=model, optim=torch.optim.SGD(model.parameters())) == frozenset()
    parallel = DistributedDataParallel(a_network())
    more = torch.optim.SGD([*parallel.parameters(), nn.Parameter(torch.ones(1))])
    assert "optim.state" not in replicated_in(model=parallel, optim=more)
    assert replicated_in(model=None, optim=None) == frozenset()
