"""The saved state of a training: the caller's objects, and the training's `Position`.

`Position` is the same on every rank: it counts *completed optimizer steps* and their samples over all ranks, never
samples that were only drawn or prefetched (PROTOCOLS 7.3).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from strata.checkpoint.snapshot import rng
from strata.checkpoint.snapshot.state import has_state, join
from strata.errors import CheckpointError, InvalidArgument

OWN_KEY: Final = "strata"
"""The key of Strata's own entries in a checkpoint: the position, and the entries beside it."""
LOADER_KEY: Final = "loader"
"""Beside the position: the settings of the loader that determine the order of samples."""
PACE_KEY: Final = "pace"
"""Beside the position: the measured times of steps and saves."""

_WRAPPERS: Final = {
    "DistributedDataParallel": "module",
    "AcceleratedOptimizer": "optimizer",
    "AcceleratedScheduler": "scheduler",
}
"""The wrappers of torch and of Hugging Face accelerate, and the attribute of the object inside of each."""

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """The position of a training.

    `epoch_samples` counts the samples of `epoch` that completed steps have used, `epoch_batches` the batches that this
    rank's loader gave for them; `samples` counts all epochs.
    """

    step: int = 0
    epoch: int = 0
    epoch_samples: int = 0
    epoch_batches: int = 0
    samples: int = 0

    def next(self, samples: int, *, batches: int) -> Position:
        """Return the position after one more step of `samples` samples."""
        return Position(
            step=self.step + 1,
            epoch=self.epoch,
            epoch_samples=self.epoch_samples + samples,
            epoch_batches=self.epoch_batches + batches,
            samples=self.samples + samples,
        )


def position_of(saved: Mapping[str, Any]) -> Position:
    """Return the position stored in a checkpoint; `CheckpointError` if it has none."""
    try:
        return Position(**{name: int(saved[name]) for name in Position.__slots__})
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint has no readable training position: {error}",
            hint="it was not saved by strata.init's run; restore it with CheckpointManager",
        ) from None


def saved_position(position: Position) -> dict[str, int]:
    """Return `position` as a checkpoint stores it."""
    return asdict(position)


