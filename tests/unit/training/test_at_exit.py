"""How a run ends that its program leaves open."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
    ],
)
def test_the_last_step_is_saved_unless_the_program_fails(
    tmp_path: Path, program: str, statement: str, status: int, saved: list[int]
) -> None:
    """A status is seen by `with run:` only; without it a program that ends within a step ends with 1."""
    argv = [sys.executable, "-c", program % statement, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == status, ended.stderr
    steps = sorted(int(path.name.split("-")[1]) for path in tmp_path.glob("step-*"))
    assert steps == saved


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
    """It ended well, and its job would count as done."""
    argv = [sys.executable, "-c", LOST, str(tmp_path)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stdout) == (1, "trained\n")
    assert "the disk is full" in ended.stderr
