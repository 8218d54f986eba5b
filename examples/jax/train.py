"""A data-parallel JAX training that survives: `strata run --job linear -- python train.py` on each node.

`strata.init` joins the job and returns a world with the address at which the processes of this generation meet; JAX
does the rest. If any process dies, even process 0 with JAX's own coordination service, all processes are started
again. They meet at a new address and go on from the last committed checkpoint.

The data is synthetic: the model learns a linear map from noisy examples of the map.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import strata

INPUTS, OUTPUTS, SAMPLES = 16, 4, 1200
BATCH = 24
"""Samples of one step, over all processes."""


def say(event: str, **facts: object) -> None:
    """Print one JSON line; a single write, so that lines of several processes never mix."""
    sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
    sys.stdout.flush()


class Parameters:
    """The trained parameters, in the form in which they are saved: NumPy arrays by name."""

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self.values: dict[str, Any] = {
            "weights": rng.normal(size=(INPUTS, OUTPUTS)).astype(np.float32),
            "bias": np.zeros(OUTPUTS, np.float32),
        }

    def state_dict(self) -> dict[str, Any]:
        return {name: np.asarray(value) for name, value in self.values.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = {name: np.asarray(value) for name, value in state.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--storage", help="a folder that all processes share")
    options = parser.parse_args()

    parameters = Parameters()
    run = strata.init(state={"parameters": parameters}, storage_path=options.storage)
    world = run.world
    place = {"rank": world.rank, "generation": world.generation}
    if world.size > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(world.coordinator_address, world.size, world.rank)
    say("start", **place, world=world.size, pid=os.getpid(), step=run.step, devices=jax.device_count())

    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere = NamedSharding(mesh, PartitionSpec())
    by_sample = NamedSharding(mesh, PartitionSpec("data"))
    parameters.values = {name: jax.device_put(value, everywhere) for name, value in parameters.values.items()}

    @jax.jit
    def train_step(values: Any, x: Any, y: Any, weights: Any) -> tuple[Any, Any]:
        loss, gradients = jax.value_and_grad(loss_of)(values, x, y, weights)
        return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, values, gradients), loss

    x, y = examples()
    while run.step < options.steps:
        # the step number alone selects the samples, so a step has the same samples in every world
        begin = run.step * BATCH % SAMPLES
        mine = [
            jax.make_array_from_process_local_data(by_sample, part)
            for part in share_of(x[begin : begin + BATCH], y[begin : begin + BATCH], world.rank, world.size)
        ]
        parameters.values, loss = train_step(parameters.values, *mine)
        say("step", **place, step=run.step + 1, loss=round(float(loss), 5))
        run.step_done(BATCH)
    run.close()
    say("end", **place, step=run.step)


def examples() -> tuple[Any, Any]:
    """Return random inputs, and the outputs of a linear map with a little noise."""
    rng = np.random.default_rng(7)
    x = rng.normal(size=(SAMPLES, INPUTS)).astype(np.float32)
    y = x @ rng.normal(size=(INPUTS, OUTPUTS)) + 0.01 * rng.normal(size=(SAMPLES, OUTPUTS))
    return x, y.astype(np.float32)


def share_of(x: Any, y: Any, rank: int, size: int) -> tuple[Any, Any, Any]:
    """Return one process's rows of a step, and the weight of each row.

    All processes must have the same number of rows, even if there are fewer samples: padding rows have weight 0.
    """
    rows = -(-len(x) // size)
    mine = slice(rank * rows, (rank + 1) * rows)
    weights = np.zeros(rows, np.float32)
    weights[: len(x[mine])] = 1.0
    filled = [np.resize(part[mine] if len(part[mine]) else part, (rows, part.shape[1])) for part in (x, y)]
    return filled[0], filled[1], weights


def loss_of(values: Any, x: Any, y: Any, weights: Any) -> Any:
    squares = jnp.mean((x @ values["weights"] + values["bias"] - y) ** 2, axis=1)
    return jnp.sum(squares * weights) / jnp.sum(weights)


if __name__ == "__main__":
    main()
