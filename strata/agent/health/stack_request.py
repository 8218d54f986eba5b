"""Requests the Python stacks of a rank's process (SIGUSR2, faulthandler).

A rank that uses the library, or that began as a warm process, registers Python's faulthandler for SIGUSR2. The handler
writes the stacks of all threads into a file that the agent reads. It is C code, so it answers even if the main thread
is stuck in a collective or a thread holds the GIL. SIGUSR2 ends a process that has no handler. So the agent
sends SIGUSR2 only if two things hold: the kernel says that the process catches the signal, and the file exists.
The rank creates the file after the handler.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final, Protocol

SIGNAL = signal.SIGUSR2
LIMIT_S = 2.0
"""How long a process may take to answer; a stopped process never answers."""
_STEP_S = 0.02
_QUIET_STEPS = 5
"""A dump has no end mark: it counts as complete when this many polls in a row have found it unchanged."""


class Process(Protocol):
    """A process that can be sent a signal: a `Child`, or one that another program started."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int) -> None:
        """Send a signal to the process; does nothing if it has ended."""
        ...


async def dump_stacks(child: Process, file: Path, *, limit_s: float = LIMIT_S) -> str | None:
    """Return the Python stacks of all threads of `child`; None if it has no handler or is stopped."""
    if not _request_dump(child, file):
        return None
    size, quiet = 0, 0
    try:
        async with asyncio.timeout(limit_s):
            while not size or quiet < _QUIET_STEPS:
                await asyncio.sleep(_STEP_S)
                before, size = size, _size(file)
                quiet = quiet + 1 if size == before else 0
    except (TimeoutError, FileNotFoundError):  # the file is removed when the process has ended
        pass  # a part of the dump is better than nothing
    return _read(file)


def _request_dump(child: Process, file: Path) -> bool:
    if not file.exists() or not catches(child.pid, SIGNAL):
        return False
    os.truncate(file, 0)  # safe: the process has opened the file for appending
    child.send_signal(SIGNAL)
    return True


def _size(file: Path) -> int:
    return file.stat().st_size


def _read(file: Path) -> str | None:
    try:
        return file.read_text(errors="replace") or None
    except FileNotFoundError:
        return None


_STATES: Final = {"R": "running", "S": "sleeping", "D": "blocked", "T": "stopped", "t": "stopped"}


def process_state(pid: int | None) -> str:
    """Return a process's state by the kernel: running, sleeping, blocked, stopped; "" if unknown."""
    if pid is None:
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # the name of the program, in parentheses, may contain any character
    return _STATES.get(stat.rpartition(")")[2].strip()[:1], "")


def catches(pid: int, number: signal.Signals) -> bool:
    """Tell whether the process has a handler for the signal, by the kernel's record."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
