"""Removal of a run's network namespaces, with the processes and links in them.

A run creates network devices only in named namespaces, so nothing else has to be removed. The name
`strata-chaos-<pid>-<start time of that process>-<host>` identifies the process that owns the namespace.

A run sweeps at its end. The next run sweeps at its start, for runs whose process has died. Each run also has a
guardian process, `python -I -S sweeper.py PID PREFIX`: it waits until process PID has ended, and sweeps any
namespaces that PID left. The guardian uses the standard library only and starts in 10 ms.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

NAMES = "strata-chaos-"
FOLDER = Path("/run/netns")
_BUSY_S = 5.0
_POLL_S = 0.02


def prefix_of(pid: int) -> str:
    """Return the prefix of the names of a process's namespaces."""
    return f"{NAMES}{pid}-{_started(pid)}-"


def namespaces(prefix: str = NAMES) -> list[str]:
    """Return the names of the namespaces with this prefix."""
    try:
        return sorted(entry.name for entry in FOLDER.iterdir() if entry.name.startswith(prefix))
    except FileNotFoundError:
        return []


def sweep(prefix: str) -> list[str]:
    """Kill the processes in the namespaces with this prefix, remove the namespaces, and return their names."""
    found = namespaces(prefix)
    deadline = time.monotonic() + _BUSY_S
    while (pids := [pid for name in found for pid in _pids(name)]) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    for name in found:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
        # the kernel removes this link too once the bridge's namespace is removed, but not immediately
        subprocess.run(["ip", "link", "delete", link_of(name)], check=False, capture_output=True)
    return found


def link_of(namespace: str) -> str:
    """Return the name of the link to a run's bridge on this machine's side."""
    return f"sc{namespace.split('-')[2]}"


def sweep_abandoned() -> list[str]:
    """Sweep the namespaces of every run whose process has died; return the names of the removed namespaces."""
    removed = []
    for prefix in {"-".join(name.split("-")[:4]) + "-" for name in namespaces()}:
        pid, started = prefix.split("-")[2:4]
        if not pid.isdigit() or str(_started(int(pid))) != started:
            removed += sweep(prefix)
    return removed


def guard(pid: int, prefix: str) -> None:
    """Wait until process `pid`, the parent, has ended, and remove its namespaces."""
    poll = select.poll()
    with contextlib.suppress(ProcessLookupError):
        poll.register(os.pidfd_open(pid), select.POLLIN)
        if os.getppid() == pid:
            poll.poll()
    sweep(prefix)


def _pids(namespace: str) -> list[int]:
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True
    ).stdout
    return [int(pid) for pid in listed.split()]


def _started(pid: int) -> int:
    """Return when a process started, in clock ticks since boot; 0 if there is no such process."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return int(text.rpartition(")")[2].split()[19])


if __name__ == "__main__":
    guard(int(sys.argv[1]), sys.argv[2])
