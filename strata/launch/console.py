r"""This command's own output, which several ranks and the agent share: whole lines, each with the name of who wrote it.

A rank's output arrives in pieces. `Lines` holds the beginning of a line until its end is there, so that a line of one rank
never stands within a line of another. `Console` puts the prefix before each line.

A line ends with `\n`, `\r\n` or a lone `\r`, with which progress bars (tqdm) draw the same line again. All of them are
passed on as they are.
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
"""A longer line is passed on in parts of about this size: a rank that never ends its line takes no more memory."""
MAX_WAITING: Final = 1000
"""So many lines of this process itself wait for the console."""
TAKEN_S: Final = 1.0
"""At the end of a command its own lines are given up once none of them was taken for so long."""
ERASE: Final = b"\x1b[K"
"""Has a terminal erase the rest of the line: a progress bar may have stood there."""
_BREAK = re.compile(rb"(\r\n|\n|\r(?!\n))(?!\Z)")
"""The end of a line that another line follows."""
_RETURNS = re.compile(rb"\r+(?!\n)")
_MORE_RETURNS = re.compile(rb"(?<=[\r\n])\r+(?!\n)")
"""At the beginning of a line, where they are without effect."""
_COLOURS: Final = (36, 33, 32, 35, 34, 31)


class Lines:
    """Cuts one stream after its last line end; what follows is held until it is a line, too long, or asked for."""

    def __init__(self) -> None:
        self._held = b""

    @property
    def holds(self) -> bool:
        """Whether the beginning of a line is held."""
        return bool(self._held)

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on now: whole lines, or all of it if a line is too long."""
        begun = len(self._held)
        data = self._held + data
        # a \r at the very end may be the first half of \r\n
        cut = max(data.rfind(b"\n", begun), data.rfind(b"\r", max(0, begun - 1), len(data) - 1)) + 1
        if len(data) - cut > MAX_LINE:
            cut = len(data)
        if cut == 1 and data[:1] == b"\r":  # it belongs to the bar that follows it
            cut = 0
        self._held = data[cut:]
        return data[:cut]

    def rest(self) -> bytes:
        """Return what is held, and hold it no longer."""
        held, self._held = self._held, b""
        return held


class Console:
    """One file that lines of several writers go to.

    What cannot be written is lost, and harms nobody: whoever read it has gone, or the disk is full, and the training goes on.
    """

    def __init__(self, fd: int, env: Mapping[str, str]) -> None:
        self.fd = fd
        self.terminal = os.isatty(fd)
        self._colours = self.terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"
        self.gone = False
        """Whether something could not be written, and was lost."""
        self._lock = threading.Lock()
        self._writer: object = None
        """Who wrote last."""
        self._within = False
        """Whether the last writer has begun a line and not ended it."""
        self._bar = False
        """Whether that line is drawn again and again, as a progress bar is."""
        self._begun = b""
        """The line that is begun."""
        self._erased: dict[object, bytes] = {}
        """The bars in whose place lines of others came, by writer: one that is not drawn again has ended so."""
        self._before_others = b""
        """What anybody else has to write first, so that its line begins on one of its own."""

    def prefix(self, rank: int | None) -> bytes:
        """Return what stands before a rank's lines, or before those of a warm process."""
        name = b"[warm]" if rank is None else b"[rank %d]" % rank
        if self._colours and rank is not None:
            name = b"\x1b[%dm%s\x1b[0m" % (_COLOURS[rank % len(_COLOURS)], name)
        return (ERASE if self.terminal else b"") + name + b" "

    def write(self, writer: object, prefix: bytes, data: bytes) -> None:
        """Write `data` of `writer` with `prefix` before each of its lines; block as long as nobody takes it.

        It may begin within a line, if `writer` has begun that. A line that somebody else has begun is ended before.
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
        """Write a text of this process itself, which ends with its line."""
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
            except BlockingIOError:  # somebody who shares it has made it so
                select.select([], [self.fd], [])
            except OSError:
                self.gone = True
                return


class ConsoleText:
    """A `Console` as a stream of text, for a logger."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def write(self, text: str) -> int:
        self._console.say(text)
        return len(text)

    def flush(self) -> None:
        """Nothing is held."""

    def isatty(self) -> bool:
        return self._console.terminal


class PatientText(ConsoleText):
    """The same, and it holds nobody up who writes: a thread puts the lines on the console, in their order.

    Ranks share the console, and whoever reads it may be slow: an event loop that waited for it would answer nobody.
    If more than `MAX_WAITING` lines wait, the oldest are dropped. How many is said once the others are written.
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
        """Return once all that waits is written, or none of it was for `TAKEN_S`. What comes then is written at once."""
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
        """Return the next line once there is one, or how many were dropped; None when nothing more comes."""
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
    """Return those of stdout and stderr, which are the same one if both are the same file."""
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
