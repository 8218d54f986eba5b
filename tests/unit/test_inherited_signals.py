"""Tests behave the same if a terminal, `nohup` or a shell without job control (in the background) starts them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IGNORING = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    signal.signal(number, signal.SIG_IGN)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""
"""Ignores the signals that such a shell and `nohup` ignore, then starts a program."""


def ignored(pid: int | str) -> set[int]:
    """Return the signals that a process ignores, as the kernel reports them."""
    mask = re.search(r"^SigIgn:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert mask is not None
    return {number for number in range(1, 32) if int(mask[1], 16) >> (number - 1) & 1}


def test_a_program_that_a_test_starts_ignores_none_of_the_signals_that_end_it() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        assert ignored(child.pid) & {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP} == set()


def test_tests_started_with_ignored_signals_do_not_pass_them_to_programs() -> None:
    test = f"{__file__}::{test_a_program_that_a_test_starts_ignores_none_of_the_signals_that_end_it.__name__}"
    words = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", test]
    done = subprocess.run(
        [sys.executable, "-c", IGNORING, *words],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


def test_ignored_signals_are_seen() -> None:
    code = "import signal, sys; signal.signal(signal.SIGQUIT, signal.SIG_IGN); print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert signal.SIGQUIT in ignored(child.pid)
