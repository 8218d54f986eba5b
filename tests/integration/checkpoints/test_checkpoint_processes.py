"""Checkpoints in whole processes: without torch, without NumPy, and at the end of the process."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.processes import Record, Talker

ROOT = Path(__file__).resolve().parents[3]
BLOCKED = "import sys; sys.modules.update({{name: None for name in {names!r}}});"


def run(program: str, *arguments: str, blocked: tuple[str, ...] = ()) -> tuple[int, str]:
    """Run a program in which some modules cannot be imported; return its exit code and output."""
    record = Record()
    text = BLOCKED.format(names=blocked) + "import strata\n" + program
    talker = Talker([sys.executable, "-c", text, *arguments], name="program", record=record, cwd=ROOT)
    code = talker.join()
    talker.wait_quiet()
    return code, "\n".join(event["text"] for event in record.events)


NUMPY_STATE = """
import random, sys, numpy as np
from strata import CheckpointManager
def state():
    return {"w": np.zeros((2, 3), np.float32), "lr": None, "raw": None, "s": None}
with CheckpointManager(sys.argv[1], keep_count=2) as ckpt:
    full = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "lr": 0.1, "raw": b"x", "s": np.float64(2)}
    ckpt.save_state(full, step=1)
    expected = np.random.rand()
    here = state()
    assert ckpt.restore(here).step == 1
    assert here["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert (here["lr"], here["raw"], here["s"]) == (0.1, b"x", np.float64(2))
    assert np.random.rand() == expected
assert sys.modules["torch"] is None
"""

PLAIN_STATE = """
import sys
from strata import CheckpointManager
with CheckpointManager(sys.argv[1]) as ckpt:
    ckpt.save(b"weights", 1)
    ckpt.save_state({"step": 2, "nested": {"raw": b"abc", "list": [1.5, None]}}, 2)
    here = {"step": 0, "nested": {}}
    assert ckpt.restore(here).step == 2
    assert here == {"step": 2, "nested": {"raw": b"abc", "list": [1.5, None]}}
    assert ckpt.load_bytes(1) == b"weights"
"""


def test_numpy_state_is_saved_and_restored_without_torch(tmp_path: Path) -> None:
    assert run(NUMPY_STATE, str(tmp_path), blocked=("torch",)) == (0, "")


def test_plain_state_needs_neither_numpy_nor_torch(tmp_path: Path) -> None:
    assert run(PLAIN_STATE, str(tmp_path), blocked=("torch", "numpy")) == (0, "")


def test_a_manager_alone_imports_no_grpc_and_no_protobuf(tmp_path: Path) -> None:
    program = PLAIN_STATE + "assert not {'grpc', 'google.protobuf', 'numpy', 'torch'} & set(sys.modules)\n"
    assert run(program, str(tmp_path)) == (0, "")


TORCH_SAVES = """
import sys, torch
from strata import CheckpointManager
with CheckpointManager(sys.argv[1]) as ckpt:
    ckpt.save_state({"w": torch.arange(3.0), "bf": torch.ones(2, dtype=torch.bfloat16)}, 1)
"""
NUMPY_READS = """
import sys, numpy as np
import strata
with strata.CheckpointManager(sys.argv[1]) as ckpt:
    here = {"w": np.zeros(3, np.float32)}
    ckpt.restore(here)
    assert here["w"].tolist() == [0, 1, 2]
    try:
        ckpt.restore({"bf": None})
    except strata.CheckpointError as error:
        assert "bf is bfloat16[2]" in str(error), error
    else:
        raise AssertionError
"""


@pytest.mark.journey
def test_numpy_restores_a_torch_checkpoint_without_torch(tmp_path: Path) -> None:
    assert run(TORCH_SAVES, str(tmp_path)) == (0, "")
    assert run(NUMPY_READS, str(tmp_path), blocked=("torch",)) == (0, "")


FORGETS_TO_CLOSE = """
import sys
import strata
ckpt = strata.CheckpointManager(sys.argv[1])
ckpt.save(bytes(32 << 20), 1)
"""


def test_a_program_that_forgets_to_close_still_saves(tmp_path: Path) -> None:
    assert run(FORGETS_TO_CLOSE, str(tmp_path)) == (0, "")
    look = "import sys; print(strata.CheckpointManager(sys.argv[1]).latest_step())"
    assert run(look, str(tmp_path)) == (0, "1")


FAILS_UNSEEN = """
import sys
import strata
def full(info):
    raise strata.StorageError("disk full")
ckpt = strata.CheckpointManager(sys.argv[1])
ckpt.save(b"x", 1, progress=full)
"""


def test_an_unread_save_failure_is_reported_at_exit(tmp_path: Path) -> None:
    _, output = run(FAILS_UNSEEN, str(tmp_path))
    assert "the save of step 1 failed, and no call reported it: disk full" in output


SILENT = """
import logging
logging.disable()
"""
FAILS_AFTERWARDS = """
import sys
import strata
def collect(self):
    raise strata.StorageError("no room to tidy")
strata.CheckpointManager._collect_garbage = collect
ckpt = strata.CheckpointManager(sys.argv[1])
ckpt.save(b"x", 1)
"""
COPIES_NOWHERE = """
import sys
import strata
ckpt = strata.CheckpointManager(sys.argv[1] + "/near", replica_path=sys.argv[1] + "/far")
from strata.checkpoint.copies.copier import Copier
def away(self):
    raise strata.StorageError("the far storage is away")
Copier._turn = away
ckpt.save(b"x", 1)
"""


@pytest.mark.parametrize(
    ("program", "reported"),
    [
        (FAILS_UNSEEN, "the save of step 1 failed, and no call reported it: disk full"),
        (FAILS_AFTERWARDS, "an error after a save, which no call reported: no room to tidy"),
        (COPIES_NOWHERE, "steps [1] are not in file://"),
    ],
)
def test_unread_failures_are_printed_at_exit_even_with_logging_off(
    tmp_path: Path, program: str, reported: str
) -> None:
    code, output = run(SILENT + program, str(tmp_path))
    assert code == 0
    assert reported in output


NO_MORE_THREADS = """
import atexit, sys, threading
import strata
def refuse(self):
    raise RuntimeError("can't create new thread at interpreter shutdown")
def late():
    threading.Thread.start = refuse  # as Python 3.12 does
    EVERY_SAVE
atexit.register(late)
ckpt = strata.CheckpointManager(sys.argv[1], **SETTINGS)
"""


@pytest.mark.parametrize("settings", ["{}", "{'low_memory': True}"])
@pytest.mark.parametrize("early", [True, False])
def test_a_save_at_the_end_needs_no_new_thread(tmp_path: Path, settings: str, early: bool) -> None:
    program = NO_MORE_THREADS.replace("EVERY_SAVE", "ckpt.save(bytes(32 << 20), 2)")
    program = program.replace("SETTINGS", settings)
    if early:
        program += "ckpt.save(bytes(32 << 20), 1)\n"
    assert run(program, str(tmp_path)) == (0, "")
    look = "import sys; print(strata.CheckpointManager(sys.argv[1]).all_steps())"
    assert run(look, str(tmp_path)) == (0, "[1, 2]" if early else "[2]")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes_run_beside_a_checkpoint_manager(tmp_path: Path, method: str) -> None:
    program = f"""
import multiprocessing, os, sys
import strata
if __name__ == "__main__":
    with strata.CheckpointManager(sys.argv[1]) as ckpt:
        ckpt.save(bytes(1 << 20), 1)
        with multiprocessing.get_context({method!r}).Pool(2, os.getpid) as pool:
            assert pool.map(abs, [-1, 2]) == [1, 2]
        ckpt.save(bytes(1 << 20), 2)
"""
    assert run(program, str(tmp_path)) == (0, "")


@pytest.mark.journey
def test_the_examples_of_the_page_run_unchanged(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "checkpoints.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    program = "\n".join(blocks).replace("/tmp/notes-checkpoints", str(tmp_path))
    code, output = run(program)
    assert code == 0, output
    first, last = output.splitlines()
    assert first.startswith("100 [60, 80, 100] file:///")
    assert last == "100.0"
