"""One line at the bottom of a terminal, while others write to the rest of it.

Ranks write to the terminal themselves, whatever and whenever they like. So their output is not looked at: the
terminal is told to scroll all lines but the last one, and the last one is ours. Each time it is drawn with one write,
which puts the cursor back, so that nothing of others comes in between.

It is drawn only while this process is in the terminal's foreground, by one process a terminal, and never waited for:
a terminal that takes nothing (Ctrl-S) must not hold up a supervisor.
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
"""One line down, in the same column, where the last line scrolls; and up."""
TRIES: Final = 25
PAUSE_S: Final = 0.002
MAX_BYTES: Final = 2000
"""A terminal takes so much at once without anybody else's in between."""
MIN_ROWS, MIN_COLUMNS = 5, 30


class BottomLine:
    """The last line of one terminal."""

    def __init__(self, terminal: int) -> None:
        """`terminal` is a descriptor of our own, which does not block and is ours to close."""
        self._terminal = terminal
        self._rows = 0
        """How many lines the terminal had when the last one was taken; 0: it is not taken."""
        self._doubtful = False
        """Whether another program had the terminal since."""

    @classmethod
    def of(cls, stream: int, env: Mapping[str, str]) -> Self | None:
        """Return the last line of the terminal that `stream` is; None if it is none, or not one to draw on.

        NO_COLOR and TERM=dumb ask for plain output; another process may have the line already.
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
        """How long the line may be: the last column stays empty, where terminals differ in what comes next."""
        return self._size()[0] - 1

    def show(self, text: str) -> None:
        """Draw the line, if that can be done at once. `text` may have colours, and is not wider than `width`."""
        columns, rows = self._size()
        if not self._in_foreground() or rows < MIN_ROWS or columns < MIN_COLUMNS:
            self.clear()
            return
        begin = ""
        if rows != self._rows or self._doubtful:
            begin = self._leave() + self._take(rows)
        drawn = f"{begin}{SAVE}\x1b[{rows};1H\x1b[0m{text}\x1b[0m\x1b[K{RESTORE}"
        if self._write(drawn, tries=TRIES if begin else 1):
            self._rows, self._doubtful = rows, False

    def clear(self) -> None:
        """Give the line back, empty."""
        if self._rows and self._write(self._leave(), tries=TRIES):
            self._rows = 0

    def renew(self) -> None:
        """Take the line again with the next `show`: another program had the terminal meanwhile."""
        self._doubtful = True

    def close(self) -> None:
        """Give the line back for good."""
        self.clear()
        os.close(self._terminal)

    @staticmethod
    def _take(rows: int) -> str:
        """Return what makes all lines but the last scroll. The cursor is not left in the last one."""
        return f"{DOWN}{UP}{SAVE}\x1b[1;{rows - 1}r{RESTORE}"

    def _leave(self) -> str:
        return f"{SAVE}\x1b[r\x1b[{self._rows};1H\x1b[2K{RESTORE}" if self._rows else ""

    def _size(self) -> tuple[int, int]:
        try:
            size = os.get_terminal_size(self._terminal)
        except OSError:  # it is gone
            return 0, 0
        return size.columns, size.lines

    def _in_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._terminal) == os.getpgrp()
        except OSError:  # not our own terminal
            return False

    def _write(self, text: str, *, tries: int) -> bool:
        """Write it whole; say whether it was. What was begun is finished."""
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