class TrainingState(MutableMapping[str, Any]):
    """The caller's objects that are saved, read at the time of the save.

    The entries of the caller's mapping stay in that mapping: a save reads their current values, and a restore writes
    them back.
    """

    def __init__(self, own: MutableMapping[str, Any], extra: MutableMapping[str, Any]) -> None:
        self._own = own
        self._extra = extra
        self._shared = tuple(extra)

    def _holder(self, key: str) -> MutableMapping[str, Any]:
        return self._extra if key in self._shared else self._own

    def __getitem__(self, key: str) -> Any:
        return self._holder(key)[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self._holder(key)[key] = value

    def __delitem__(self, key: str) -> None:
        del self._holder(key)[key]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (key for key in self._shared if key in self._extra)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def plain(self) -> dict[str, Any]:
        """Return the caller's plain entries: numbers, texts, or lists and mappings of only these."""
        return {
            key: self._extra[key]
            for key in self._shared
            if key in self._extra and _is_plain(self._extra[key])
        }


def state_of(
    *, model: object, optim: object, sched: object, extra: MutableMapping[str, Any] | None
) -> MutableMapping[str, Any]:
    """Return the caller's objects to save; several models or optimizers are saved by their number in the list."""
    state: dict[str, Any] = {}
    for name, value in (("model", model), ("optim", optim), ("sched", sched)):
        if value is not None:
            state[name] = [_plain(one) for one in value] if isinstance(value, list | tuple) else _plain(value)
    extra = {} if extra is None else extra
    for key in extra:
        if key in state or key == OWN_KEY or not isinstance(key, str):
            raise InvalidArgument(f"state has the key {key!r}", hint="choose another name for it")
    return TrainingState(state, extra)


def plain_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values in the caller's mapping; each rank has values of its own."""
    return state.plain() if isinstance(state, TrainingState) else {}


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(_is_plain(one) for one in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(one) for one in value)
    return value is None or isinstance(value, bool | int | float | complex | str | bytes)


def is_parallel(value: Any) -> bool:
    """Return whether this is torch's DistributedDataParallel."""
    return type(value).__name__ == "DistributedDataParallel" and hasattr(value, "module")


def _plain(value: Any) -> Any:
    """Return the object inside a wrapper: its state has the same names in any world, and it has torch's hooks."""
    inner = _WRAPPERS.get(type(value).__name__)
    return getattr(value, inner, value) if inner is not None else value


@dataclass(frozen=True, slots=True, kw_only=True)
class Remembered:
    """Schedulers, the optimizers' settings, the caller's plain values and the random states as they were restored.

    A script that loops over its finished epochs again gets no batches from them, but runs the code after the
    batches, such as `sched.step()` or an evaluation. `apply` undoes the effects of that code.
    """

    schedulers: list[tuple[Any, Any]]
    settings: list[tuple[Any, list[dict[str, Any]]]]
    state: MutableMapping[str, Any]
    plain: dict[str, Any]
    random: dict[str, Any]

    @classmethod
    def of(cls, state: MutableMapping[str, Any]) -> Remembered:
        """Remember the current values of `state`."""
        schedulers = [(one, copy.deepcopy(one.state_dict())) for one in _each(state.get("sched"))]
        settings = [
            (one, [_settings(group) for group in one.param_groups])
            for one in _each(state.get("optim"))
            if hasattr(one, "param_groups")
        ]
        return cls(
            schedulers=schedulers,
            settings=settings,
            state=state,
            plain=copy.deepcopy(plain_of(state)),
            random=rng.capture(),
        )

    def apply(self) -> None:
        """Put the remembered values back."""
        for scheduler, state in self.schedulers:
            scheduler.load_state_dict(copy.deepcopy(state))
        for optimizer, groups in self.settings:
            for group, settings in zip(optimizer.param_groups, groups, strict=True):
                for name, value in settings.items():
                    if hasattr(group.get(name), "copy_"):  # a tensor to which compiled code may refer
                        group[name].copy_(value)
                    else:
                        group[name] = copy.deepcopy(value)
        self.state.update(copy.deepcopy(self.plain))
        self.apply_random()

    def apply_random(self) -> None:
        """Put the random states back: objects made since, such as a loader's sampler, may have drawn from them."""
        rng.restore(self.random)


def on_optimizer_steps(
    state: Mapping[str, Any],
    *,
    before: Callable[[bool], None] | None = None,
    after: Callable[[], None] | None = None,
) -> None:
    """Call `before` and `after` around each step of the first torch optimizer in `state`.

    `before` takes whether the program passes a closure to the optimizer's step.
    """
    for one in _each(state.get("optim")):
        if hasattr(one, "register_step_post_hook"):
            if before is not None:
                one.register_step_pre_hook(
                    lambda _one, args, given: before(
                        any(each is not None for each in (*args[1:], given.get("closure")))
                    )
                )
            if after is not None:
                one.register_step_post_hook(lambda *_: after())
            return


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def _each(value: Any) -> list[Any]:
    if value is None:
        return []
    return [one for one in (value if isinstance(value, list) else [value]) if has_state(one)]


def buffers_of(state: Mapping[str, Any]) -> set[str]:
    """Return the paths of the models' buffers, such as a running mean, of which each rank has its own.

    As in DistributedDataParallel, a rank without its own buffers takes rank 0's.
    """
    models: Any = state.get("model")
    named: Any = enumerate(models) if isinstance(models, list) else [("", models)]
    return {
        join(f"model.{number}" if number != "" else "model", name)
        for number, model in named
        if hasattr(model, "named_buffers")
        for name, _ in model.named_buffers()
    }
