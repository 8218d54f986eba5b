"""How an error that ends a program is printed; each test runs its own program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster_fixtures import ROOT

BEGIN = """
import strata

def main(data):
    return strata.init(state=data, storage_path={storage!r})

main({{"w": bytes(3)}}).close()
"""
CALLED_BACK = """
from strata import TrainingOrchestrator

def main(orchestrator):
    return orchestrator.init(state={{}})

TrainingOrchestrator(storage_path={storage!r}).train(main)
"""
REFUSES = """
import strata

class Mine:
    def state_dict(self):
        return {{"mine": 1}}

    def load_state_dict(self, state):
        raise KeyError("other")

run = strata.init(state={{"mine": Mine()}}, storage_path={storage!r}, save_every_steps=1)
for _ in run.steps([1, 2]):
    pass
run.close()
strata.init(state={{"mine": Mine()}}, storage_path={storage!r})
"""
OWN_ERROR = """
import strata

strata.init(state={{}}, storage_path={storage!r})
print({{}}["mine"])
"""


def shown(program: str, folder: Path) -> list[str]:
    """Return the lines that a failing program writes to stderr."""
    script = folder / "train.py"
    script.write_text(program)
    done = subprocess.run(
        (sys.executable, str(script)),
        env={"PYTHONPATH": str(ROOT)},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    return [line for line in done.stderr.splitlines() if line.strip(" ^~")]


@pytest.fixture
def unusable(tmp_path: Path) -> str:
    """Return a storage path that leads through a file."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file" / "below")


def test_an_error_of_stratas_stands_below_the_programs_own_frames(tmp_path: Path, unusable: str) -> None:
    *trace, last = shown(BEGIN.format(storage=unusable), tmp_path)
    assert trace == [
        "Traceback (most recent call last):",
        f'  File "{tmp_path}/train.py", line 7, in <module>',
        '    main({"w": bytes(3)}).close()',
        f'  File "{tmp_path}/train.py", line 5, in main',
        f"    return strata.init(state=data, storage_path={unusable!r})",
    ]
    assert "Not a directory" in last


def test_a_frame_that_strata_called_is_the_programs_own(tmp_path: Path, unusable: str) -> None:
    *trace, last = shown(CALLED_BACK.format(storage=unusable), tmp_path)
    assert [line.split(", ")[2] for line in trace if "File" in line] == ["in <module>", "in main"]
    assert "Not a directory" in last


def test_the_programs_error_that_caused_a_strata_error_is_shown_too(tmp_path: Path) -> None:
    lines = shown(REFUSES.format(storage=str(tmp_path / "root")), tmp_path)
    lines = lines[lines.index("Traceback (most recent call last):") :]
    assert [line.split(", ")[2] for line in lines if "File" in line] == ["in load_state_dict", "in <module>"]
    assert lines[3] == "KeyError: 'other'"
    assert lines[-1] == "strata.errors.CheckpointError: mine (Mine) refuses its state: 'other'"


def test_an_error_that_is_not_stratas_is_shown_as_ever(tmp_path: Path) -> None:
    lines = shown(OWN_ERROR.format(storage=str(tmp_path / "root")), tmp_path)
    at = lines.index("Traceback (most recent call last):")
    assert lines[at + 1 : at + 4] == [
        f'  File "{tmp_path}/train.py", line 5, in <module>',
        '    print({}["mine"])',
        "KeyError: 'mine'",
    ]
