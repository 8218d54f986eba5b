"""Asks a rank's process where its threads are.

A rank that uses the library, or that began as a warm process, has told Python's faulthandler to
write the stacks of all its threads into a file of ours on SIGUSR2. The handler is C code: it
answers also when the main thread is stuck in a collective or somebody holds the GIL. Nobody else
may be sent that signal, for by default it ends a process; so the file, which is there once the
handler is, and the kernel's word that the signal is caught are looked at first.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Final, Protocol

SIGNAL = signal.SIGUSR2
LIMIT_S = 2.0
"""How long a process may take to answer: a stopped one never does."""
_STEP_S = 0.02
_QUIET_STEPS = 5
"""A dump has no end mark: it is whole when nothing was added for so long."""


class Process(Protocol):
    """A process that can be sent a signal: a `Child`, or another program's."""

    @property
    def pid(self) -> int: ...

    def send_signal(self, number: int) -> None:
        """Send it a signal; nothing happens when it has ended."""
        ...


async def dump_stacks(child: Process, file: Path, *, limit_s: float = LIMIT_S) -> str | None:
    """Return the Python stacks of all threads of `child`; None if it has none to tell or is stopped."""
    if not _asked(child, file):
        return None
    size, quiet = 0, 0
    try:
        async with asyncio.timeout(limit_s):
            while not size or quiet < _QUIET_STEPS:
                await asyncio.sleep(_STEP_S)
                before, size = size, _size(file)
                quiet = quiet + 1 if size == before else 0
    except (TimeoutError, FileNotFoundError):  # removed when the process ended
        pass  # what there is of it is better than nothing
    return _read(file)


def _asked(child: Process, file: Path) -> bool:
    if not file.exists() or not catches(child.pid, SIGNAL):
        return False
    os.truncate(file, 0)  # it is opened for appending on the other side
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
    """Return what a process does, as the kernel knows it: running, sleeping, blocked, stopped; "" if unknown."""
    if pid is None:
        return ""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return ""
    # the name of the program, in parentheses, may have anything in it
    return _STATES.get(stat.rpartition(")")[2].strip()[:1], "")


def catches(pid: int, number: signal.Signals) -> bool:
    """Tell whether the process has a handler for the signal, as the kernel knows it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (number - 1) & 1)
