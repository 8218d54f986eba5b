"""An ordinary DistributedDataParallel training; `train.py` adds Strata to `plain.py` by three lines."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def curve(count: int) -> TensorDataset:
    """Return points of a curve with a little noise on it."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(count, 2, generator=generator) * 4 - 2
    y = torch.sin(x[:, :1]) * torch.cos(x[:, 1:]) + 0.02 * torch.randn(count, 1, generator=generator)
    return TensorDataset(x, y)


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    net = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.7)
    dataset = curve(960)
    sampler = DistributedSampler(dataset, seed=3)
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)

    for epoch in range(int(os.environ.get("EPOCHS", "20"))):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
        scheduler.step()

    if dist.get_rank() == 0:
        x, y = dataset.tensors
        print(f"loss {nn.functional.mse_loss(net(x), y).item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
