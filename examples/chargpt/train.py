"""A character-level GPT under torchrun, with Strata as its rendezvous.

    torchrun --rdzv-backend=strata --rdzv-endpoint=host1:50051,host2:50051,host3:50051 \
        --rdzv-id=gpt --nnodes=2:3 --nproc-per-node=1 --max-restarts=10 train.py

`strata run -- python train.py` runs this script too, and so does `python train.py`, as a standalone process. The
model learns from the licence texts of Debian. At the end rank 0 writes a short text in their style.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import strata

WIDTH = 64
WARMUP = 50
LICENCES = Path("/usr/share/common-licenses")
HELD_OUT = 0.05


def say(event: str, **facts: object) -> None:
    """Print one JSON line; a single write, so that lines of several ranks never mix."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--text", type=Path, default=LICENCES, help="a folder of texts")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=8, help="windows a rank and step")
    parser.add_argument("--storage", type=Path, help="a folder that all ranks share")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    text = read_text(options.text)
    train, test = (Characters(text, width=WIDTH, train=part) for part in (True, False))
    net = CharGPT(len(train.alphabet), length=WIDTH)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))

    run = strata.init(model=net, optim=optimizer, sched=schedule, storage_path=options.storage)
    world = run.world
    place = {"rank": world.rank, "generation": world.generation}
    say("start", **place, world=world.size, worker=world.worker_id, pid=os.getpid(), step=run.step)

    sampler: DistributedSampler[tuple[Tensor, Tensor]] | None = None
    if world.size > 1:
        sampler = DistributedSampler(train, num_replicas=world.size, rank=world.rank)
    loader = DataLoader(train, batch_size=options.batch, sampler=sampler, shuffle=sampler is None)
    model: nn.Module = DistributedDataParallel(net) if world.size > 1 else net
    for epoch in range(options.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for numbers, following in run.steps(loader):
            optimizer.zero_grad()
            loss = loss_of(model(numbers), following)
            (loss * run.weight).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            say("step", **place, step=run.begun, loss=round(loss.item(), 4))
        with run.phase("eval"):
            say("epoch", **place, step=run.step, epoch=epoch, test_loss=round(evaluate(net, test), 4))
    if world.rank == 0:
        written = net.write(test[0][0], 200, generator=torch.Generator().manual_seed(0))
        say("written", **place, text=test.spell(written[WIDTH:]))
    run.close()
    say("end", **place, step=run.step)


# -- the text


def read_text(folder: Path) -> str:
    """Return the texts of a folder in the order of their names, without symbolic links: these repeat other files."""
    files = sorted(path for path in folder.iterdir() if path.is_file() and not path.is_symlink())
    return "\n\n".join(path.read_text(encoding="utf-8", errors="replace") for path in files)


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Windows of `width` characters as numbers, each paired with the characters that follow."""

    def __init__(self, text: str, *, width: int, train: bool) -> None:
        self.alphabet = sorted(set(text))
        number = {character: i for i, character in enumerate(self.alphabet)}
        numbers = torch.tensor([number[character] for character in text])
        cut = int(len(numbers) * (1 - HELD_OUT))
        self.numbers = numbers[:cut] if train else numbers[cut:]
        self.width = width

    def __len__(self) -> int:
        return (len(self.numbers) - 1) // self.width

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        begin = index * self.width
        window = self.numbers[begin : begin + self.width + 1]
        return window[:-1], window[1:]

    def spell(self, numbers: Tensor) -> str:
        """Return the characters for these numbers."""
        return "".join(self.alphabet[i] for i in numbers.tolist())


# -- the model


class Block(nn.Module):
    """Attention over this position and those before it, then a feed-forward network."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.before_thought = nn.LayerNorm(width)
        self.thought = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.queries_keys_values(self.before_attention(x)).split(width, dim=2)
        query, key, value = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.thought(self.before_thought(x))
        return x + thought


class CharGPT(nn.Module):
    """Predicts the next character at each position of a text, as logits over the alphabet."""

    def __init__(
        self, alphabet: int, *, length: int = 64, width: int = 64, heads: int = 4, blocks: int = 2
    ) -> None:
        super().__init__()
        self.length = length
        self.characters = nn.Embedding(alphabet, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(blocks)))
        self.last = nn.LayerNorm(width)
        self.logits = nn.Linear(width, alphabet)

    def forward(self, numbers: Tensor) -> Tensor:
        places = torch.arange(numbers.shape[1], device=numbers.device)
        logits: Tensor = self.logits(self.last(self.blocks(self.characters(numbers) + self.places(places))))
        return logits

    @torch.no_grad()
    def write(self, begin: Tensor, count: int, *, generator: torch.Generator) -> Tensor:
        """Return `begin` and `count` more characters, sampled from the model's predictions."""
        numbers = begin
        for _ in range(count):
            logits = self(numbers[-self.length :].unsqueeze(0))[0, -1]
            drawn = torch.multinomial(torch.softmax(logits, 0), 1, generator=generator)
            numbers = torch.cat((numbers, drawn))
        return numbers


def loss_of(logits: Tensor, following: Tensor) -> Tensor:
    """Return the mean cross-entropy of the following characters, in nats."""
    return functional.cross_entropy(logits.flatten(0, 1), following.flatten())


@torch.no_grad()
def evaluate(net: CharGPT, test: Characters) -> float:
    """Return the mean loss on the held-out text."""
    net.eval()
    losses = [loss_of(net(numbers), following) for numbers, following in DataLoader(test, batch_size=64)]
    net.train()
    return float(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
