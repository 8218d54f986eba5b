"""Restores DistributedDataParallel's gradient buckets after a restart, so that sums are equal to the last bit.

DDP sums gradients in buckets, and the grouping affects the last bits of a sum over three ranks or more. After the first
backward pass of a process, DDP rebuilds the buckets in the order in which the gradients were ready. So the first step
of a restarted process would be summed in other buckets than the same step of a run without a restart.

    fresh run    step 1 in initial buckets, from step 2 in rebuilt ones   → a checkpoint has their order
    restarted    a backward pass of zeros in that order, then all steps in rebuilt ones

The pass of zeros changes nothing that is trained: gradients are put back, no forward pass runs, no random number is
drawn. The pass is a collective, so either all ranks must run it or none. So the ranks first exchange whether they
can run it.
"""

from __future__ import annotations

import gc
import json
import logging
import sys
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from strata.documents.parsing import MANIFEST, json_value
from strata.errors import BarrierBroken, BarrierTimeout
from strata.training.rank_context import RankContext

BUCKETS_KEY: Final = "ddp"
"""The key of the buckets' order in a checkpoint, beside the position."""
BUCKETS_BARRIER: Final = "strata.ddp"
BUCKETS_S: Final = 60.0
"""How long the ranks wait for each other before the pass of zeros."""
SUMS_DIFFER_FROM: Final = 3
"""The world size from which the grouping matters: a sum of two is the same in any order."""
_ABLE: Final = b"able"
_UNABLE: Final = b"unable"
_REBUILT: Final = "rebuilt_per_bucket_param_indices"

log: Final = logging.getLogger("strata.training")


class Buckets:
    """The buckets of the DDP modules that wrap one run's models; for the trainer's thread."""

    def __init__(self, context: RankContext, state: Mapping[str, Any], *, saved: str, restored: bool) -> None:
        """`saved` is the order from the checkpoint; `restored`: this generation began from a checkpoint."""
        self._context = context
        self._state = state
        self._saved = saved
        self._restored = restored
        self._begun = False
        self._wrapped: list[weakref.ref[Any]] = []

    def begin(self) -> None:
        """Restore the buckets of the world that saved; every rank must call this before the first step."""
        torch = sys.modules.get("torch")
        if self._begun or torch is None or not torch.distributed.is_available():
            return
        self._begun = True
        if not torch.distributed.is_initialized():
            return
        wrapped = wrapped_in(torch, self._state)
        self._wrapped = [weakref.ref(one) for one in wrapped]
        if not self._restored or self._context.world_size < SUMS_DIFFER_FROM:
            return
        orders = _read(self._saved or "[]")
        reason = _unfit(torch, wrapped, orders)
        if not self._all_are(able=not reason):
            log.debug("the buckets of DDP are not restored: %s", reason or "another rank cannot fill them")
            return
        for ddp, order in zip(wrapped, orders, strict=True):
            _fill(torch, ddp, order)
        log.debug("the buckets of %d DDP modules are restored", len(wrapped))

    def _all_are(self, *, able: bool) -> bool:
        """Return whether all ranks can run the pass; the result is the same on all ranks."""
        try:
            reported = self._context.barrier(BUCKETS_BARRIER, _ABLE if able else _UNABLE, timeout_s=BUCKETS_S)
        except (BarrierBroken, BarrierTimeout) as error:  # the round has ended with this error for all ranks
            log.info("the first step after this restart may differ in its last bits: %s", error.message)
            return False
        return list(reported.values()) == [_ABLE] * self._context.world_size

    def saved(self) -> str:
        """Return the newest known order as text for a checkpoint, "" for none."""
        orders = [order_of(ddp) for one in self._wrapped if (ddp := one()) is not None]
        if orders and all(orders):
            self._saved = json.dumps(orders, separators=(",", ":"))
        return self._saved


