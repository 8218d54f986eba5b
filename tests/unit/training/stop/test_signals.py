"""A signal is noticed whatever the main thread does.

The second signal is obeyed at once. No signal is passed to children.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.training.stop.signals import PreemptSignals
from tests.cluster_fixtures import RANKS, ROOT
from tests.processes import Record, Talker

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


class Program:
    """One process of tests/ranks/signalled.py."""

    def __init__(self, *options: str) -> None:
        self.record = Record()
        command = [sys.executable, str(RANKS / "signalled.py"), *options]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.talker = Talker(command, name="signalled", record=self.record, env=environment)
        self.record.wait_one("ready")

    def signal_received(self, number: int) -> None:
        self.talker.signal(number)
        self.record.wait_one("asked", number=number)


def until_taken(pid: int) -> None:
    """Return once no signal is pending for the process."""
    deadline = time.monotonic() + 20
    pending = ""
    while pending.strip("0") or not pending:
        assert time.monotonic() < deadline, f"signals {pending} are pending for process {pid}"
        status = Path(f"/proc/{pid}/status").read_text()
        (pending,) = re.findall(r"^ShdPnd:\s+(\w+)$", status, re.MULTILINE)


@pytest.fixture
def programs() -> Iterator[list[Program]]:
    started: list[Program] = []
    yield started
    for program in started:
        program.talker.child.kill()
        program.talker.join()
        program.talker.wait_quiet()


@pytest.mark.parametrize("wait", ["python", "c", "asyncio"])
def test_the_first_signal_requests_a_stop_and_the_second_ends_the_program(
    wait: str, programs: list[Program]
) -> None:
    program = Program("--wait", wait)
    programs.append(program)
    program.signal_received(USR1)
    program.signal_received(
        TERM
    )  # another signal: a scheduler warns with the first signal and ends the process with the second
    program.talker.signal(TERM)
    assert program.talker.join() == -TERM
    assert [e["number"] for e in program.record.of("asked")] == [USR1, TERM]


@pytest.mark.parametrize("wait", ["python", "c"])
def test_a_signal_that_reaches_no_coordinator_is_obeyed(wait: str, programs: list[Program]) -> None:
    program = Program("--wait", wait, "--nobody")
    programs.append(program)
    program.signal_received(TERM)
    assert program.talker.join() == -TERM


def test_a_handler_of_the_program_s_own_is_called_and_decides(programs: list[Program]) -> None:
    program = Program("--own", "--nobody")
    programs.append(program)
    for count in (1, 2):
        program.talker.signal(TERM)
        program.record.wait("own", count=count, number=TERM)
    program.signal_received(USR1)
    assert program.talker.join() == -USR1, "it had none for this one"


def test_closing_restores_the_default_signal_handler(programs: list[Program]) -> None:
    program = Program("--wait", "closed")
    programs.append(program)
    assert program.record.wait_one("ready")["default"]
    program.talker.signal(TERM)
    assert program.talker.join() == -TERM
    assert not program.record.of("asked")


def test_a_forked_child_obeys_its_parent_only(programs: list[Program]) -> None:
    """Signals of other processes reach neither the child nor, through it, the parent."""
    program = Program("--wait", "child")
    programs.append(program)
    child = program.record.wait_one("child")["pid"]
    for number in (TERM, USR1):
        os.kill(child, number)
    until_taken(child)  # otherwise the kernel would merge the parent's signal with the pending one
    program.signal_received(USR1)  # makes the parent terminate the child
    code = program.record.wait_one("terminated")["code"]
    assert code == -TERM, "by its parent, after it had survived both"
    assert program.talker.join() == 0
    assert [e["number"] for e in program.record.of("asked")] == [USR1], "our own"


def test_outside_of_the_main_thread_signals_are_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    before = signal.getsignal(TERM)
    thread = threading.Thread(target=lambda: PreemptSignals((TERM,), lambda number: True).close())
    thread.start()
    thread.join()
    assert signal.getsignal(TERM) == before
    assert "outside of the main thread: SIGTERM" in caplog.text
