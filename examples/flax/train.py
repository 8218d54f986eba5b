"""A data-parallel Flax NNX classifier that survives: `strata run --job digits --slots 2 -- python train.py`.

It is an ordinary NNX and optax program on several JAX processes. Strata's lines:

- `Pytree` holds the state of the model and of the optimizer, from which a save reads it;
- `strata.init` joins the job, restores the newest checkpoint, and returns the address at which JAX's processes meet;
- `strata.ElasticSampler` and `run.steps` give each process its share of each step, and save when a save is due.

Each process prints one JSON line a step: the epoch, its samples, and the loss of the whole step.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import strata
from strata.integrations.jax import Pytree

BATCH = 50
"""Samples of one step, over all processes."""


class Net(nnx.Module):
    """Two linear layers, from the 64 pixels of a digit to the 10 classes."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.hidden = nnx.Linear(64, 32, rngs=rngs)
        self.classes = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.classes(nnx.relu(self.hidden(x)))


def make() -> dict[str, Any]:
    model = Net(nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.01, warmup_steps=20, decay_steps=1000)
    return {"model": model, "optimizer": nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)}


def loss_of(model: Net, x: Any, y: Any, weights: Any) -> Any:
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
    return jnp.sum(losses * weights) / jnp.sum(weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--storage", help="a folder that all processes share")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()) / "strata-digits")
    options = parser.parse_args()

    # JAX may compute nothing before its processes have met, so the restore fills arrays of the right shapes
    graph, shapes = nnx.split(nnx.eval_shape(make))
    trained = Pytree(jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes))
    run = strata.init(state={"trained": trained}, storage_path=options.storage)
    world = run.world
    if world.size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(world.coordinator_address, world.size, world.rank)
    place = {"rank": world.rank, "generation": world.generation}
    say("start", **place, world=world.size, pid=os.getpid(), step=run.step, devices=jax.device_count())

    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_sample = NamedSharding(mesh, PartitionSpec("data"))
    trained.tree = jax.device_put(trained.tree if run.step else nnx.state(make()), everywhere)

    @jax.jit
    def train_step(state: Any, x: Any, y: Any, weights: Any) -> tuple[Any, Any]:
        both = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_of)(both["model"], x, y, weights)
        both["optimizer"].update(both["model"], gradients)
        return nnx.state(both), loss

    images, labels = digits(options.data)
    sampler = strata.ElasticSampler(len(labels), global_batch=BATCH, seed=7)
    rows = -(-BATCH // jax.device_count()) * jax.local_device_count()
    for epoch in range(options.epochs):
        for samples in run.steps(sampler):
            # all processes must have the same number of rows: rows beyond a process's share have weight 0
            weights = (np.arange(rows) < len(samples)).astype(np.float32)
            padded = np.resize(samples, rows)
            share = [
                jax.make_array_from_process_local_data(by_sample, part)
                for part in (images[padded], labels[padded], weights)
            ]
            trained.tree, loss = train_step(trained.tree, *share)
            say("step", **place, step=run.begun, epoch=epoch, samples=samples, loss=float(loss))
    run.close()
    say("end", **place, step=run.step, digest=digest(trained.tree))


def digits(folder: Path) -> tuple[Any, Any]:
    """Return memory maps of scikit-learn's images and labels; the first processes of a node write the files."""
    folder.mkdir(parents=True, exist_ok=True)
    bunch = load_digits()
    arrays = {"images": (bunch.data / 16).astype(np.float32), "labels": bunch.target.astype(np.int32)}
    for name, array in arrays.items():
        if not (folder / f"{name}.npy").exists():
            written = folder / f"{name}-{os.getpid()}.npy"
            np.save(written, array)
            written.replace(folder / f"{name}.npy")
    images, labels = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in arrays)
    return images, labels


def digest(state: Any) -> str:
    """Return a digest of all bits of a state that every process has whole."""
    return hashlib.sha256(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state))).hexdigest()


def say(event: str, **facts: object) -> None:
    """Print one JSON line; a single write, so that lines of several processes never mix."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
