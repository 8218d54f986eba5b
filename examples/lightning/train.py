"""A Lightning training that survives: `strata run --job digits --slots 2 -- python examples/lightning/train.py`.

The lines of Strata are the callback, the place in the world, and the wrapped loader.
"""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L  # noqa: N812  # as its users write it
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from strata.integrations.lightning import StrataCallback, trainer_place


class Digits(L.LightningModule):
    """A classifier of handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.2), nn.Linear(128, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=1e-2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return the samples to train on, and those to validate with."""
    found = load_digits()
    x, y = torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
    return TensorDataset(x[:1500], y[:1500]), TensorDataset(x[1500:], y[1500:])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", help="a folder that all hosts share")
    options = parser.parse_args()

    L.seed_everything(0)
    train, validate = digits()
    survives = StrataCallback(global_batch=48, storage_path=options.storage, save_every_steps=10)
    trainer = L.Trainer(
        max_epochs=options.epochs,
        accelerator="auto",
        strategy="auto",
        logger=False,
        enable_checkpointing=False,
        callbacks=[survives],
        **trainer_place(),
    )
    loader = DataLoader(train, batch_size=24, shuffle=True)
    trainer.fit(Digits(), survives.loader(loader), DataLoader(validate, batch_size=64))


if __name__ == "__main__":
    main()
