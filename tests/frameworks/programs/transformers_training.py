"""A training by Hugging Face's Trainer that reports all it does, and hangs where it is told to by generation."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    EarlyStoppingCallback,
    LlamaConfig,
    LlamaForCausalLM,
    TrainerCallback,
    TrainingArguments,
)

from strata.integrations.transformers import StrataTrainer
from tests.ranks.saying import say

SAMPLES, GLOBAL_BATCH, ACCUMULATE, TOKENS = 220, 24, 2, 12


class Reporting(StrataTrainer):
    """Reports each batch, and hangs in it if this is the place."""

    place = ("never", 0)
    own: dict[str, int]

    def hang(self, where: str) -> None:
        if (where, self.state.global_step) == self.place:
            say("hangs", pid=os.getpid())
            time.sleep(1000)  # until it is killed

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        self.hang("batch")
        ids = inputs["input_ids"][:, 0].tolist()
        self.own["batches"] += 1
        loss = super().training_step(model, inputs, *args, **kwargs)
        lr = self.optimizer.param_groups[0]["lr"]
        say("batch", step=self.state.global_step, batch=ids[0], ids=ids, loss=loss.item(), lr=lr)
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        self.hang("evaluation")
        metrics = super().evaluate(*args, **kwargs)
        say("evaluated", step=self.state.global_step, loss=metrics["eval_loss"], epoch=metrics["epoch"])
        return metrics


class Stopping(TrainerCallback):
    """Stops the training after a step, and hangs at its end if this is the place."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.hang: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.hang("end")


class Epochs(TrainerCallback):
    """Reports the hooks of epochs."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say("epoch", step=state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        say("epoch_end", step=state.global_step, epoch=state.epoch)


def samples(count: int, seed: int) -> Dataset:
    """Return sequences whose first token is their number, and whose others follow a rule."""
    numbers = torch.Generator().manual_seed(seed)
    starts = torch.randint(1, 250, (count,), generator=numbers).tolist()
    rows = [
        [number, *(start * (k + 1) % 251 for k in range(TOKENS - 1))] for number, start in enumerate(starts)
    ]
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hang", nargs="*", default=[], help="batch:STEP or evaluation:STEP, by generation")
    parser.add_argument(
        "--stop", type=int, default=0, help="a step after which a callback stops the training"
    )
    options = parser.parse_args()
    generation = int(os.environ["STRATA_GENERATION"])
    where, _, step = (options.hang[generation - 1 : generation] or ["never:0"])[0].partition(":")

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, attention_dropout=0.1, **sizes, **heads))
    arguments = TrainingArguments(
        output_dir=f"{options.storage}/trainer",
        use_cpu=True,
        num_train_epochs=options.epochs,
        gradient_accumulation_steps=ACCUMULATE,
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        logging_steps=4,
        seed=3,
        report_to="none",
        disable_tqdm=True,
    )
    own = {"batches": 0}
    stopping = Stopping(options.stop)
    trainer = Reporting(
        model,
        arguments,
        train_dataset=samples(SAMPLES, 1),
        eval_dataset=samples(40, 2),
        callbacks=[Epochs(), stopping, EarlyStoppingCallback(early_stopping_patience=100)],
        strata={
            "global_batch": GLOBAL_BATCH,
            "state": own,
            "storage_path": options.storage,
            "save_every_steps": 3,
        },
    )
    trainer.own = own
    stopping.hang = trainer.hang
    trainer.place = (where, int(step))
    trainer.train()
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
    losses = [(one["step"], one["eval_loss"]) for one in trainer.state.log_history if "eval_loss" in one]
    facts = {"losses": losses, "batches": own["batches"]}
    say("end", step=trainer.state.global_step, digest=found.hexdigest()[:16], **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
