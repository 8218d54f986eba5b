"""How a run ends if its program does not close the run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.polling import until

LIMIT_S = 60.0
PROGRAM = """
import sys
import strata
run = strata.init(state={}, storage_path=sys.argv[1], preempt_signals=())
for _ in run.steps([1, 2, 3]):
    if run.begun == 2:
        %s
"""
WITHIN = """
import sys
import strata
leave = sys.exit
with strata.init(state={}, storage_path=sys.argv[1], preempt_signals=()) as run:
    assert sys.exit is leave
    for _ in run.steps([1, 2, 3]):
        if run.begun == 2:
            %s
"""


BEFORE = """
import sys
import strata
run = strata.init(state={}, storage_path=sys.argv[1], preempt_signals=())
%s
"""
THREAD = """
import sys
import threading
import strata
threading.excepthook = lambda args: sys.excepthook(args.exc_type, args.exc_value, args.exc_traceback)
run = strata.init(state={}, storage_path=sys.argv[1], preempt_signals=())
for _ in run.steps([1, 2, 3]):
    %s
"""
"""`sys.excepthook` prints an error that ends a thread but not the program."""


@pytest.mark.parametrize(
    ("program", "statement", "status", "saved"),
    [
        (PROGRAM, "sys.exit(3)", 1, []),
        (PROGRAM, "1 // 0", 1, []),
        (PROGRAM, "break", 1, []),
        (PROGRAM, "break\nrun.close()", 0, [1]),
        (PROGRAM, "pass", 0, [3]),
        (PROGRAM, "pass\nfor _ in run.steps([4]):\n    sys.exit()", 1, []),
        (PROGRAM, "pass\nrun.step_done()", 1, []),
        (PROGRAM, "pass\nrun.step_done()\nrun.close()", 0, [4]),
        (WITHIN, "sys.exit(3)", 3, []),
        (WITHIN, "sys.exit()", 0, [1]),
        (BEFORE, "", 1, []),
        (
            THREAD,
            "thread = threading.Thread(target=lambda: 1 // 0)\n    thread.start()\n    thread.join()",
            0,
            [3],
        ),
    ],
)
def test_the_last_step_is_saved_unless_the_program_fails(
    tmp_path: Path, program: str, statement: str, status: int, saved: list[int]
) -> None:
    """Only `with run:` sees an exit status. Without it, a program that ends within a step exits with 1."""
    argv = [sys.executable, "-c", program % statement, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == status, ended.stderr
    steps = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*"))
    assert steps == saved


CHILDREN = """
import multiprocessing
import sys
import strata

def train(end):
    run = strata.init(state={}, storage_path=f"{sys.argv[1]}/{end}", preempt_signals=())
    for _ in run.steps([1, 2, 3]):
        pass
    exec(end)

context = multiprocessing.get_context("fork")
for end in ("pass", "sys.exit(0)", "sys.exit(3)", "1 // 0"):
    child = context.Process(target=train, args=(end,))
    child.start()
    child.join()
    print(end, child.exitcode, flush=True)
"""
"""multiprocessing's forked children run no exit handlers."""


def test_a_child_by_multiprocessing_is_closed_by_how_it_ends(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", CHILDREN, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.stdout.splitlines() == ["pass 0", "sys.exit(0) 0", "sys.exit(3) 3", "1 // 0 1"], ended.stderr
    saved = {path.parent.name for path in tmp_path.glob("*/step-*")} | {
        path.parent.parent.name for path in tmp_path.glob("1 */*/step-*")
    }
    assert saved == {"pass", "sys.exit(0)"}


OTHERS = """
import multiprocessing
import os
import sys
import time
import strata

with strata.init(state={}, storage_path=sys.argv[1], preempt_signals=()):
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0

run = strata.init(state={}, storage_path=sys.argv[1], preempt_signals=())
daemon = multiprocessing.get_context("fork").Process(target=time.sleep, args=(100,), daemon=True)
daemon.start()
print(daemon.pid, flush=True)
for _ in run.steps([1, 2, 3]):
    child = os.fork()
    if not child:
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    if run.begun == 2:
        sys.exit(0)
"""
"""A fork may end in any way. A daemonic child ends with the program, also if the program ends as failed."""


def test_a_fork_ends_independently_and_daemonic_children_end_with_the_program(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", OTHERS, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stderr.count("NOT DONE")) == (1, 1), ended.stderr
    stat = Path(f"/proc/{ended.stdout.strip()}/stat")
    until(lambda: not stat.exists() or ") Z" in stat.read_text(), limit_s=LIMIT_S)


LOST = """
import sys
import strata
from strata.errors import StorageError
run = strata.init(state={}, storage_path=sys.argv[1], preempt_signals=())
for _ in run.steps([1]):
    pass

def fails(*arguments, **more):
    raise StorageError("the disk is full")

run.checkpoints.save_state = fails
print("trained")
"""


def test_a_program_whose_last_step_cannot_be_saved_has_failed(tmp_path: Path) -> None:
    """If it did not fail, the program would exit with 0, and its job would count as done."""
    argv = [sys.executable, "-c", LOST, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (1, "trained\n")
    assert "the disk is full" in ended.stderr
