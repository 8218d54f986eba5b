"""A Lightning training that reports all it does, and hangs where it is told to by generation."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from typing import Any

import lightning as L  # noqa: N812  # as its users write it
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strata.integrations.lightning import StrataCallback, trainer_place
from tests.ranks.saying import say

SAMPLES, GLOBAL_BATCH, ACCUMULATE = 220, 24, 2


class Net(L.LightningModule):
    """A small net with dropout, a scheduler that follows the validation, and a state of its own."""

    def __init__(self, place: tuple[str, int]) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 1))
        self.seen = 0
        self.own = {"batches": 0}
        self._place = place

    def hang(self, where: str) -> None:
        if (where, self.trainer.global_step) == self._place:
            say("hangs", pid=os.getpid())
            time.sleep(1000)  # until it is killed

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.hang("batch")
        number, x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.seen += len(number)
        self.own["batches"] += 1
        lr = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.log("train", loss)
        facts = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch, "batch": batch_idx}
        say("batch", **facts, ids=number.tolist(), loss=loss.item(), lr=lr, seen=self.seen)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.hang("validation")
        _number, x, y = batch
        self.log("val", nn.functional.mse_loss(self.net(x), y), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            facts = {"step": self.trainer.global_step, "epoch": self.trainer.current_epoch}
            say("validated", **facts, loss=self.trainer.callback_metrics["val"].item())

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]
        assert checkpoint["state_dict"].keys() == self.state_dict().keys()
        assert checkpoint["global_step"] > 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val"}}


class Epochs(Callback):
    """Reports the hooks of epochs."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        say("epoch", step=trainer.global_step, epoch=trainer.current_epoch)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        say("epoch_end", step=trainer.global_step, epoch=trainer.current_epoch)


def samples(count: int, seed: int) -> TensorDataset:
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 8, generator=numbers)
    return TensorDataset(torch.arange(count), x, x.square().sum(1, keepdim=True))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--hang", nargs="*", default=[], help="batch:STEP or validation:STEP, by generation")
    options = parser.parse_args()
    generation = int(os.environ["STRATA_GENERATION"])
    where, _, step = (options.hang[generation - 1 : generation] or ["never:0"])[0].partition(":")

    torch.set_num_threads(1)
    L.seed_everything(0, verbose=False)
    net = Net((where, int(step)))
    survives = StrataCallback(
        global_batch=GLOBAL_BATCH, state=net.own, storage_path=options.storage, save_every_steps=3
    )
    stopping = EarlyStopping("val", patience=100, strict=False)
    place = trainer_place()
    trainer = L.Trainer(
        callbacks=[survives, Epochs(), stopping],
        accelerator="cpu",
        strategy="ddp" if place["devices"] * place["num_nodes"] > 1 else "auto",
        max_epochs=options.epochs,
        accumulate_grad_batches=ACCUMULATE,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        **place,
    )
    loader = DataLoader(samples(SAMPLES, 1), batch_size=6, shuffle=True)
    trainer.fit(net, survives.loader(loader), DataLoader(samples(40, 2), batch_size=10))
    found = hashlib.sha256()
    for parameter in net.parameters():
        found.update(parameter.detach().numpy().tobytes())
    facts = {"waited": stopping.wait_count, "best": float(stopping.best_score), "batches": net.own["batches"]}
    say("end", step=trainer.global_step, digest=found.hexdigest()[:16], **facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
