"""What is saved of a training: the caller's objects, and how far it is.

`Position` is the same on every rank: it counts *completed optimizer steps* and their samples over
all ranks, never what was drawn or prefetched (PROTOCOLS 7.3).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from strata.errors import CheckpointError, InvalidArgument

OWN_KEY: Final = "strata"
"""Where the position stands in a checkpoint."""

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a training is.

    `epoch_samples` are the samples of `epoch` that completed steps have used, `epoch_batches` the
    batches that this rank's own loader gave for them; `samples` counts all epochs.
    """

    step: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    epoch_batches: int = 0
    samples: int = 0


def position_of(saved: Mapping[str, Any]) -> Position:
    """Return the position that a checkpoint holds; `CheckpointError` when it holds none."""
    try:
        return Position(**{name: int(saved[name]) for name in Position.__slots__})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint does not say how far the training was: {error}",
            hint="it was not saved by strata.init's run; restore it with CheckpointManager",
        ) from None


def saved_position(position: Position) -> dict[str, int]:
    """Return what a checkpoint holds of `position`."""
    return asdict(position)


def state_of(
    *, model: object, optim: object, sched: object, extra: MutableMapping[str, Any] | None
) -> dict[str, Any]:
    """Return what is saved of the caller's: each of several models or optimizers by its number."""
    state: dict[str, Any] = {}
    for name, value in (("model", model), ("optim", optim), ("sched", sched)):
        if value is not None:
            state[name] = [_plain(one) for one in value] if isinstance(value, list | tuple) else _plain(value)
    for key, value in (extra or {}).items():
        if key in state or key == OWN_KEY or not isinstance(key, str):
            raise InvalidArgument(f"state has the key {key!r}", hint="choose another name for it")
        state[key] = value
    return state


def _plain(value: Any) -> Any:
    """Return the module inside of DistributedDataParallel: its names are the same in any world."""
    if type(value).__name__ == "DistributedDataParallel" and hasattr(value, "module"):
        return value.module
    return value
