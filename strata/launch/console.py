r"""Console: this command's own output, shared by several ranks and the agent, as whole lines with their writer's name.

A rank's output arrives in pieces. `Lines` holds the beginning of a line until its end arrives, so that a line of one
rank never lands inside a line of another. `Console` puts the prefix before each line.

A line ends with `\n`, `\r\n` or a single `\r`. Progress bars (tqdm) redraw the same line by `\r`. All line ends
are passed on unchanged.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections import deque
from collections.abc import Mapping
from typing import Final

from strata.observe import get_logger

log = get_logger()

STDOUT, STDERR = 1, 2
MAX_LINE: Final = 64 << 10
"""A longer line is passed on in parts of about this size, which limits the memory for a line that never ends."""
MAX_WAITING: Final = 1000
"""The most lines of this process's own output that may wait for the console."""
TAKEN_S: Final = 1.0
"""At the command's end, log lines that still wait are dropped if the console takes none for this long."""
ERASE: Final = b"\x1b[K"
"""Makes a terminal erase the rest of the line, on which a progress bar may have been drawn."""
_BREAK = re.compile(rb"(\r\n|\n|\r(?!\n))(?!\Z)")
"""The end of a line, if another line follows."""
_RETURNS = re.compile(rb"\r+(?!\n)")
_MORE_RETURNS = re.compile(rb"(?<=[\r\n])\r+(?!\n)")
"""Carriage returns at the beginning of a line: they have no effect there."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31)


class Lines:
    """Cuts a stream after its last line end. The rest is held until it becomes a line, is too long, or `rest`
    takes it.
    """

    def __init__(self) -> None:
        self._held = b""

    @property
    def holds(self) -> bool:
        """Whether the beginning of a line is held."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return the bytes that can be passed on now: whole lines, or everything if a line is too long."""
        begun = len(self._held)
        data = self._held + data
        # a \r at the very end may be the first half of \r\n
        cut = max(data.rfind(b"\n", begun), data.rfind(b"\r", max(0, begun - 1), len(data) - 1)) + 1
        if len(data) - cut > MAX_LINE:
            cut = len(data)
        if cut == 1 and data[:1] == b"\r":  # this \r belongs to the progress bar that follows
            cut = 0
        self._held = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """Return the held bytes, and stop holding them."""
        held, self._held = self._held, b""
        return held


class Console:
    """One file to which several writers write lines.

    If output cannot be written (its reader has ended, or the disk is full), it is lost without an error,
    because the training must go on.
    """

    def __init__(self, fd: int, env: Mapping[str, str]) -> None:
        self.fd = fd
        self.terminal = os.isatty(fd)
        self._colours = self.terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self.broken = False
        """Whether some output could not be written and was lost."""
        self._lock = threading.Lock()
        self._writer: object = None
        """The writer of the last output."""
        self._within = False
        """Whether the last writer has begun a line and not ended it."""
        self._bar = False
        """Whether the unfinished line is a progress bar, which is redrawn again and again."""
        self._begun = b""
        """The text of the unfinished line."""
        self._erased: dict[object, bytes] = {}
        """By writer, the text of an unfinished bar that another writer's line replaced.

        The text is written again if the writer ends the bar's line without redrawing it.
        """
        self._before_others = b""
        """The bytes that any other writer must write first, so that its line begins on a line of its own."""

    def prefix(self, rank: int | None) -> bytes:
        """Return the prefix of a rank's lines, or of a warm process's lines if `rank` is None."""
        name = b"[warm]" if rank is None else b"[rank %d]" % rank
        if self._colours and rank is not None:
            name = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], name)
        return (ERASE if self.terminal else b"") + name + b" "

    def write(self, writer: object, prefix: bytes, data: bytes) -> None:
        """Write `data` of `writer` with `prefix` before each of its lines; block until the console has taken it.

        The data may continue a line that `writer` has begun. A line that another writer has begun is ended first.
        """
        with self._lock:
            head = b""
            if writer is not self._writer or not self._within:
                if writer is not self._writer:
                    self._keep_erased()
                erased = self._erased.pop(writer, b"")
                returns = _RETURNS.match(data)
                self._bar = returns is not None
                data = data[returns.end() if returns is not None else 0 :]
                if data[:1] == b"\n" and not self._bar:
                    data = erased + data
                self._begun = b""
                head = prefix if writer is self._writer else self._before_others + prefix
            if data:
                self._write(head + _prefixed(prefix, data))
                self._writer = writer
                self._note_end(data)

    def say(self, text: str) -> None:
        """Write a text of this process itself. The text must end with a line end."""
        with self._lock:
            self._keep_erased()
            self._write(self._before_others + text.encode(errors="replace"))
            self._writer, self._within, self._before_others = None, False, b""

    def _keep_erased(self) -> None:
        if self.terminal and self._within and self._bar:
            self._erased[self._writer] = self._begun

    def _note_end(self, data: bytes) -> None:
        at = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if at >= 0:
            self._bar = data[at : at + 1] == b"\r"
        self._within = at + 1 < len(data)
        self._begun = data[at + 1 :] if at >= 0 else (self._begun + data)[-MAX_LINE:]
        if not self._within and not self._bar:
            self._before_others = b""
        else:
            self._before_others = b"\r" + ERASE if self.terminal and self._bar else b"\n"

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left:
            try:
                left = left[os.write(self.fd, left) :]
            except BlockingIOError:  # another process that shares the file has made it non-blocking
                select.select([], [self.fd], [])
            except OSError:
                self.broken = True
                return


