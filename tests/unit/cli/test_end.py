"""However a command ends, it must print no traceback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata.cli import app as command_line
from strata.cli.console.output import print_table
from strata.cli.status import phase_name
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_RUNNING, Job, World


def strata(*words: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strata", *words],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=50,
        check=False,
    )


def test_a_full_disk_at_the_output_is_reported_without_a_traceback() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = strata("--help", stdout=full)
    finally:
        os.close(full)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stderr


def test_ctrl_c_during_loading_has_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupted)
    with pytest.raises(SystemExit) as ended:
        __import__("strata.cli").cli.main()
    assert ended.value.code == 128 + signal.SIGINT


@pytest.mark.parametrize(("command", "code"), [("run", 75), ("status", -signal.SIGTERM)])
def test_a_preemption_during_loading_has_its_exit_code(command: str, code: int) -> None:
    """If a scheduler preempts the node at that time, it must put `strata run` back into its queue."""
    program = (
        "import os, signal, sys\n"
        "import strata.cli, strata.cli.app\n"
        "strata.cli.app.run = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        f"sys.argv = ['strata', {command!r}]\n"
        "strata.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], timeout=50, check=False, capture_output=True)
    assert done.returncode == code


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    done = strata("dev", "--data", "/proc/x")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "cannot keep data in /proc/x" in done.stderr


def test_a_wrong_detect_s_is_refused_before_anything_starts(tmp_path: Path) -> None:
    done = strata("dev", "--data", str(tmp_path / "data"), "--detect-s", "0")
    assert done.returncode == 2
    assert "detect_s = 0" in done.stderr
    assert not (tmp_path / "data").exists()


def test_control_characters_in_a_table_are_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ("PHASE",), [("\x1b[31mred\nnext",)], empty="")
    assert capsys.readouterr().out.splitlines()[-1] == "?[31mred?next"


def test_a_job_without_a_world_waits() -> None:
    assert phase_name(Job(phase=JOB_PHASE_RUNNING)) == "waiting"
    assert phase_name(Job(phase=JOB_PHASE_RUNNING, world=World(size=2))) == "running"
    assert phase_name(Job(phase=JOB_PHASE_DONE)) == "done"
