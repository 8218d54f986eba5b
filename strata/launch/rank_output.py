"""What ranks write, on its way through the agent: with a prefix to this command's output, and as it is into a file.

A rank writes into two pipes, and one thread reads both (one for each rank's process: writing may block). So

1. a rank is held up if nobody takes this command's output, as if it wrote there itself; the agent is not;
2. the order of a stream's lines is kept, and what was written before a rank's end is passed on after it;
3. a process that a rank left behind, and that holds its pipes, is read on and not waited for;
4. if the agent is killed, the pipes break: no process is left that waits for a reader.

The last of what a rank writes to stderr is kept: it says why the rank ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import select
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, Final

from strata.errors import ConfigError
from strata.launch.console import STDERR, STDOUT, Console, Lines
from strata.observe import get_logger
from strata.processes.children import Child

log = get_logger()

READ_BYTES: Final = 64 << 10
TAIL_BYTES: Final = 8192
HELD_S: Final = 0.2
"""For how long the beginning of a line is held back on a terminal, where a question or a bar may have no end."""
ENDED_S: Final = 0.5
"""How long the end of a rank waits for its last lines to be passed on: nobody may be taking them."""


class RankOutput:
    """The output of one process, from its start to its end."""

    def __init__(self, outputs: RankOutputs, child: Child, stdout: int, stderr: int) -> None:
        self._outputs = outputs
        self._child = child
        self._end = os.pidfd_open(child.pid)
        self._streams = {stdout: outputs.stdout, stderr: outputs.stderr}
        self._stderr = stderr
        self._lines = {fd: Lines() for fd in self._streams}
        self._rank: int | None = None
        self._file: BinaryIO | None = None
        self._tail = b""
        self._owed: dict[int, int] | None = None
        """How many bytes its pipes held at its end, and still hold, each; None while it runs."""
        self._passed_on = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Pass on what the process writes, from now on, though it is no rank yet."""
        self._thread = threading.Thread(target=self._run, name="strata-rank-output", daemon=True)
        self._thread.start()

    def begin(self, rank: int, file: BinaryIO | None) -> None:
        """Pass on what the process writes as output of this rank; into `file` as well, which is closed at its end."""
        self._rank = rank
        self._file = file
        if self._thread is None:
            self.listen()

    def move(self, rank: int) -> None:
        """Its lines are those of another rank from now on."""
        self._rank = rank

    async def passed_on(self) -> None:
        """Return once all is passed on that the process wrote, which has ended, or after `ENDED_S`."""
        await asyncio.to_thread(self._passed_on.wait, ENDED_S)

    @property
    def over(self) -> bool:
        """Whether the process has ended, and nothing is left to pass on."""
        return self._passed_on.is_set()

    def wait(self) -> None:
        """Return once all is passed on, if the process has ended; at once while it runs."""
        if self._thread is not None and self._child.poll() is not None:
            self._passed_on.wait()

    def stderr_tail(self) -> bytes:
        """Return the last of what the process wrote to stderr."""
        return self._tail

    def _run(self) -> None:
        try:
            self._pass_all_on()
        finally:  # whatever happens: who writes to a pipe that nobody reads, and who waits for this thread, waits for ever
            self._close()

    def _pass_all_on(self) -> None:
        poll = select.poll()
        for fd in (*self._streams, self._end):
            poll.register(fd, select.POLLIN)
        while self._streams:
            ready = {fd for fd, _ in poll.poll(self._grace_ms())}
            if self._end in ready:
                poll.unregister(self._end)
                self._owed = {fd: _readable(fd) for fd in self._streams}
            elif not ready:
                self._pass_on_rest()
            for fd in (each for each in list(self._streams) if each in ready):
                if not self._read(fd):
                    poll.unregister(fd)
            if self._owed is not None and not any(self._owed.values()) and not self.over:
                self._pass_on_rest()
                self._passed_on.set()

    def _grace_ms(self) -> int | None:
        """Return how long to wait for more before all that is held is passed on; None for as long as it takes."""
        held = any(lines.holds and self._streams[fd].terminal for fd, lines in self._lines.items())
        return int(HELD_S * 1000) if held else None

    def _read(self, fd: int) -> bool:
        """Pass on some of a stream; False at its end."""
        data = os.read(fd, READ_BYTES)
        if self._owed is not None:
            self._owed[fd] = max(0, self._owed[fd] - len(data)) if data else 0
        if fd == self._stderr:
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        if data:
            self._write_file(data)
            self._pass_on(fd, self._lines[fd].feed(data))
            return True
        self._pass_on(fd, self._lines[fd].rest())
        del self._streams[fd], self._lines[fd]
        os.close(fd)
        return False

    def _pass_on_rest(self) -> None:
        for fd, lines in self._lines.items():
            self._pass_on(fd, lines.rest())

    def _pass_on(self, fd: int, data: bytes) -> None:
        if data:
            console = self._streams[fd]
            console.write(self._lines[fd], self._outputs.prefix(console, self._rank), data)

    def _write_file(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while self._file is not None and left:
                left = left[self._file.write(left) :]
        except OSError as error:
            log.warning("rank.output_lost", rank=self._rank, reason=f"{error.strerror}: its file ends here")
            self._close_file()

    def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # a full quota on NFS may be told only now
                file.close()

    def _close(self) -> None:
        for fd in (*self._streams, self._end):
            os.close(fd)
        self._streams.clear()
        self._close_file()
        self._passed_on.set()


def open_file(path: Path) -> BinaryIO:
    """Return the file that a rank's output goes to; `ConfigError` if it cannot be had."""
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write the ranks' output to {path}: {error.strerror}") from error


def _readable(pipe: int) -> int:
    """Return how many bytes a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


class RankOutputs:
    """Where the output of all ranks goes: to this command's own, by lines."""

    def __init__(self, stdout: Console, stderr: Console, *, prefix: bool = True) -> None:
        self.stdout, self.stderr = stdout, stderr
        self._prefix = prefix
        self._all: list[RankOutput] = []

    def prefix(self, console: Console, rank: int | None) -> bytes:
        """Return what stands before a rank's lines; None is a process that waits to be one."""
        return console.prefix(rank) if self._prefix else b""

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return what ranks inherit: on a terminal, that Python writes its lines at once, as it does to a terminal."""
        unbuffered = {"PYTHONUNBUFFERED": "1"} if self.stdout.terminal else {}
        return {**unbuffered, **inherited}

    def start(
        self,
        argv: Sequence[str],
        *,
        name: str,
        env: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> tuple[Child, RankOutput]:
        """Start a process whose output is read once it is asked for; `OSError` when it cannot be started."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as theirs:
            ends = []
            for _ in (STDOUT, STDERR):
                ours, its = os.pipe()
                theirs.callback(os.close, its)
                undo.callback(os.close, ours)
                ends.append((ours, its))
            child = Child.start(
                argv, name=name, env=env, pass_fds=pass_fds, stdout=ends[0][1], stderr=ends[1][1]
            )
            undo.callback(child.kill)
            output = RankOutput(self, child, ends[0][0], ends[1][0])
            undo.pop_all()
        self._all = [*(each for each in self._all if not each.over), output]
        return child, output

    def wait(self) -> None:
        """Return once all is passed on that ended ranks wrote. A signal ends this process meanwhile, as any that writes."""
        for each in self._all:
            each.wait()
