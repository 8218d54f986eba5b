"""A separate process that runs seeds, so that every run of a seed is the same, however pytest was started."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sim.run import Result, run_seed
from tests.sim.seeds.batch import pool

Run = Callable[[int], Result]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Run a seed as `python -m tests.sim --seed N` does: in a process with a fixed order of sets of strings."""
    with pool(1, give_way=False) as processes:
        yield lambda seed: processes.submit(run_seed, seed).result()
