"""Passes on the output of ranks: with a prefix to this command's own output, and unchanged to a file.

A rank writes into two pipes. Each rank has its own thread that reads both, since passing the output on may block. So:

1. If nobody reads this command's output, the rank blocks, as if it wrote to that output itself. The agent does
   not block.
2. The order of a stream's lines is kept. Output that a rank wrote before its end is passed on even after the end.
3. A process that a rank leaves behind may keep the pipes open. The thread reads on, but nothing waits for that process.
4. If the agent is killed, the pipes break, so no process is left blocked on a reader.

The last bytes of a rank's stderr are kept: they show why the rank ended.
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
"""How long an unfinished line is held back on a terminal, where a prompt or a progress bar may never end its line."""
ENDED_S: Final = 0.5
"""How long the last lines of an ended rank may take to be passed on: the console's reader may have stopped reading."""


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
        self._left_in_pipes: dict[int, int] | None = None
        """Bytes that each pipe held when the process ended and that are not read yet; None while it runs."""
        self._passed_on = threading.Event()
        self._thread: threading.Thread | None = None

    def listen(self) -> None:
        """Start passing on the process's output, even before it is a rank."""
        self._thread = threading.Thread(target=self._run, name="strata-rank-output", daemon=True)
        self._thread.start()

    def begin(self, rank: int, file: BinaryIO | None) -> None:
        """Pass on the process's output as this rank's, also into `file`; close `file` when the output ends."""
        self._rank = rank
        self._file = file
        if self._thread is None:
            self.listen()

    def move(self, rank: int) -> None:
        """Attribute later lines to another rank."""
        self._rank = rank

    async def passed_on(self) -> None:
        """Return once all output of the ended process is passed on, or after `ENDED_S`."""
        await asyncio.to_thread(self._passed_on.wait, ENDED_S)

    @property
    def over(self) -> bool:
        """Whether the process has ended, and nothing is left to pass on."""
        return self._passed_on.is_set()

    def wait(self) -> None:
        """If the process has ended, return once all its output is passed on; while it runs, return immediately."""
        if self._thread is not None and self._child.poll() is not None:
            self._passed_on.wait()

    def stderr_tail(self) -> bytes:
        """Return the last bytes of the process's stderr."""
        return self._tail

    def _run(self) -> None:
        try:
            self._pass_all_on()
        finally:  # in every case: otherwise writers to these pipes and waiters for this thread would block for ever
            self._close()

    def _pass_all_on(self) -> None:
        poll = select.poll()
        for fd in (*self._streams, self._end):
            poll.register(fd, select.POLLIN)
        while self._streams:
            ready = {fd for fd, _ in poll.poll(self._grace_ms())}
            if self._end in ready:
                poll.unregister(self._end)
                self._left_in_pipes = {fd: _readable(fd) for fd in self._streams}
            elif not ready:
                self._pass_on_rest()
            for fd in (each for each in list(self._streams) if each in ready):
                if not self._read(fd):
                    poll.unregister(fd)
            if self._left_in_pipes is not None and not any(self._left_in_pipes.values()) and not self.over:
                self._pass_on_rest()
                self._passed_on.set()

    def _grace_ms(self) -> int | None:
        """Return how long to wait before passing on held line beginnings; None if there are none to pass on."""
        held = any(lines.holds and self._streams[fd].terminal for fd, lines in self._lines.items())
        return int(HELD_S * 1000) if held else None

    def _read(self, fd: int) -> bool:
        """Read and pass on some of a stream; return False at its end."""
        data = os.read(fd, READ_BYTES)
        if self._left_in_pipes is not None:
            self._left_in_pipes[fd] = max(0, self._left_in_pipes[fd] - len(data)) if data else 0
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
            with contextlib.suppress(OSError):  # NFS may report a full quota only at close
                file.close()

    def _close(self) -> None:
        for fd in (*self._streams, self._end):
            os.close(fd)
        self._streams.clear()
        self._close_file()
        self._passed_on.set()


def open_file(path: Path) -> BinaryIO:
    """Open the file for a rank's output; `ConfigError` if that fails."""
    try:
        return path.open("ab", buffering=0)
    except OSError as error:
        raise ConfigError(f"cannot write the ranks' output to {path}: {error.strerror}") from error


def _readable(pipe: int) -> int:
    """Return how many bytes a pipe holds."""
    return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)


class RankOutputs:
    """Passes the output of all ranks on to this command's own output, line by line."""

    def __init__(self, stdout: Console, stderr: Console, *, prefix: bool = True) -> None:
        self.stdout, self.stderr = stdout, stderr
        self._prefix = prefix
        self._all: list[RankOutput] = []

    def prefix(self, console: Console, rank: int | None) -> bytes:
        """Return the prefix of a rank's lines; None stands for a process that waits to become a rank."""
        return console.prefix(rank) if self._prefix else b""

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the ranks' environment: if the output goes to a terminal, Python writes each line immediately."""
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
        """Start a process whose output is read after `listen` or `begin`; `OSError` if it cannot be started."""
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
        """Return once all output of ended ranks is passed on. A signal may still end this process meanwhile."""
        for each in self._all:
            each.wait()
