"""Lightning under Strata: `StrataCallback` saves and restores what `Trainer.fit` does, to the exact batch.

    strata_callback = StrataCallback(global_batch=64, save_every_steps=100)
    trainer = L.Trainer(callbacks=[strata_callback], **trainer_place())
    trainer.fit(model, strata_callback.loader(loader))

A save happens when Lightning requests the first batch of the next step. All work of the step before is done then: its
logging, its validation, the end of its epoch. A restore puts the loops' counters back at the same place, so Lightning
goes on as if it had never stopped. Lightning's own resume begins elsewhere, and infers from its counters what to
repeat: it leaves out a validation that is due after the saved step.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loops.loop import _Loop

import strata
from strata.errors import ConfigError
from strata.integrations.late_loader import LateLoader
from strata.integrations.loop_state import LoopState, check_arguments

STRATEGIES: Final = ("DDPStrategy", "SingleDeviceStrategy")
REFUSED: Final = (
    *("BatchSizeFinder", "LearningRateFinder", "GradientAccumulationScheduler"),
    *("BaseFinetuning", "WeightAveraging", "StochasticWeightAveraging", "ModelPruning"),
)
"""Callbacks that change what a step is, what the optimizer has, or what the model's weights are."""


def trainer_place() -> dict[str, int]:
    """Return the arguments of `Trainer` that name this world, which has another size after a resize."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return {"devices": local, "num_nodes": int(os.environ.get("WORLD_SIZE", "1")) // local}


class StrataCallback(Callback):
    """Makes `Trainer.fit` a run of Strata: list it first among the callbacks.

    Strata assigns the samples of the loader that `loader` wraps. A step has the same `global_batch` samples in every
    world, in `accumulate_grad_batches` batches a rank, whose size changes with the world. The loader's own batch size and
    `DistributedSampler` have no effect.
    """

    def __init__(
        self, *, global_batch: int, state: MutableMapping[str, Any] | None = None, **arguments: Any
    ) -> None:
        """`state` and `arguments` are those of `strata.init`; Lightning gives model, optimizers and schedulers."""
        check_arguments(arguments)
        self.run: strata.Run | None = None
        self._global_batch = global_batch
        self._state = {} if state is None else state
        self._arguments = arguments
        self._trainer: Trainer | None = None
        self._batches: _Batches | None = None
        self._progress = LoopState({}, dict)

    def loader(self, loader: Any) -> _Batches:
        """Return the training loader for `Trainer.fit`, or for `train_dataloader` of a module or data module."""
        self._batches = _Batches(loader)
        self._plan()
        return self._batches

    def _plan(self) -> None:
        if self._trainer is not None and self._batches is not None:
            self._batches.plan(
                accumulate=self._trainer.accumulate_grad_batches,
                global_batch=self._global_batch,
                world_size=self._trainer.world_size,
                uneven=self._arguments.get("uneven", True),
            )

    # -- hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what could not be restored, and count the batches."""
        if stage == "fit":
            if self.run is not None:
                raise ConfigError("this callback has trained already", hint="one program trains one job")
            _check(trainer, self)
            self._trainer = trainer
            self._plan()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Join the world, and restore."""
        progress = self._progress = LoopState(self._state, lambda: _taken(trainer))
        run = self.run = strata.init(
            model=pl_module,
            optim=trainer.optimizers,
            sched=[one.scheduler for one in trainer.lr_scheduler_configs],
            state=progress,
            global_batch=self._global_batch,
            **self._arguments,
        )
        if run.world.size != trainer.world_size:
            raise ConfigError(
                f"the world has {run.world.size} ranks, and the Trainer has {trainer.world_size}",
                hint="L.Trainer(**trainer_place(), …) takes the number of devices and nodes from the world",
            )
        # Lightning's handler of SIGTERM calls a collective on one rank only; strata.init has installed one of its own
        trainer._signal_connector.register_signal_handlers = lambda: None
        if progress.restored is not None:
            _put_back(trainer, progress.restored)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let Lightning draw from the run."""
        batches, run = self._batches, self.run
        if batches is None or run is None or trainer.train_dataloader is not batches:
            raise ConfigError(
                "Strata does not assign the samples of this training loader",
                hint="trainer.fit(model, strata_callback.loader(loader)), with one loader",
            )
        if trainer.num_training_batches % trainer.accumulate_grad_batches and (
            trainer.num_training_batches < len(batches)
        ):
            raise ConfigError(
                f"limit_train_batches ends an epoch after {trainer.num_training_batches} batches, within a step",
                hint=f"use a multiple of accumulate_grad_batches={trainer.accumulate_grad_batches}",
            )
        batches.bind(run)
        batches.before_first = lambda: self._go_on(trainer)

    def _go_on(self, trainer: Trainer) -> None:
        """Put the counters back that Lightning has reset since `on_fit_start`; from now on saves take the new ones."""
        saved = self._progress.restored
        if saved is not None and _is_within_epoch(saved):
            loop = trainer.fit_loop
            _load(loop, saved["loops"])
            loop._data_fetcher.fetched = loop.epoch_loop.batch_progress.current.ready
            loop._restarting = False
        self._progress.begin()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        """Weigh the loss by the batch's share of the step's samples; Lightning has divided it by a constant."""
        assert self.run is not None
        factor = self.run.weight * trainer.accumulate_grad_batches
        if factor != 1:
            loss.mul_(factor)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whether the epoch was left at the start of a batch, which then was not trained on."""
        assert self._batches is not None
        progress = trainer.fit_loop.epoch_loop.batch_progress.current
        self._batches.is_trained = progress.started == progress.ready

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the last step, before the model leaves its device."""
        assert self.run is not None
        assert self._batches is not None
        self._batches.ended()
        self.run.save(wait=True)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the run: its job is done."""
        assert self.run is not None
        self.run.close()


class _Batches(LateLoader):
    """The loader that Lightning draws from."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self.before_first: Callable[[], None] | None = None
        self.is_trained = True
        """Whether the last batch of the epoch before was trained on."""
        self._has_epoch = False

    @property
    def sampler(self) -> _Batches:
        """The object of which Lightning calls `set_epoch`."""
        return self

    def ended(self) -> None:
        """Complete the last step of an epoch, unless Lightning left it."""
        if self.is_trained:
            super().ended()

    def set_epoch(self, epoch: int) -> None:
        self._has_epoch = True
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        if not self._has_epoch:
            raise ConfigError("a callback draws from the training loader before Lightning's loop does")
        self.ended()
        if self.before_first is not None:
            self.before_first()
            self.before_first = None
        yield from super().__iter__()