class ConsoleText:
    """A `Console` as a text stream, for a logger."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.say(text)
        return len(text)

    def flush(self) -> None:
        """Do nothing: no text is held."""

    def isatty(self) -> bool:
        return self._console.terminal


class QueuedText(ConsoleText):
    """A `ConsoleText` that does not block its writers: a thread writes the lines to the console, in their order.

    Ranks share the console and its reader may be slow, so an event loop that waited for the console would block.
    If more than `MAX_WAITING` lines wait, the oldest are dropped, and their number is logged after the others.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._changed = threading.Condition()
        self._waiting: deque[str] = deque()
        self._dropped = 0
        self._writing = False
        self._closed = False
        threading.Thread(target=self._run, name="strata-own-output", daemon=True).start()

    def write(self, text: str) -> int:
        with self._changed:
            if not self._closed:
                if len(self._waiting) == MAX_WAITING:
                    self._waiting.popleft()
                    self._dropped += 1
                self._waiting.append(text)
                self._changed.notify_all()
                return len(text)
        return super().write(text)

    def close(self) -> None:
        """Return once no line waits, or none was written for `TAKEN_S`. Lines that come later are written directly."""
        with self._changed:
            while self._busy and self._changed.wait(TAKEN_S):
                pass
            self._closed = True
            self._changed.notify_all()

    @property
    def _busy(self) -> bool:
        return self._writing or bool(self._waiting) or self._dropped > 0

    def _run(self) -> None:
        while (taken := self._take()) is not None:
            text, dropped = taken
            if dropped:
                log.warning("output.dropped", lines=dropped, reason="this output was read too slowly")
            else:
                self._console.say(text)

    def _take(self) -> tuple[str, int] | None:
        """Return the next line once there is one, or how many were dropped; None if no more will come."""
        with self._changed:
            self._writing = False
            self._changed.notify_all()
            while not self._busy:
                if self._closed:
                    return None
                self._changed.wait()
            self._writing = True
            if self._waiting:
                return self._waiting.popleft(), 0
            dropped, self._dropped = self._dropped, 0
            return "", dropped


def consoles(env: Mapping[str, str]) -> tuple[Console, Console]:
    """Return the consoles of stdout and stderr; they are the same object if both are the same file."""
    stdout = Console(STDOUT, env)
    try:
        same = os.path.samestat(os.fstat(STDOUT), os.fstat(STDERR))
    except OSError:
        same = False
    return stdout, stdout if same else Console(STDERR, env)


def _prefixed(prefix: bytes, data: bytes) -> bytes:
    if not prefix:
        return data
    if b"\r" in data:
        data = _MORE_RETURNS.sub(b"", data)
        return _BREAK.sub(lambda found: found[1] + prefix, data)
    end = len(data) - data.endswith(b"\n")
    return data[:end].replace(b"\n", b"\n" + prefix) + data[end:]
