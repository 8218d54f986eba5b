"""A process for seeds: every run of one gives the same, however pytest was started."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.sim.run import Result, run_seed
from tests.sim.seeds.batch import pool

Run = Callable[[int], Result]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a seed as `python -m tests.sim --seed N` does: in a process whose sets of strings have the same order."""
    with pool(1, give_way=False) as processes:
        yield lambda seed: processes.submit(run_seed, seed).result()
