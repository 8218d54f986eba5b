"""Kills the workers of a torchrun agent that ended without stopping them.

torchrun's workers lead their own process sessions, and survive if the agent is killed. They then occupy GPUs
and ports that a new agent needs. So a bare Python process (the watcher) runs beside the agent and reads a pipe
from it. If the pipe closes without the agent's `bye`, the watcher kills all workers and their descendants. It
finds these processes by the agent's folder in a STRATA_ variable of their environment.

This file is also the watcher's program, so it uses the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

_BYE = b"bye\n"
_BYE_S = 5.0
_ROUNDS = 100
_ROUND_S = 0.05
"""The pause between two rounds. A process may fork during a search; a later round finds its child."""
_POLLS = 100
_POLL_S = 0.001
"""The pause between two looks at a process in the middle of exec, which has no environment yet. A process that is
stopped in exec is skipped after `_POLLS` looks."""
_START_CODE = 26
"""The field number of `startcode` in /proc/pid/stat, see proc(5)."""


@contextlib.asynccontextmanager
async def kill_workers_if_killed(socket_path: Path) -> AsyncIterator[None]:
    """While the block runs: if this process is killed, kill all processes that `find` returns."""
    watcher = subprocess.Popen(  # noqa: ASYNC220  # fork and exec; nothing is waited for
        [sys.executable, "-I", "-S", __file__, str(socket_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,  # a signal to the agent's process group or terminal must not end the watcher
    )
    assert watcher.stdin is not None
    try:
        yield
    finally:
        with contextlib.suppress(BrokenPipeError):
            watcher.stdin.write(_BYE)
            watcher.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            watcher.wait(
                _BYE_S
            )  # takes milliseconds; in this thread, since at the program's exit no thread can be started


def end_child_above(pid: int) -> None:
    """Send SIGKILL to the child of this process that is `pid` or its ancestor, if there is one."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
                return
            pid = parent


def find(socket_path: str) -> list[int]:
    """Return the ids of processes with a STRATA_ variable that names a file in the folder of `socket_path`.

    STRATA_SOCKET is such a variable. Helper processes of a rank are started without it, but keep STRATA_STACKS.
    """
    marker = b"=" + os.fsencode(Path(socket_path).parent) + b"/"
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # plain numbers
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # the process has just ended, or is another user's
                entries = environment(int(name)).split(b"\0")
                if any(entry.startswith(b"STRATA_") and marker in entry for entry in entries):
                    found.append(int(name))
    return found


def environment(pid: int) -> bytes:
    """Return the environment that a process was started with, its entries ended by NUL.

    In the middle of exec the kernel shows no environment, for some microseconds after the old program's files are
    closed (which is when `subprocess.Popen` returns). So this function reads the environment again until the
    kernel shows the code's address, which is set later than the environment. `OSError` if there is no such
    process, for a kernel thread, for a process that has ended, or for another user's.
    """
    folder = Path(f"/proc/{pid}")
    for _ in range(_POLLS):
        if found := (folder / "environ").read_bytes():
            return found
        (folder / "exe").readlink()  # a kernel thread and a zombie have none
        if _start_code(folder):
            return (
                folder / "environ"
            ).read_bytes()  # exec may have ended between the two reads; else truly empty
        time.sleep(_POLL_S)
    return b""


def _start_code(folder: Path) -> int:
    """Return the start address of a process's code; 0 while exec has not set it yet."""
    return int((folder / "stat").read_text().rpartition(")")[2].split()[_START_CODE - 3])


def main() -> None:
    """Wait for the end of the agent; if it ends without its `bye`, kill the processes that it left."""
    socket_path = sys.argv[1]
    if sys.stdin.buffer.read() == _BYE:
        return
    found_none = 0
    for _ in range(_ROUNDS):
        orphans = find(socket_path)
        found_none = 0 if orphans else found_none + 1
        if (
            found_none == 2
        ):  # twice: a process being started may still show the agent's environment at the first search
            break
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)
    shutil.rmtree(Path(socket_path).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
