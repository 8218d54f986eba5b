"""A data-parallel PyTorch training that survives: run it with `strata run -- python train.py`.

What Strata adds to an ordinary DistributedDataParallel script is marked with `strata`. Each rank
prints one JSON line a step, so that whoever watches can tell which steps were computed when.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

import torch
import torch.distributed as dist
from digits import Digits, Net, RankBatches, accuracy, steps_per_epoch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import strata


def say(**facts: object) -> None:
    """Print one event; a single write, so that lines of several ranks never mix."""
    sys.stdout.write(json.dumps({"at": round(time.time(), 3), **facts}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--storage", required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    client = strata.connect()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    say(event="start", rank=rank, world=world, generation=client.generation, pid=os.getpid())

    train = Digits(train=True)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    progress = {"step": 0}
    state = {"model": net, "optimizer": optimizer, "progress": progress}

    with strata.CheckpointManager(storage_path=options.storage, client=client) as checkpoints:
        restored = checkpoints.restore(state)
        step = int(progress["step"])
        say(event="restore", rank=rank, step=step, restored=restored is not None)

        model = DistributedDataParallel(net)
        loss_of = nn.CrossEntropyLoss()
        an_epoch = steps_per_epoch(len(train), options.batch, world)
        while step < options.epochs * an_epoch:
            epoch, first = divmod(step, an_epoch)
            batches = RankBatches(
                samples=len(train),
                epoch=epoch,
                first=first,
                batch=options.batch,
                rank=rank,
                world=world,
            )
            for images, labels in DataLoader(train, batch_sampler=batches, num_workers=1):
                optimizer.zero_grad()
                loss = loss_of(model(images), labels)
                loss.backward()
                optimizer.step()
                step += 1
                progress["step"] = step
                client.progress(step=step, phase="train")
                say(event="step", rank=rank, step=step, loss=round(loss.item(), 4))
                if step % options.save_every == 0:
                    client.barrier("save")
                    checkpoints.save_state(state, step=step, epoch=epoch)
        checkpoints.wait_until_finished()
    if rank == 0:
        say(event="accuracy", rank=rank, value=round(accuracy(net), 4), step=step)
    dist.destroy_process_group()
    client.close()


if __name__ == "__main__":
    main()
