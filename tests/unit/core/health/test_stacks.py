"""Parsing of stack dumps: the main thread's position and activity."""

from __future__ import annotations

import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.manager import CheckpointManager
from strata.client.event_loop import BackgroundLoop
from strata.client.rank.rank_client import RankClient
from strata.core.health.stacks import CODE, COLLECTIVE, DATA, STORAGE, activity, innermost, shortened
from strata.training.loop.clock import Clock
from strata.training.loop.compute_timer import ComputeTimer
from strata.training.loop.run import Run
from strata.training.save.saves import Saves
from tests.conftest import ROOT
from tests.sim.attribution import simulated_stacks, simulated_training

DUMP = """Thread 0x00007f1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait

Current thread 0x00007f2 (most recent call first):
  File "/app/torch/autograd/graph.py", line 841 in _engine_run_backward
  File "/app/train.py", line 30 in <module>
"""


def test_the_main_thread_stands_where_the_last_stack_begins() -> None:
    assert innermost(DUMP) == "_engine_run_backward (graph.py)"
    waiting = (
        'Thread 0x1 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 9 in wait\n'
    )
    assert innermost(waiting) == "wait (threading.py)"
    assert innermost(waiting + '  File "/app/loader.py", line 9 in fetch\n') == "fetch (loader.py)"
    site = '  File "/usr/lib/python3/dist-packages/torch/autograd/graph.py", line 9 in backward\n'
    assert innermost(waiting + site) == "backward (graph.py)"
    assert innermost("") == innermost("no stack\nat all") == ""


HEAD = "Current thread 0x1 (most recent call first):\n"
PYTHON = '  File "/usr/lib/python3.11/threading.py", line 320 in wait\n'


def frames(*calls: str) -> str:
    """Return a dump whose main thread has these `file:function`, the innermost first."""
    split = (call.rsplit(":", 1) for call in calls)
    return HEAD + PYTHON + "".join(f'  File "{file}", line 7 in {function}\n' for file, function in split)


SITE = "/venv/lib/python3.11/site-packages"
STEPS = f"{SITE}/strata/training/loop/run.py:_steps"


@pytest.mark.parametrize(
    ("stack", "what"),
    [
        ("", ""),
        ("nonsense", ""),
        (
            frames(f"{SITE}/torch/distributed/distributed_c10d.py:all_reduce", "/app/train.py:main"),
            COLLECTIVE,
        ),
        (
            frames(
                f"{SITE}/strata/client/event_loop.py:call",
                f"{SITE}/strata/client/rank/rank_client.py:barrier",
                "/app/train.py:main",
            ),
            COLLECTIVE,
        ),
        (
            frames(
                f"{SITE}/strata/client/event_loop.py:call",
                f"{SITE}/strata/client/rank/rank_client.py:call",
                "/app/train.py:main",
            ),
            CODE,
        ),
        (frames("/app/disk.py:fetch", f"{SITE}/strata/training/loop/compute_timer.py:waiting", STEPS), DATA),
        (frames(f"{SITE}/torch/utils/data/dataloader.py:_try_get_data", "/app/train.py:main"), DATA),
        (frames(f"{SITE}/strata/checkpoint/storage/local_storage.py:write", "/app/train.py:main"), STORAGE),
        (
            frames(f"{SITE}/strata/training/save/saves.py:wait", f"{SITE}/strata/training/loop/run.py:save"),
            STORAGE,
        ),
        (frames(f"{SITE}/torch/distributed/checkpoint/filesystem.py:write", "/app/train.py:main"), STORAGE),
        (frames("/app/train.py:take_two_locks", STEPS), CODE),
        (frames(f"{SITE}/torch/autograd/graph.py:_engine_run_backward", "/app/train.py:main"), CODE),
    ],
)
def test_the_main_threads_activity_is_read_from_its_stack(stack: str, what: str) -> None:
    assert activity(stack) == what


def test_files_of_strata_that_these_stacks_name_exist() -> None:
    """If a module moved, its frames would no longer be classified, and these tests would go on with its old path."""
    simulated = Path(simulated_stacks.__file__).read_text() + Path(simulated_training.__file__).read_text()
    named = set(re.findall(r"\{SITE\}/(strata/[\w/]+\.py)", Path(__file__).read_text() + simulated))
    assert len(named) >= 7
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


@pytest.mark.parametrize(
    ("calls", "what"),
    [
        ((BackgroundLoop.call, RankClient.barrier), COLLECTIVE),
        ((BackgroundLoop.call, RankClient.call), CODE),
        ((BackgroundLoop.call, RankClient.barrier, Saves.save), COLLECTIVE),
        ((Saves.save, Run.steps), STORAGE),
        ((LocalStorage.list, Run.steps), STORAGE),
        ((CheckpointManager.save, Run.steps), STORAGE),
    ],
    ids=["barrier", "call", "barrier of a save", "save", "storage", "manager"],
)
def test_the_product_s_own_functions_are_known_by_their_files(
    calls: tuple[FunctionType, ...], what: str
) -> None:
    assert activity(frames(*(f"{each.__code__.co_filename}:{each.__name__}" for each in calls))) == what


def test_a_rank_that_waits_for_a_batch_shows_it_in_its_own_stack() -> None:
    timer = ComputeTimer(Clock(monotonic_s=time.monotonic, unix_s=time.time, thread_s=time.thread_time))
    requested, released = threading.Event(), threading.Event()

    def batches() -> Iterator[int]:
        yield 1
        requested.set()
        released.wait(10)

    tester = threading.get_ident()

    def dump() -> str:
        """Return this test's stack as faulthandler writes it, which leaves out threads above a hundred."""
        frames = traceback.walk_stack(sys._current_frames()[tester])
        return HEAD + "".join(
            f'  File "{frame.f_code.co_filename}", line {line} in {frame.f_code.co_name}\n'
            for frame, line in frames
        )

    seen: list[str] = []

    def look() -> None:
        requested.wait(10)
        seen.append(dump())
        released.set()

    thread = threading.Thread(target=look)
    thread.start()
    for _ in timer.waiting(batches()):
        assert activity(dump_of_main(dump())) != DATA, "the generator is not on the stack meanwhile"
    thread.join()
    assert activity(dump_of_main(seen[0])) == DATA
    assert innermost(dump_of_main(seen[0])) == f"batches ({Path(__file__).name})"


def dump_of_main(stack: str) -> str:
    """Return the main thread's part of a dump, which is the last part."""
    return stack[stack.rindex("hread 0x") :]


@given(st.lists(st.text(alphabet="abc", max_size=40), max_size=200), st.integers(60, 500))
def test_a_shortened_stack_fits_and_keeps_its_ends(lines: list[str], limit: int) -> None:
    stack = "\n".join(lines)
    short = shortened(stack, limit)
    assert len(short) <= limit
    if len(stack) <= limit:
        assert short == stack
