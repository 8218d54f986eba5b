"""DDP's buckets after a restart: all ranks fill them in the saved order, or no rank changes them."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from strata.checkpoint.snapshot import rng
from strata.errors import BarrierBroken, BarrierTimeout, StrataError
from strata.training.group import end_group
from strata.training.loop.ddp_buckets import Buckets, order_of, wrapped_in

torch = pytest.importorskip("torch")
ORDER = [3, 2, 5, 4, 1, 0]
"""An order of `net`'s parameters that DDP never chooses by itself."""


class Ranks:
    """Three ranks: this rank, and two others that send the payload of a test."""

    world_size = 3
    rank = 0

    def __init__(self, others: bytes = b"able", fails: StrataError | None = None) -> None:
        self.others = others
        self.fails = fails
        self.reported: list[bytes] = []

    def barrier(self, name: str, payload: bytes, *, timeout_s: float) -> dict[int, bytes]:
        self.reported.append(payload)
        if self.fails is not None:
            raise self.fails
        return {0: payload, 1: self.others, 2: self.others}


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """Initialise a process group of this process alone."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    end_group()


def net() -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        *(torch.nn.Linear(4, 300), torch.nn.BatchNorm1d(300), torch.nn.Dropout(0.5), torch.nn.Linear(300, 2))
    )


def wrap(module: Any, **settings: Any) -> Any:
    return torch.nn.parallel.DistributedDataParallel(module, **{"bucket_cap_mb": 0.001, **settings})


def buckets(
    state: dict[str, Any], ranks: Ranks | None = None, *, order: Any = ORDER, restored: bool = True
) -> Buckets:
    saved = "" if order is None else json.dumps([order])
    return Buckets(ranks or Ranks(), state, saved=saved, restored=restored)  # type: ignore[arg-type]


def step(ddp: Any) -> None:
    ddp(torch.randn(6, 4)).sum().backward()


def test_the_saved_bucket_order_is_restored_without_side_effects() -> None:
    module = net()
    ddp = wrap(module)
    first = module[0].weight
    first.grad = torch.ones_like(first)
    before = copy.deepcopy(module.state_dict()), rng.capture()
    it = buckets({"model": module})
    it.begin()
    after = module.state_dict(), rng.capture()
    assert all(torch.equal(before[0][name], after[0][name]) for name in before[0])
    assert torch.equal(before[1]["torch"], after[1]["torch"])
    assert [parameter.grad is None for parameter in module.parameters()] == [False] + [True] * 5
    assert torch.equal(first.grad, torch.ones_like(first))
    assert json.loads(it.saved()) == [ORDER]
    first.grad = None
    step(ddp)
    step(ddp)
    assert order_of(ddp) == ORDER
    fresh = wrap(net())
    step(fresh)
    step(fresh)
    step(fresh)
    assert sorted(order_of(fresh) or []) == sorted(ORDER) != order_of(fresh) != ORDER, (
        "by itself it has another"
    )


def test_restored_buckets_do_not_change_gradients() -> None:
    wanted, found = wrap(net()), wrap(net(), gradient_as_bucket_view=True)
    buckets({"model": found.module}).begin()
    for ddp in (wanted, found):
        torch.manual_seed(1)
        step(ddp)
        step(ddp)
    for one, other in zip(wanted.parameters(), found.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_a_compiled_module_trains_on_with_restored_buckets() -> None:
    wanted, found = (wrap(net(), bucket_cap_mb=25) for _ in range(2))
    compiled = torch.compile(found, backend="aot_eager")
    buckets({"model": found.module}).begin()
    inputs = torch.randn(6, 4)
    for ddp in (wanted, compiled):
        ddp.eval()  # without the dropout, which draws other random numbers
        for _ in range(3):
            ddp(inputs).sum().backward()
    for one, other in zip(wanted.parameters(), found.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad)


def static(module: Any) -> Any:
    return wrap(module, static_graph=True)


def unused(module: Any) -> Any:
    return wrap(module, find_unused_parameters=True)


def hooked(module: Any) -> Any:
    ddp = wrap(module)
    ddp.register_comm_hook(None, lambda state, bucket: pytest.fail("it is not called"))
    return ddp


def stepped_in_backward(module: Any) -> Any:
    module[0].weight.register_post_accumulate_grad_hook(lambda parameter: None)
    return wrap(module)


def frozen_later(module: Any) -> Any:
    ddp = wrap(module)
    module[0].weight.requires_grad_(requires_grad=False)
    return ddp


def frozen_before(module: Any) -> Any:
    module[0].weight.requires_grad_(requires_grad=False)
    return wrap(module)


def used(module: Any) -> Any:
    ddp = wrap(module)
    step(ddp)
    return ddp


def sparse(module: Any) -> Any:
    module.append(torch.nn.Embedding(3, 2, sparse=True))
    return wrap(module)


def other_torch(module: Any) -> Any:
    ddp = wrap(module)
    ddp.reducer = object()
    return ddp


def unwrapped(module: Any) -> Any:
    return module


def twice(module: Any) -> Any:
    return [wrap(module), wrap(module)]


@pytest.mark.parametrize(
    "make",
    [
        *(static, unused, hooked, stepped_in_backward, frozen_later, frozen_before, used, sparse),
        *(other_torch, unwrapped, twice),
    ],
)
def test_a_module_other_than_plain_ddp_is_left_alone(
    make: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = net()
    kept = make(module)
    ranks = Ranks()
    it = buckets({"model": module}, ranks)
    monkeypatch.setattr(torch.autograd, "backward", lambda *_: pytest.fail("there was a backward pass"))
    it.begin()
    assert ranks.reported == [b"unable"]
    assert json.loads(it.saved()) == [ORDER], "what was saved is saved again"
    assert kept is not None


def test_frozen_parameters_are_not_in_the_bucket_order() -> None:
    module = net()
    module[0].requires_grad_(requires_grad=False)
    ddp = wrap(module)
    it = buckets({"model": module}, order=[2, 0, 3, 1])
    it.begin()
    step(ddp)
    step(ddp)
    assert order_of(ddp) == [2, 0, 3, 1]


@pytest.mark.parametrize("saved", [None, [0, 1], [0, 0, 1, 2, 3, 4]])
def test_an_order_that_does_not_fit_the_parameters_is_not_applied(saved: list[int] | None) -> None:
    ddp = wrap(net())
    ranks = Ranks()
    buckets({"model": ddp.module}, ranks, order=saved).begin()
    assert ranks.reported == [b"unable"]


@pytest.mark.parametrize(
    "ranks", [Ranks(b"unable"), Ranks(fails=BarrierBroken("b")), Ranks(fails=BarrierTimeout("t"))]
)
def test_the_bucket_order_is_restored_only_if_all_ranks_can(ranks: Ranks) -> None:
    ddp = wrap(net())
    buckets({"model": ddp.module}, ranks).begin()
    assert ranks.reported == [b"able"]
    assert not any(ddp.reducer.get_backward_stats())


def test_ranks_exchange_nothing_without_a_checkpoint_or_with_only_two_ranks() -> None:
    ddp = wrap(net())
    fresh, pair = Ranks(), Ranks()
    pair.world_size = 2
    buckets({"model": ddp.module}, fresh, restored=False).begin()
    buckets({"model": ddp.module}, pair).begin()
    assert (fresh.reported, pair.reported) == ([], [])


def test_the_order_is_saved_once_ddp_has_rebuilt_its_buckets() -> None:
    module = net()
    it = buckets({"model": module}, order=None, restored=False)
    ddp = wrap(module)
    it.begin()
    found = [it.saved()]
    for _ in range(3):
        step(ddp)
        found.append(it.saved())
    assert found[0] == ""
    assert [sorted(order) for order in json.loads(found[3])] == [[0, 1, 2, 3, 4, 5]]


def test_modules_come_in_the_order_of_the_state() -> None:
    first, second, other = net(), net(), net()
    made = [wrap(second), wrap(other), wrap(first)]
    found = wrapped_in(torch, {"model": [first, second], "step": 3})
    assert found == [made[2], made[0]]
    assert wrapped_in(torch, {"weights": [1]}) == []
