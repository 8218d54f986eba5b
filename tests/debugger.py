"""Stops a process as a debugger does, and holds it until this program ends: `python tests/debugger.py PID`."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

SEIZE, INTERRUPT = 0x4206, 0x4207
WALL = 0x40000000
ALLOW = "let a process debug its sibling: kernel.yama.ptrace_scope=0"


def state(pid: int) -> str:
    """Return the kernel's letter for the state of a process: `t` while a debugger holds it."""
    return Path(f"/proc/{pid}/status").read_text().partition("State:\t")[2][0]


def main() -> None:
    """Hold the process."""
    ptrace, pid = ctypes.CDLL(None, use_errno=True).ptrace, int(sys.argv[1])
    for request in (SEIZE, INTERRUPT):
        if ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None):
            sys.exit(os.strerror(ctypes.get_errno()))
    os.waitpid(pid, WALL)
    time.sleep(1000)


if __name__ == "__main__":
    main()
