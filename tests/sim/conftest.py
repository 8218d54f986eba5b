"""The thousand seeds run from the start of the session on, on what the other tests leave idle.

They take minutes of both cores, and integration tests mostly wait. So the processes give way to all
others, and `test_simulation` finds most results there when its turn comes.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.sim.batch import pool
from tests.sim.run import Result, run_seed

SEEDS = int(os.environ.get("SIM_SEEDS", "1000"))
JOBS = 2
SIMULATION = Path(__file__).with_name("test_simulation.py")

Running = dict[int, Future[Result]]

_processes = pytest.StashKey[ExitStack]()
_running = pytest.StashKey[Running]()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with the seeds if they are asked for."""
    if session.config.option.collectonly or all(item.path != SIMULATION for item in session.items):
        return
    stack = session.config.stash[_processes] = ExitStack()
    processes = stack.enter_context(pool(JOBS))
    session.config.stash[_running] = {seed: processes.submit(run_seed, seed) for seed in range(SEEDS)}


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Begin no further seed."""
    if (stack := session.config.stash.get(_processes, None)) is not None:
        stack.close()


@pytest.fixture(scope="session")
def running(pytestconfig: pytest.Config) -> Running:
    """All seeds, being run in their order."""
    return pytestconfig.stash[_running]
