"""Hugging Face's Trainer under Strata: `StrataTrainer` saves and restores `Trainer.train`, to the exact batch.

    trainer = StrataTrainer(model, args, train_dataset=…, strata={"global_batch": 64, "save_every_steps": 100})
    trainer.train()

For another class that is derived from `Trainer`, put this one first: `class Mine(StrataTrainer, SFTTrainer)`.

A save happens when the Trainer requests the first batch of the next step. All work of the step before is done then:
its logging, its evaluation, the checkpoint of the Trainer itself, the end of its epoch. A restored epoch begins after
the batches that were trained on; the Trainer's own resume would draw and drop them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, Final

import transformers.trainer
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from strata.errors import ConfigError
from strata.integrations.late_loader import LateLoader
from strata.integrations.loop_state import LoopState, check_arguments
from strata.training.init import init
from strata.training.loop.run import Run

RESTORED: Final = (
    *("global_step", "epoch", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""The fields of `TrainerState` that a training changes."""

if not hasattr(Trainer, "_run_epoch"):
    raise ConfigError(
        f"transformers {transformers.__version__} has another training loop",
        hint="install transformers 5.24 (docs/frameworks/README.md has the versions that are tested)",
    )


class StrataTrainer(Trainer):
    """`transformers.Trainer` whose `train` is a run of Strata.

    Strata assigns the samples. A step has the same `global_batch` samples in every world, in
    `gradient_accumulation_steps` batches a rank, whose size changes with the world; `per_device_train_batch_size` has no
    effect.
    """

    def __init__(self, *args: Any, strata: Mapping[str, Any], **kwargs: Any) -> None:
        """`strata` holds the arguments of `strata.init`, among them `global_batch`; the Trainer gives the objects."""
        if "global_batch" not in strata:
            raise ConfigError(
                "global_batch is missing",
                hint='strata={"global_batch": 64}: the number of samples of a step, over all ranks',
            )
        check_arguments(strata, "total_steps")
        self._arguments = dict(strata)
        self._state: MutableMapping[str, Any] = self._arguments.pop("state", {})
        self._run: Run | None = None
        self._batches: LateLoader | None = None
        self._prepared: Any = None
        self._epoch = 0
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train, from the job's newest checkpoint on if it has one, and end the run."""
        wrong = {
            "train(resume_from_checkpoint=…): Strata restores the training": resume_from_checkpoint,
            "a hyperparameter search": trial is not None,
            "auto_find_batch_size": self.args.auto_find_batch_size,
            "ignore_data_skip": self.args.ignore_data_skip,
            "DeepSpeed": self.is_deepspeed_enabled,
            "FSDP": self.is_fsdp_enabled,
            "enable_jit_checkpoint": getattr(self.args, "enable_jit_checkpoint", False),
            "a second call of train()": self._run is not None,
        }
        for what, is_wrong in wrong.items():
            if is_wrong:
                raise ConfigError(f"not supported: {what}", hint="see docs/frameworks/transformers.md")
        result = super().train(**kwargs)
        assert self._run is not None
        self._run.close()
        return result

    # -- the steps of Trainer.train, in its order

    def get_train_dataloader(self) -> LateLoader:
        """Return the loader whose samples Strata assigns, without accelerate's division of them."""
        self.accelerator.prepare = lambda loader: loader
        try:
            batches = LateLoader(super().get_train_dataloader())
        finally:
            del self.accelerator.prepare
        batches.plan(
            accumulate=self.args.gradient_accumulation_steps,
            global_batch=self._arguments["global_batch"],
            world_size=self.args.world_size,
            uneven=self._arguments.get("uneven", True),
        )
        self._batches = batches
        return batches

    def _init_training_state(
        self, max_steps: int, num_update_steps_per_epoch: int, num_train_epochs: int, *_: Any
    ) -> tuple[int, int]:
        """Make the optimizer, join the world and restore; return the epoch, and its batches that were trained on."""
        super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, None, None)
        self._prepared = super()._prepare_for_training(max_steps, self._batches, None)
        seed = self.args.data_seed if self.args.data_seed is not None else self.args.seed
        progress = LoopState(self._state, self._taken)
        run = self._run = init(
            model=self.model,
            optim=self.optimizer,
            sched=self.lr_scheduler,
            state=progress,
            total_steps=max_steps,
            **{"seed": seed, **self._arguments},
        )
        if run.world.size != self.args.world_size:
            raise ConfigError(
                f"the world has {run.world.size} ranks, and the Trainer has {self.args.world_size}",
                hint="on hosts without GPUs: TrainingArguments(use_cpu=True)",
            )
        assert self._batches is not None
        self._batches.bind(run)
        saved = progress.restored
        progress.begin()
        if saved is None:
            return 0, 0
        self._put_back(saved)
        done = -(-run.position.epoch_samples // self._arguments["global_batch"])
        if self.state.global_step >= max_steps or saved["is_stopped"]:
            return num_train_epochs, 0
        if saved["epoch"] > run.epoch or done >= num_update_steps_per_epoch:
            return max(saved["epoch"], run.epoch + 1), 0
        return run.epoch, done * self.args.gradient_accumulation_steps

    def _prepare_for_training(self, *_: Any) -> Any:
        return self._prepared

    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        self._epoch = epoch
        resumed = epoch == kwargs["epochs_trained"] and kwargs["steps_trained_in_current_epoch"] > 0
        if resumed:  # has the Trainer begin its counters there; the batches themselves are left out already
            kwargs["resume_from_checkpoint"] = "strata"
        with _all_batches() if resumed else contextlib.nullcontext():
            super()._run_epoch(epoch=epoch, **kwargs)
        if not self.control.should_training_stop:  # an epoch in which the training stops may go on later
            self._epoch = epoch + 1
        assert self._batches is not None
        assert self._run is not None
        if self.state.global_step >= self._run.begun:  # else the Trainer left the step that it drew
            self._batches.ended()

    def _load_rng_state(self, checkpoint: Any) -> None:
        """Do nothing: the run restores the random generators when the first batch is requested."""

    def _finalize_training(self, *args: Any, **kwargs: Any) -> Any:
        """Save the last step before the Trainer may load the weights of its best checkpoint."""
        assert self._run is not None
        self._run.save(wait=True)
        if self._run.saves.saved_step != self._run.step:
            self._run.close()  # the save was dropped: save the last weights, or leave, before others are loaded
        return super()._finalize_training(*args, **kwargs)

    # -- what a checkpoint holds beside model, optimizer and scheduler

    def _stateful(self) -> dict[str, ExportableState]:
        """Return the callbacks that export a state, each by its class and its number among those of its class."""
        found: dict[str, ExportableState] = {}
        for one in self.callback_handler.callbacks:
            if isinstance(one, ExportableState):
                name = type(one).__name__
                found[f"{name} {sum(type(each) is type(one) for each in found.values())}"] = one
        return found

    def _taken(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self.state)
        return {
            "epoch": self._epoch,
            # not because of max_steps, which may be larger at the next start
            "is_stopped": self.control.should_training_stop and self.state.global_step < self.state.max_steps,
            "state": {name: fields[name] for name in RESTORED},
            "callbacks": {name: one.state()["attributes"] for name, one in self._stateful().items()},
            "scaler": self._scaler.state_dict() if self._scaler is not None else {},
        }

    def _put_back(self, saved: Mapping[str, Any]) -> None:
        for name, value in saved["state"].items():
            setattr(self.state, name, value)
        for which, one in self._stateful().items():
            for name, value in saved["callbacks"].get(which, {}).items():
                setattr(one, name, value)
        if self._scaler is not None:
            self._scaler.load_state_dict(saved["scaler"])
        self.args.eval_on_start = False

    @property
    def _scaler(self) -> Any:
        return getattr(self.accelerator, "scaler", None)


@contextlib.contextmanager
def _all_batches() -> Iterator[None]:
    """Have the Trainer draw all batches of its loader, which begins where the training is."""
    skip = transformers.trainer.skip_first_batches
    transformers.trainer.skip_first_batches = lambda loader, _count: loader
    try:
        yield
    finally:
        transformers.trainer.skip_first_batches = skip