def wrapped_in(torch: Any, state: Mapping[str, Any]) -> list[Any]:
    """Return the DDP modules that wrap the modules in `state`, in the same order; none if two wrap the same
    parameters.
    """
    places: dict[int, int] = {}
    for module in _modules(torch, state):
        for parameter in module.parameters():
            places.setdefault(id(parameter), len(places))
    if not places:
        return []
    kind = torch.nn.parallel.DistributedDataParallel
    found: dict[int, Any] = {}
    for one in gc.get_objects():  # the program may have wrapped the model after `strata.init`
        if type(one) is kind:
            place = min((places.get(id(p), len(places)) for p in one.parameters()), default=len(places))
            if place in found:
                return []
            if place < len(places):
                found[place] = one
    return [found[place] for place in sorted(found)]


def _modules(torch: Any, state: Mapping[str, Any]) -> Iterator[Any]:
    for value in state.values():
        several = value if isinstance(value, list | tuple) else [value]
        yield from (one for one in several if isinstance(one, torch.nn.Module))


def order_of(ddp: Any) -> list[int] | None:
    """Return the indices of the parameters in the order of the rebuilt buckets, or None while DDP has none."""
    try:
        reported = ddp._get_ddp_logging_data()  # torch has no public function for it
    except (AttributeError, RuntimeError):
        return None
    return [int(number) for number in str(reported.get(_REBUILT, "")).replace(",", " ").split()] or None


_PLAIN: Final[Mapping[str, Any]] = {
    "static_graph": False,
    "find_unused_parameters": False,
    "mixed_precision": None,
    "_use_python_reducer": False,
    "_delay_all_reduce_params": [],
    "_comm_hooks": [],
    "parameters_to_ignore": set(),
}
"""The DDP settings that the pass requires. With other settings, DDP keeps its first buckets, or the pass runs user
code.
"""


def _read(text: str) -> list[list[int]]:
    """Return the orders from a checkpoint's text; none if the text is not valid."""
    try:
        orders = json_value(text, MANIFEST)
    except ValueError:
        return []
    fine = isinstance(orders, list) and all(
        isinstance(order, list) and all(type(number) is int for number in order) for order in orders
    )
    return orders if fine else []


def _unfit(torch: Any, wrapped: Sequence[Any], orders: Sequence[Sequence[int]]) -> str:
    """Return why the pass is impossible, or would do more than fill the buckets; "" if it can run."""
    if not wrapped or len(wrapped) != len(orders):
        return f"the checkpoint knows {len(orders)} DDP modules, and {len(wrapped)} are here"
    for ddp, order in zip(wrapped, orders, strict=True):
        for name, value in _PLAIN.items():
            if getattr(ddp, name, None) != value:
                return f"{name} is {getattr(ddp, name, None)!r}"
        reducer: Any = getattr(ddp, "reducer", None)
        if not hasattr(reducer, "prepare_for_backward") or not hasattr(reducer, "get_backward_stats"):
            return f"torch {torch.__version__} has another reducer"
        spent = reducer.get_backward_stats()
        if any(spent):
            return "a backward pass was run before the first step"
        parameters = _parameters(ddp)
        if sorted(order) != list(range(len(parameters))) or len(spent) != len(parameters):
            return "the trained parameters differ from the checkpoint's"
        if any(getattr(module, "sparse", False) is True for module in ddp.modules()):
            return "there are sparse gradients"
        if not all(_plain(torch, parameter) for parameter in parameters):
            return "a parameter has a gradient hook of the program"
    return ""


def _parameters(ddp: Any) -> list[Any]:
    """Return the parameters whose gradients DDP reduces, by the indices that it reports."""
    return [parameter for parameter in getattr(ddp, "_module_parameters", ()) if parameter.requires_grad]


def _plain(torch: Any, parameter: Any) -> bool:
    hooks = ("_backward_hooks", "_post_accumulate_grad_hooks", "_in_backward_optimizers")
    dense = parameter.is_leaf and parameter.layout == torch.strided
    return dense and not any(getattr(parameter, name, None) for name in hooks)


def _fill(torch: Any, ddp: Any, order: Sequence[int]) -> None:
    """Run a backward pass of zeros in which the gradients become ready in `order`."""
    parameters = _parameters(ddp)
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    ddp.reducer.prepare_for_backward([])
    for number in order:
        torch.autograd.backward(parameters[number], torch.zeros_like(parameters[number]))
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
