"""The terminal in full-screen mode: keys as they are pressed, and restored settings at the end.

Signal handlers only record a signal; the loop that waits for keys acts on the signal. So `Terminal.__exit__` restores
the terminal however the program ends, except by SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import termios
import tty
from types import FrameType, TracebackType
from typing import Any, Final, Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
KEYS: Final = {
    b"\r": "enter",
    b"\n": "enter",
    b"\x1b": "esc",
    b"\x7f": "backspace",
    b"\x08": "backspace",
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1b[5~": "pgup",
    b"\x1b[6~": "pgdn",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
}
ESCAPE_S: Final = 0.05
"""How long the rest of a key's escape sequence may take after ESC, over a slow connection."""


class Ended(Exception):
    """A signal requested the program's end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


def split_keys(data: bytes) -> list[str]:
    """Return the keys that a terminal's bytes encode; unknown sequences are dropped."""
    keys = []
    while data:
        size = 1
        if data[:1] == b"\x1b" and len(data) > 1:
            size = _sequence(data)
        key = KEYS.get(data[:size]) or (chr(data[0]) if size == 1 and 0x20 <= data[0] < 0x7F else "")
        if key:
            keys.append(key)
        data = data[size:]
    return keys


def _sequence(data: bytes) -> int:
    """Return the length of the escape sequence at the beginning of `data`."""
    if data[1:2] == b"O":
        return min(3, len(data))
    if data[1:2] != b"[":
        return 1
    for at in range(2, len(data)):
        if 0x40 <= data[at] <= 0x7E:
            return at + 1
    return len(data)


class Terminal:
    """A terminal in use, from `with` until its end."""

    def __init__(self, console: Console, keyboard: int) -> None:
        """Set up the terminal; `keyboard` is the descriptor to read keys from."""
        self._console, self._keyboard = console, keyboard
        self._wake_reader, self._wake_writer = os.pipe()
        for end in (self._wake_reader, self._wake_writer):
            os.set_blocking(end, False)
        self._live: Live | None = None
        self._saved: list[Any] = []
        self._before: dict[int, Any] = {}
        self._wakeup_before = -1
        self._signals: set[int] = set()

    def __enter__(self) -> Self:
        for number in (*ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH):
            if signal.getsignal(number) != signal.SIG_IGN or number == signal.SIGINT:
                self._before[number] = signal.signal(number, self._note)
        self._wakeup_before = signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        try:
            self._take()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def wake(self) -> None:
        """End the wait for a key, from any thread."""
        with contextlib.suppress(OSError):
            os.write(self._wake_writer, b"\0")

    def show(self, lines: list[Text]) -> None:
        """Show a screen."""
        if self._live is not None:
            self._live.update(Group(*lines), refresh=True)

    @property
    def size(self) -> tuple[int, int]:
        """The terminal's current width and height."""
        return self._console.size

    def keys(self, within_s: float) -> list[str]:
        """Return the pressed keys; none after `within_s`, or if `wake` was called. Raise `Ended` for a signal."""
        ready, _, _ = select.select([self._keyboard, self._wake_reader], [], [], within_s)
        if self._wake_reader in ready:
            with contextlib.suppress(BlockingIOError):
                while os.read(self._wake_reader, 4096):
                    pass
        self._handle_signals()
        if self._keyboard not in ready:
            return []
        data = os.read(self._keyboard, 1024)
        if not data:
            raise Ended(signal.SIGHUP)  # the terminal was closed
        if data[-1:] == b"\x1b" and select.select([self._keyboard], [], [], ESCAPE_S)[0]:
            data += os.read(self._keyboard, 1024)
        return split_keys(data)

    # -- signals

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signals.add(number)

    def _handle_signals(self) -> None:
        noted, self._signals = self._signals, set()
        for number in ENDING:
            if number in noted:
                raise Ended(number)
        if signal.SIGTSTP in noted:
            self._give()
            before = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTSTP)  # SIGCONT resumes the program here
            signal.signal(signal.SIGTSTP, before)
            self._signals.discard(signal.SIGCONT)
            self._take()
        elif signal.SIGCONT in noted:  # after a SIGSTOP the shell has changed the terminal's settings
            self._give()
            self._take()

    # -- terminal settings

    def _take(self) -> None:
        self._saved = termios.tcgetattr(self._keyboard)
        tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        self._live = Live(
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
            vertical_overflow="crop",
        )
        self._live.start()

    def _give(self) -> None:
        live, self._live = self._live, None
        saved, self._saved = self._saved, []
        try:
            if live is not None:
                live.stop()
        finally:
            if saved:
                with contextlib.suppress(termios.error):  # the terminal was closed
                    termios.tcsetattr(self._keyboard, termios.TCSADRAIN, saved)

    def _end(self) -> None:
        try:
            with contextlib.suppress(OSError):
                self._give()
        finally:
            signal.set_wakeup_fd(self._wakeup_before)
            for number, handler in self._before.items():
                signal.signal(number, handler)
            os.close(self._wake_reader)
            os.close(self._wake_writer)
