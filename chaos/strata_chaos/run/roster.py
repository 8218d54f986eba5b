"""The workload processes that faults may kill or freeze, read from the workloads' histories.

For each process that a fault may kill or freeze, the workload writes a record `process.started` with pid and role.
The roster reads new records on demand and skips processes that have ended.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

_STARTED = b'"process.started"'


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A process. The start time distinguishes it from a later process with the same pid."""

    pid: int
    role: str
    started: int

    @property
    def name(self) -> str:
        """Name in reports."""
        return f"{self.role}:{self.pid}"

    @property
    def alive(self) -> bool:
        """Whether the process exists and has not ended. A zombie counts as ended, a frozen process as alive."""
        found = stat_of(self.pid)
        return found is not None and found.started == self.started and found.state not in "ZX"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stat:
    """Fields of `/proc/<pid>/stat`: the state as one letter, and the start time in clock ticks."""

    state: str
    started: int


def stat_of(pid: int) -> Stat | None:
    """Return the kernel's entry of a process; None if there is no such process."""
    try:
        text = Path("/proc", str(pid), "stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()
    return Stat(state=fields[0], started=int(fields[19]))


class Roster:
    """Reads the histories in a folder; `of` returns the living processes of a role."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        self._targets: dict[int, Target] = {}

    def of(self, role: str) -> list[Target]:
        """Return the living processes of a role, oldest line first."""
        self._refresh()
        return [target for target in self._targets.values() if target.role == role and target.alive]

    def _refresh(self) -> None:
        for path in sorted(self._folder.glob("*.jsonl")):
            begin = self._read.get(path, 0)
            if os.stat(path).st_size <= begin:  # noqa: PTH116 - asked of every file before each fault
                continue
            with path.open("rb") as file:
                file.seek(begin)
                whole, newline, _rest = file.read().rpartition(b"\n")
            self._read[path] = begin + len(whole) + len(newline)
            for line in whole.splitlines():
                if _STARTED in line:
                    self._note(line)
        self._targets = {pid: target for pid, target in self._targets.items() if target.alive}

    def _note(self, line: bytes) -> None:
        entry = json.loads(line)
        if entry.get("op") != "process.started":
            return
        pid, role = int(entry["args"]["pid"]), str(entry["args"]["role"])
        found = stat_of(pid)
        if found is not None:
            self._targets[pid] = Target(pid=pid, role=role, started=found.started)
