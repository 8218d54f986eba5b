"""No worker outlives its agent, however that ends.

torchrun's workers lead sessions of their own, and stay when the agent is killed: they hold GPUs
and ports that its replacement needs. So a bare Python process stands beside the agent. It knows
the workers, and all they started, by the agent's folder in a STRATA_ variable of their environment,
and kills them once the agent's end of a pipe is gone without a word.

This file is that process's program, too: standard library only.
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
"""A process that forks while it is looked for may leave one more; in the end there is none."""
_LOOKS = 100
_LOOK_S = 0.001
"""How long exec may take that leaves a process without an environment; stopped in it, it is passed over."""
_START_CODE = 26
"""The number of `startcode` among the fields of /proc/pid/stat in proc(5)."""


@contextlib.asynccontextmanager
async def ended_with_us(door: Path) -> AsyncIterator[None]:
    """See to it that processes with a path beside `door` in a STRATA_ variable are killed if this one is, meanwhile."""
    watcher = subprocess.Popen(  # noqa: ASYNC220  # fork and exec; nothing is waited for
        [sys.executable, "-I", "-S", __file__, str(door)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        env={},
        start_new_session=True,  # what ends the agent's group or terminal must not end it
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
            )  # milliseconds; a thread for it may not be had any more when the program ends


def end_child_above(pid: int) -> None:
    """Send SIGKILL to the child of this process that `pid` is, or descends from; to nobody if there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid():
                os.kill(pid, signal.SIGKILL)
                return
            pid = parent


def find(door: str) -> list[int]:
    """Return the processes with a STRATA_ variable that names a file beside `door`.

    STRATA_SOCKET is one. Helpers of a rank are started without it; they keep STRATA_STACKS.
    """
    wanted = b"=" + os.fsencode(Path(door).parent) + b"/"
    found = []
    for name in os.listdir("/proc"):  # noqa: PTH208  # plain numbers
        if name.isdigit() and int(name) != os.getpid():
            with contextlib.suppress(OSError):  # it has just ended, or is another user's
                entries = environment(int(name)).split(b"\0")
                if any(entry.startswith(b"STRATA_") and wanted in entry for entry in entries):
                    found.append(int(name))
    return found


def environment(pid: int) -> bytes:
    """Return the environment a process was started with, its entries ended by NUL.

    The kernel shows none of a process in the middle of exec, for some microseconds after the old
    program's files are closed: after `subprocess.Popen` has returned. It is asked for again until
    the kernel says where the code starts, which it does after that.
    `OSError`: no such process, a kernel thread, one that has ended, or somebody else's.
    """
    folder = Path(f"/proc/{pid}")
    for _ in range(_LOOKS):
        if found := (folder / "environ").read_bytes():
            return found
        (folder / "exe").readlink()  # a kernel thread and a zombie have none
        if _start_code(folder):
            return (folder / "environ").read_bytes()  # nothing at all, if it did not come just between
        time.sleep(_LOOK_S)
    return b""


def _start_code(folder: Path) -> int:
    """Return the address at which a process's code starts; 0 while exec has not got there."""
    return int((folder / "stat").read_text().rpartition(")")[2].split()[_START_CODE - 3])


def main() -> None:
    """Wait for the end of the agent; after one without a word, kill what it left."""
    door = sys.argv[1]
    if sys.stdin.buffer.read() == _BYE:
        return
    found_none = 0
    for _ in range(_ROUNDS):
        orphans = find(door)
        found_none = 0 if orphans else found_none + 1
        if found_none == 2:  # one that was being started showed the agent's environment in the first
            break
        for pid in orphans:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)
    shutil.rmtree(Path(door).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