def _check(trainer: Trainer, callback: StrataCallback) -> None:
    """Raise `ConfigError` for a Trainer whose training could not be restored."""
    refused = [type(one).__name__ for one in trainer.callbacks if _names(one) & set(REFUSED)]
    wrong = {
        "StrataCallback is not the first callback": trainer.callbacks[0] is not callback,
        f"{', '.join(refused)} with Strata": bool(refused),
        "fit(ckpt_path=…): Strata restores the training": trainer.ckpt_path is not None,
        f"the strategy {type(trainer.strategy).__name__}": not _names(trainer.strategy) & set(STRATEGIES),
        "reload_dataloaders_every_n_epochs": bool(trainer.reload_dataloaders_every_n_epochs),
        "overfit_batches": trainer.overfit_batches > 0,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(f"not supported: {what}", hint="see docs/frameworks/lightning.md")


def _names(value: object) -> set[str]:
    return {one.__name__ for one in type(value).__mro__}


def _taken(trainer: Trainer) -> dict[str, Any]:
    """Return what Lightning's own checkpoint holds beside model, optimizers and schedulers."""
    module, datamodule = trainer.lightning_module, trainer.datamodule
    own = _common(trainer)
    for callback in trainer.callbacks:
        callback.on_save_checkpoint(trainer, module, own)
    module.on_save_checkpoint(own)
    for name in _common(trainer):
        own.pop(name, None)
    return {
        "loops": trainer.fit_loop.state_dict(),
        "callbacks": {one.state_key: state for one in trainer.callbacks if (state := one.state_dict())},
        "own": own,
        "datamodule": datamodule.state_dict() if datamodule is not None else {},
        "precision": trainer.precision_plugin.state_dict(),
        "should_stop": trainer.should_stop,
        "metrics": dict(trainer.callback_metrics),
    }


def _common(trainer: Trainer) -> dict[str, Any]:
    """Return the entries of a checkpoint of Lightning that hooks of a module may read."""
    weights = trainer.lightning_module.state_dict()
    return {"state_dict": weights, "epoch": trainer.current_epoch, "global_step": trainer.global_step}


def _put_back(trainer: Trainer, saved: Mapping[str, Any]) -> None:
    """Restore what `_taken` returned, before the loops begin."""
    module, states = trainer.lightning_module, saved["callbacks"]
    _load(trainer.fit_loop, saved["loops"])
    own = {**copy.deepcopy(saved["own"]), **_common(trainer), "callbacks": copy.deepcopy(states)}
    for callback in trainer.callbacks:
        callback.on_load_checkpoint(trainer, module, own)
    for callback in trainer.callbacks:
        if callback.state_key in states:
            callback.load_state_dict(copy.deepcopy(states[callback.state_key]))
    module.on_load_checkpoint(own)
    if trainer.datamodule is not None:
        trainer.datamodule.load_state_dict(saved["datamodule"])
    trainer.precision_plugin.load_state_dict(saved["precision"])
    trainer._logger_connector._callback_metrics.update(saved["metrics"])
    trainer.should_stop = saved["should_stop"]
    trainer.num_sanity_val_steps = 0
    # so that Lightning does not begin the epoch again; only the outer loop, because the inner one would repeat work
    trainer.fit_loop._restarting = _is_within_epoch(saved)


def _is_within_epoch(saved: Mapping[str, Any]) -> bool:
    epochs = saved["loops"]["epoch_progress"]["current"]
    return bool(epochs["ready"] != epochs["processed"])


def _load(loop: _Loop, saved: dict[str, Any], prefix: str = "") -> None:
    """Set the counters of `loop` and of the loops inside, without the flags of Lightning's own resume."""
    loop._load_from_state_dict(saved, prefix)
    for name, inner in vars(loop).items():
        if isinstance(inner, _Loop):
            _load(inner, saved, f"{prefix}{name}.")
