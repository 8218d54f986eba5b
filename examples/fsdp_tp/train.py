"""A language model under FSDP2 and tensor parallelism, the loop of TorchTitan, with three lines of Strata.

    strata run --job tiny --slots 4 -- python train.py --tp 2

`--tp` ranks hold one replica of the model and get the same batches. All ranks together hold `world / tp` replicas,
which FSDP shards once more. If ranks are lost, the job goes on in a world of another size, with the same `--tp` or
another: a checkpoint has the whole parameters, whatever the mesh was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import strata

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS, LENGTH, WIDTH, HEADS, LAYERS = 64, 16, 32, 4, 2
WARMUP = 10


def say(event: str, **facts: object) -> None:
    """Print one JSON line; a single write, so that lines of several ranks never mix."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tp", type=int, default=2, help="ranks that hold one replica of the model")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=4, help="samples of a rank in one backward pass")
    parser.add_argument("--accumulate", type=int, default=2, help="backward passes in one step")
    parser.add_argument("--storage", type=Path, help="a folder that all ranks share")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(0)
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo")
    mesh = init_device_mesh(
        DEVICE, (dist.get_world_size() // options.tp, options.tp), mesh_dim_names=("dp", "tp")
    )
    model = parallel(Decoder().to(DEVICE), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))
    loader = DataLoader(Progressions(options.samples), batch_size=options.batch, shuffle=True)

    run = strata.init(
        model=model,
        optim=optimizer,
        sched=schedule,
        data=loader,
        mesh=mesh["dp"],
        storage_path=options.storage,
    )
    generation = run.world.generation
    place = {"rank": dist.get_rank(), "dp": mesh.get_local_rank("dp"), "tp": mesh.get_local_rank("tp")}
    say(
        "begun",
        **place,
        generation=generation,
        world=dist.get_world_size(),
        pid=os.getpid(),
        step=run.step,
        digest=digest(model, optimizer),
    )
    for epoch in range(options.epochs):
        samples: list[int] = []
        total = 0.0
        for numbers, batch in run.steps(accumulate=options.accumulate):
            tokens = batch.to(DEVICE)
            loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            (loss * run.weight).backward()
            samples += numbers.tolist()
            total += loss.item() * len(numbers)
            if not run.last_of_step:
                continue
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            say(
                "step",
                **place,
                generation=generation,
                step=run.begun,
                epoch=epoch,
                samples=samples,
                loss=total / len(samples),
                digest=digest(model, optimizer),
            )
            samples, total = [], 0.0
    run.close()
    say("end", **place, step=run.step, digest=digest(model, optimizer))
    dist.destroy_process_group()


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    """Return a digest of all bits of the whole parameters and of their moments; all ranks must call this."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        moments = sorted(optimizer.state.get(parameter, {}).items())
        for value in (parameter, *(moment for _, moment in moments)):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            found.update(whole.detach().cpu().numpy().tobytes())
    return found.hexdigest()[:16]


# -- the model and its parallelism


class Attention(nn.Module):
    """Attention over this position and those before it; each tensor-parallel rank has some of the heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.wq, self.wk, self.wv)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.wo(attended.transpose(1, 2).flatten(2))
        return out


class Layer(nn.Module):
    """Attention, then a feed-forward network."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.attention = Attention()
        self.feed_forward = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH, bias=False), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return out


class Decoder(nn.Module):
    """Predicts the next token at each position, as logits over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        self.norm = nn.RMSNorm(WIDTH)
        self.output = nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.norm(self.layers(self.embeddings(tokens))))
        return logits


def parallel(model: Decoder, mesh: DeviceMesh) -> Decoder:
    """Divide each layer over the mesh's dimension `tp`, then shard each part over its dimension `dp`."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    plan = {
        "embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "layers.*.attention_norm": SequenceParallel(),
        "layers.*.attention": gathered,
        "layers.*.attention.w[qkv]": ColwiseParallel(),
        "layers.*.attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "layers.*.ffn_norm": SequenceParallel(),
        "layers.*.feed_forward": gathered,
        "layers.*.feed_forward.0": ColwiseParallel(),
        "layers.*.feed_forward.2": RowwiseParallel(output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model


# -- the data


class Progressions(Dataset[tuple[int, Tensor]]):
    """Arithmetic progressions of tokens: two tokens of a progression determine those that follow."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[int, Tensor]:
        first, difference = number % TOKENS, 1 + number // TOKENS % 7
        return number, (first + difference * torch.arange(LENGTH + 1)) % TOKENS


if __name__ == "__main__":
    main()
