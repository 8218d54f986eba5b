"""The demo's data and model: scikit-learn's handwritten digits and a small convolutional net."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

HELD_OUT = 297


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """1,797 pictures of 8 x 8 pixels: the first 1,500 to train on, the last 297 to test on."""

    def __init__(self, *, train: bool) -> None:
        bunch = load_digits()
        images = torch.tensor(bunch.images, dtype=torch.float32).div(16.0).unsqueeze(1)
        labels = torch.tensor(bunch.target, dtype=torch.int64)
        # a fixed shuffle, because the file is ordered by writer
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))
        chosen = order[:-HELD_OUT] if train else order[-HELD_OUT:]
        self.images, self.labels = images[chosen], labels[chosen]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


class RankBatches(Sampler[list[int]]):
    """One rank's batches of one epoch, from a given step on.

    The order of an epoch depends on the epoch alone, so a run that begins again in the middle of
    one goes on with exactly the samples that are left.
    """

    def __init__(self, *, samples: int, epoch: int, first: int, batch: int, rank: int, world: int) -> None:
        self.samples, self.epoch, self.first = samples, epoch, first
        self.batch, self.rank, self.world = batch, rank, world

    def __len__(self) -> int:
        return steps_per_epoch(self.samples, self.batch, self.world) - self.first

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.epoch))
        whole = self.batch * self.world
        for step in range(self.first, self.first + len(self)):
            begin = step * whole + self.rank * self.batch
            yield order[begin : begin + self.batch].tolist()


def steps_per_epoch(samples: int, batch: int, world: int) -> int:
    """Return how many full global batches an epoch has."""
    return samples // (batch * world)


class Net(nn.Module):
    """Two convolutions and two linear layers; about 40,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(512, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits


def accuracy(net: nn.Module) -> float:
    """Return the share of the held-out pictures that the net names rightly."""
    test = Digits(train=False)
    net.eval()
    with torch.no_grad():
        right = (net(test.images).argmax(1) == test.labels).float().mean()
    net.train()
    return float(right)
