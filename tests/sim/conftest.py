"""The thousand seeds run from the start of the session on, on what the other tests leave idle.

They take minutes of both cores, and integration tests mostly wait. So the processes give way to all
others, and `test_simulation` finds most results there when its turn comes. Where several pytest
processes share the suite, one of them runs the seeds, and whichever has `test_simulation` finds the
results in a folder of this run.

They have BUDGET_S, which CI makes shorter. Those that a machine too slow for all of them did not reach
are skipped by number, aloud: but only if they were coming. A process that died, or a seed that hangs,
fails.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Event

import pytest

from tests.conftest import ROOT
from tests.sim.batch import pool
from tests.sim.run import Result, run_seed

SEEDS = int(os.environ.get("SIM_SEEDS", "1000"))
JOBS = max(2, (os.cpu_count() or 2) // 2)
"""Processes for them; integration tests need the other cores when their time comes."""
BUDGET_S = float(os.environ.get("SIM_BUDGET_S", "3600"))
"""For all seeds together, from the start of the session on."""
SEED_S = 300.0
"""For one: it takes seconds, of processes that give way to all others."""
LIMIT_S = BUDGET_S + SEED_S + 60.0
"""For a test that waits for them."""
SIMULATION = Path(__file__).with_name("test_simulation.py")
LOOK_S = 0.1


class Running:
    """All seeds, being run in their order by some process of this run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def result(self, seed: int) -> Result | None:
        """Return what came of a seed, once it is there; None when time ran out before it was reached."""
        path = self._folder / str(seed)
        until = float((self._folder / BEGAN).read_text()) + BUDGET_S
        while not path.exists():
            silent_s = time.time() - self._folder.stat().st_mtime  # each result is renamed into it
            if silent_s > SEED_S:
                pytest.fail(
                    f"no seed has ended for {silent_s:.0f} s: {seed} or one that runs beside it hangs"
                )
            if time.monotonic() > until:
                return None
            time.sleep(LOOK_S)
        found: Result | BaseException = pickle.loads(path.read_bytes())  # our own
        if isinstance(found, BaseException):
            raise found
        return found


BEGAN = "began"
"""The file that holds when the seeds were begun with, by the machine's clock."""

_processes = pytest.StashKey[ExitStack]()
_futures = pytest.StashKey[Iterable[Future[Result]]]()
_until_s = pytest.StashKey[float]()
_over = pytest.StashKey[Event]()
"""Set once the processes are ended because time is up: what they were at has no result then."""


def pytest_collection_finish(session: pytest.Session) -> None:
    """Begin with the seeds if they are asked for and no other process of this run has."""
    if session.config.option.collectonly or all(item.path != SIMULATION for item in session.items):
        return
    folder = _folder(session.config)
    folder.parent.mkdir(parents=True, exist_ok=True)
    mine = folder.with_name(f"{folder.name}.{os.getpid()}")  # there at once, or not at all, with its time
    mine.mkdir()
    began_s = time.monotonic()
    (mine / BEGAN).write_text(str(began_s))
    try:
        mine.rename(folder)
    except OSError:  # another's, with something in it
        shutil.rmtree(mine)
        return
    session.config.stash[_until_s] = began_s + BUDGET_S
    stack = session.config.stash[_processes] = ExitStack()
    processes = stack.enter_context(pool(JOBS))
    futures = [processes.submit(run_seed, seed) for seed in range(SEEDS)]
    session.config.stash[_futures] = futures
    over = session.config.stash[_over] = Event()
    for seed, future in enumerate(futures):
        future.add_done_callback(partial(_keep, folder / str(seed), over))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Go on for another process's sake, unless the run is broken off; then begin no further seed."""
    stack = session.config.stash.get(_processes, None)
    if stack is None:
        return
    if exitstatus in {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED} and not session.shouldfail:
        left_s = session.config.stash[_until_s] - time.monotonic()
        if wait(session.config.stash[_futures], max(0.0, left_s)).not_done:
            session.config.stash[_over].set()
            for child in multiprocessing.active_children():
                child.terminate()  # nobody waits for what they are at
    stack.close()


@pytest.fixture(scope="session")
def running(pytestconfig: pytest.Config) -> Iterator[Running]:
    """All seeds, being run in their order; nobody looks for their results afterwards."""
    folder = _folder(pytestconfig)
    yield Running(folder)
    shutil.rmtree(folder, ignore_errors=True)


def _folder(config: pytest.Config) -> Path:
    run = getattr(config, "workerinput", {}).get("testrunuid", str(os.getpid()))
    return ROOT / ".strata" / "tmp" / f"seeds-{run}"


def _keep(path: Path, over: Event, done: Future[Result]) -> None:
    if done.cancelled() or over.is_set() or not path.parent.exists():
        return
    new = path.with_suffix(".new")
    new.write_bytes(pickle.dumps(done.exception() or done.result()))
    new.rename(path)
