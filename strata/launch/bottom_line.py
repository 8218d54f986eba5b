"""A status line in the last row of a terminal, while other processes write to the other rows.

Ranks write to the terminal by themselves at any time, and their output is not inspected. Instead the terminal's
scroll region is set to all rows but the last row; the last row belongs to this process. Each drawing of the
line is one write, which also restores the cursor, so that no output of others comes in between.

The line is drawn only while this process is in the terminal's foreground, and by one process per terminal. Drawing
never blocks: a terminal that takes no output (Ctrl-S) must not hold up an agent.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Mapping
from typing import Final, Self

SAVE, RESTORE = "\x1b7", "\x1b8"
DOWN, UP = "\x1bD", "\x1b[A"
"""One line down in the same column (in the last row this scrolls), and one line up."""
TRIES: Final = 25
PAUSE_S: Final = 0.002
MAX_BYTES: Final = 2000
"""The most bytes that a terminal takes in one write, without output of others in between."""
MIN_ROWS, MIN_COLUMNS = 5, 30


class BottomLine:
    """The last row of one terminal."""

    def __init__(self, terminal: int) -> None:
        """`terminal` is a non-blocking descriptor that this object owns and closes."""
        self._terminal = terminal
        self._rows = 0
        """Number of rows when the last row was taken; 0 while it is not taken."""
        self._maybe_overwritten = False
        """Whether another program may have used the terminal since the last row was taken."""

    @classmethod
    def of(cls, stream: int, env: Mapping[str, str]) -> Self | None:
        """Return the last row of the terminal `stream`; None if it is no terminal, or must not be drawn on.

        NO_COLOR and TERM=dumb forbid drawing, and so does another process that has taken the row already.
        """
        if env.get("NO_COLOR") or env.get("TERM", "dumb") in ("", "dumb", "unknown"):
            return None
        try:
            terminal = os.open(os.ttyname(stream), os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(terminal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(terminal)
            return None
        return cls(terminal)

    @property
    def width(self) -> int:
        """The longest line: the last column stays empty, since terminals differ in how they wrap there."""
        return self._size()[0] - 1

    def show(self, text: str) -> None:
        """Draw the line if it would not block. `text` may contain colours and is not wider than `width`."""
        columns, rows = self._size()
        if not self._in_foreground() or rows < MIN_ROWS or columns < MIN_COLUMNS:
            self.clear()
            return
        begin = ""
        if rows != self._rows or self._maybe_overwritten:
            begin = self._leave() + self._take(rows)
        drawn = f"{begin}{SAVE}\x1b[{rows};1H\x1b[0m{text}\x1b[0m\x1b[K{RESTORE}"
        if self._write(drawn, tries=TRIES if begin else 1):
            self._rows, self._maybe_overwritten = rows, False

    def clear(self) -> None:
        """Release the row, empty."""
        if self._rows and self._write(self._leave(), tries=TRIES):
            self._rows = 0

    def renew(self) -> None:
        """Take the row again at the next `show`: another program may have used the terminal meanwhile."""
        self._maybe_overwritten = True

    def close(self) -> None:
        """Release the row for good."""
        self.clear()
        os.close(self._terminal)

    @staticmethod
    def _take(rows: int) -> str:
        """Return the codes that make all rows but the last scroll. They do not leave the cursor in the last row."""
        return f"{DOWN}{UP}{SAVE}\x1b[1;{rows - 1}r{RESTORE}"

    def _leave(self) -> str:
        return f"{SAVE}\x1b[r\x1b[{self._rows};1H\x1b[2K{RESTORE}" if self._rows else ""

    def _size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._terminal)
        except OSError:  # the terminal was closed
            return 0, 0
        return size.columns, size.lines

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # not this process's controlling terminal
            return False

    def _write(self, text: str, *, tries: int) -> bool:
        """Write all of it and tell whether that succeeded. A write once begun is finished if possible."""
        data = text.encode()
        if len(data) > MAX_BYTES:
            return False
        begun = False
        for attempt in range(tries if tries > 1 else TRIES):
            with contextlib.suppress(OSError):
                written = os.write(self._terminal, data)
                data, begun = data[written:], True
            if not data:
                return True
            if not begun and attempt + 1 >= tries:
                return False
            time.sleep(PAUSE_S)
        return False
