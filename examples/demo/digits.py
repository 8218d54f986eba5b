"""The demo's data and model: scikit-learn's handwritten digits and a small convolutional net."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import Dataset

HELD_OUT = 297


class Digits(Dataset[tuple[Tensor, Tensor]]):
    """1,797 images of 8 x 8 pixels: the first 1,500 for training, the last 297 for testing."""

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
    """Return the fraction of the held-out images that the net classifies correctly."""
    test = Digits(train=False)
    net.eval()
    with torch.no_grad():
        right = (net(test.images).argmax(1) == test.labels).float().mean()
    net.train()
    return float(right)
