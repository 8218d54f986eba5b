"""A rank of an exact, elastic training without torch, in which every step can be judged.

The only parameter is a number. Each step computes the next number from the present number and the step's samples,
which the ranks add up at a barrier. So the number after step n must be the same in every world and after every
restart. The number is wrong if a sample was left out or used twice, or if a step began from a wrong number.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

import strata
from strata.data.order import mix
from strata.data.sampler import ElasticSampler
from strata.errors import BarrierTimeout, Unavailable
from tests.ranks.saying import say

GLOBAL_BATCH = 12
"""Samples a step: divisible by worlds of 1, 2, 3, 4 and 6 ranks."""
LENGTH = 240


class Number:
    """The parameter, with the methods that save and restore it."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": str(self.value)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = int(state["value"])


def sampler() -> ElasticSampler:
    """Return the sampler, which defines the samples of each step."""
    return ElasticSampler(LENGTH, global_batch=GLOBAL_BATCH, seed=5)


def gradient(samples: Sequence[int]) -> int:
    """Return the sum that these samples contribute to a step."""
    return sum(mix(sample + 1) for sample in samples)


def stepped(value: int, total: int) -> int:
    """Return the parameter after a step whose contributions add up to `total`."""
    return mix(value + total)


def reference(epochs: int) -> list[int]:
    """Return the parameter before the first step and after each step of an undisturbed training."""
    values = [0]
    for epoch in range(epochs):
        for samples in sampler().indices(epoch, 0, 1):
            values.append(stepped(values[-1], gradient(samples)))
    return values


def reduce(run: strata.Run, own: int) -> int:
    """Return the sum of the contributions of all ranks."""
    while True:
        try:
            brought = run.context.barrier("reduce", json.dumps(own).encode())
        except (Unavailable, BarrierTimeout):
            continue  # the outcome is not known yet, so the rank enters the same round again
        return sum(json.loads(part) for part in brought.values())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--pace-s", type=float, default=0.02)
    options = parser.parse_args()

    number = Number()
    run = strata.init(state={"number": number})
    world = run.world
    say(
        "start",
        at=time.monotonic(),
        step=run.step,
        value=str(number.value),
        pid=os.getpid(),
        world=world.size,
    )
    data = sampler()
    for _ in range(options.epochs):
        for samples in run.steps(data):
            number.value = stepped(number.value, reduce(run, gradient(samples)))
            say("step", step=run.begun, value=str(number.value))
            time.sleep(options.pace_s)
    run.close()
    goodput = run.goodput()
    say(
        "end",
        step=run.step,
        value=str(number.value),
        unix_s=time.time(),
        spent_s=dict(goodput.spent_s),
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
