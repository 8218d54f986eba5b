"""Programs on a terminal: their output, keys, job control, and whether they restore the terminal when they end.

    with Screen(["strata", "top"], columns=80, rows=24) as screen:
        screen.wait_for("cluster default")
        screen.press("q")
        assert screen.ended() == 0
        assert screen.is_restored()

A small shell in this module runs the program as its foreground job, reports when Ctrl-Z stops the job, and resumes
the job at `go_on`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import socket
import struct
import sys
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from strata.processes.children import Child
from tests.processes import LIMIT_S

ROOT = Path(__file__).resolve().parent.parent
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[ -/]*[@-~]|[78DM=>])")

# argv[1]: the descriptor on which the shell reports the state of the job, and receives the request to resume the job
SHELL = """
import fcntl, os, signal, sys, termios
told = int(sys.argv[1])
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGTTOU, signal.SIG_IGN)
signal.signal(signal.SIGINT, signal.SIG_IGN)
modes = termios.tcgetattr(0)
ready, go = os.pipe()
job = os.fork()
if job == 0:
    os.setpgid(0, 0)
    os.read(ready, 1)
    for number in (signal.SIGTTOU, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.execv(sys.argv[2], sys.argv[2:])
os.setpgid(job, job)
os.tcsetpgrp(0, job)
os.write(go, b"x")
os.write(told, b"pid %d\\n" % job)
while True:
    _, status = os.waitpid(job, os.WUNTRACED)
    os.tcsetpgrp(0, os.getpgrp())
    if not os.WIFSTOPPED(status):
        break
    os.write(told, b"stopped\\n")
    os.read(told, 1)
    os.tcsetpgrp(0, job)
    os.kill(-job, signal.SIGCONT)
os.write(told, b"ended %d\\n" % os.waitstatus_to_exitcode(status))
os.read(told, 1)
"""


class Screen:
    """A terminal with one program on it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        columns: int = 80,
        rows: int = 24,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self._ours, theirs = pty.openpty()
        self.resize(columns, rows)
        self._modes = termios.tcgetattr(theirs)
        self._tells, reported = _pair()
        self._printed = bytearray()
        self.raw = ""
        """All output of the program, with escape sequences."""
        base = {**os.environ, "TERM": "xterm-256color", "LC_ALL": "C.UTF-8", "PYTHONPATH": str(ROOT)}
        merged = {**base, "NO_COLOR": None, "COLUMNS": None, "LINES": None, **(env or {})}
        self._shell = Child.start(
            [sys.executable, "-c", SHELL, str(reported), *argv],
            name="terminal",
            env={key: value for key, value in merged.items() if value is not None},
            cwd=cwd,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            pass_fds=(reported,),
            new_session=True,
        )
        os.close(reported)
        self._theirs = theirs
        self.pid = int(self._reported("pid"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._shell.kill()
        self._shell.join(LIMIT_S)
        for descriptor in (self._ours, self._theirs, self._tells):
            os.close(descriptor)

    @property
    def text(self) -> str:
        """All output of the program, without escape sequences."""
        return _ESCAPES.sub("", self.raw)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def press(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def forget(self) -> None:
        """Look only at output that is written from now on."""
        self._read(0.0)
        self.raw = ""

    def wait_for(self, words: str) -> None:
        """Return once these words were written, ignoring escape sequences between them."""
        self._until(lambda: words in self.text, words)

    def stopped(self) -> None:
        """Return once Ctrl-Z has stopped the program."""
        self._reported("stopped")

    def go_on(self) -> None:
        os.write(self._tells, b"x")

    def ended(self) -> int:
        """Return the program's exit code once it has ended."""
        code = int(self._reported("ended"))
        self._read(0.1)
        return code

    def is_restored(self) -> bool:
        """Return whether the terminal has its first modes, its main screen and a cursor, and scrolls all lines."""
        self._read(0.1)
        modes = termios.tcgetattr(self._theirs) == self._modes
        screens = self.raw.rfind("\x1b[?1049l") >= self.raw.rfind("\x1b[?1049h")
        cursor = self.raw.rfind("\x1b[?25h") >= self.raw.rfind("\x1b[?25l")
        regions = re.findall(r"\x1b\[[0-9;]*r", self.raw)
        return modes and screens and cursor and (not regions or regions[-1] == "\x1b[r")

    def _until(self, found: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not found():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what!r} was not seen; on the terminal:\n{self.text[-4000:]}")
            self._read(0.1)

    def _reported(self, what: str) -> str:
        found: list[str] = []

        def received() -> bool:
            while b"\n" in self._printed:
                words, _, rest = bytes(self._printed).partition(b"\n")
                self._printed[:] = rest
                name, _, value = words.decode().partition(" ")
                if name == what:
                    found.append(value)
                    return True
            return False

        self._until(received, what)
        return found[0]

    def _read(self, within_s: float) -> None:
        ready, _, _ = select.select([self._ours, self._tells], [], [], within_s)
        while ready:
            if self._ours in ready:
                self.raw += os.read(self._ours, 1 << 16).decode(errors="replace")
            if self._tells in ready:
                printed = os.read(self._tells, 4096)
                if not printed:
                    return
                self._printed += printed
            ready, _, _ = select.select([self._ours, self._tells], [], [], 0.0)


def _pair() -> tuple[int, int]:
    ours, theirs = socket.socketpair()
    return ours.detach(), theirs.detach()
