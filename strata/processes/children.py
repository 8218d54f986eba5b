"""Child processes that never outlive this process, however it ends.

Three things together ensure that:

1. The kernel sends SIGKILL to every child when the child's parent dies (PR_SET_PDEATHSIG).
2. Every child leads a process group of its own. When the child ends or is killed, the processes it left in the group
   (DataLoader workers) are killed too.
3. A guardian process kills those groups when the parent itself is killed and cannot act any more. There is one
   guardian per parent, started with its first child.

The kernel sends the death signal when the *thread* that forked ends, not the process. So a child that is started off
the main thread is forked by one thread that lives as long as the process.

`strata.processes.spawner` starts the guardian and has that thread. `strata.processes.guard` is the program that
runs in the child and the guardian, and its docstring says why no `preexec_fn` is used. A child costs one start
of a bare Python (about 10 ms) before its program runs; the first child also costs the guardian (one idle
Python, 9 MB). Limit: a process that left its group on purpose (a daemon) is not killed.

The blocking calls (`join`, `stop`) are for plain programs, the `_async` ones for asyncio. Both may be used from any
thread and mixed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from strata.processes.spawner import spawner

_WITHOUT_PIDFD_POLL_S = 0.02
_TAIL_BYTES = 65536
_CODE_UNKNOWN = 255


class Child:
    """A running child process and its process group; make one with `Child.start`."""

    def __init__(self, process: subprocess.Popen[bytes], *, name: str, log: Path | None) -> None:
        self._process = process
        self._ending = threading.Lock()
        self._sigterm_sent = False
        self.name = name
        self.log = log

    @classmethod
    def start(
        cls,
        argv: Sequence[str | os.PathLike[str]],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        log: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
        stderr: int | None = None,
        pass_fds: Sequence[int] = (),
        new_session: bool = False,
    ) -> Child:
        """Start `argv` as the leader of a new process group and return it running.

        `env` replaces the environment. Both output streams are appended to `log` if given; otherwise `stdout` and
        `stderr` are file descriptors, None meaning this process's own. `new_session` also detaches the child from the
        terminal. `FileNotFoundError` if there is no such program.
        """
        command = [os.fspath(part) for part in argv]
        environment = dict(os.environ if env is None else env)
        if os.sep not in command[0]:
            found = shutil.which(command[0], path=environment.get("PATH"))
            if found is None:
                raise FileNotFoundError(f"no program {command[0]!r} on PATH")
        elif cwd is None and not os.access(command[0], os.X_OK):
            raise FileNotFoundError(f"no program at {command[0]}")
        with contextlib.ExitStack() as files:
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                stdout = stderr = files.enter_context(log.open("ab")).fileno()
            process = spawner().spawn(
                command,
                environment,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=pass_fds,
                new_session=new_session,
            )
        return cls(process, name=name or Path(command[0]).name, log=log)

    def __repr__(self) -> str:
        return f"<Child {self.name} pid={self.pid} {self.describe()}>"

    @property
    def pid(self) -> int:
        """The process id, which is the id of its process group too."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, or minus the signal's number if a signal ended the child; None while it runs."""
        return self.poll()

    def describe(self) -> str:
        """Return the child's state in words: running, or how it ended."""
        code = self.poll()
        if code is None:
            return "is running"
        if code >= 0:
            return f"exited with {code}"
        try:
            return f"was ended by {signal.Signals(-code).name}"
        except ValueError:
            return f"was ended by signal {-code}"

    def poll(self) -> int | None:
        """Return the exit code if the child has ended, else None. Once it has ended, its group is killed too."""
        with self._ending:
            if self._process.returncode is None:
                # Look without reaping: while the leader is a zombie, no other process gets its id, so the group can
                # be killed safely.
                options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                try:
                    if os.waitid(os.P_PID, self.pid, options) is None:
                        return None
                except ChildProcessError:  # SIGCHLD is ignored here, or other code reaped the child
                    self._process.returncode = _CODE_UNKNOWN
                    spawner().forget(self.pid)
                    return _CODE_UNKNOWN
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.pid, signal.SIGKILL)
                spawner().forget(self.pid)
                self._process.wait()
            return self._process.returncode

    def send_signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the child, or to all of its group; does nothing if the child has ended."""
        if self.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if group:
                os.killpg(self.pid, number)
            else:
                os.kill(self.pid, number)

    def pause(self) -> None:
        """Freeze the whole group (SIGSTOP); return once the child is stopped.

        Without the wait, threads on other cores could still run for a moment.
        """
        self.send_signal(signal.SIGSTOP, group=True)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a frozen group run again (SIGCONT)."""
        self.send_signal(signal.SIGCONT, group=True)

    def kill(self) -> None:
        """Send SIGKILL to the whole group; does not wait."""
        self.send_signal(signal.SIGKILL, group=True)

    def request_stop(self) -> None:
        """Send SIGTERM to the child alone, so that it can end its own children in order.

        A frozen child is resumed, as it could not handle the signal otherwise.
        """
        self._sigterm_sent = True
        self.send_signal(signal.SIGTERM)
        self.resume()

    def join(self, timeout_s: float | None = None) -> int:
        """Block until the child has ended and return its exit code; `TimeoutError` after the limit."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._exit_fd() as fd:
            while (code := self.poll()) is None:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"{self.name} (pid {self.pid}) runs after {timeout_s} s")
                if fd is None:
                    time.sleep(_WITHOUT_PIDFD_POLL_S)
                else:
                    poll = select.poll()
                    poll.register(fd, select.POLLIN)
                    poll.poll(None if left is None else int(left * 1000) + 1)
        return code

    async def join_async(self, timeout_s: float | None = None) -> int:
        """Return the exit code once the child has ended; `TimeoutError` after the limit."""
        try:
            async with asyncio.timeout(timeout_s):
                with self._exit_fd() as fd:
                    while (code := self.poll()) is None:
                        if fd is None:
                            await asyncio.sleep(_WITHOUT_PIDFD_POLL_S)
                        else:
                            await _readable(fd)
                return code
        except TimeoutError:
            raise TimeoutError(f"{self.name} (pid {self.pid}) runs after {timeout_s} s") from None

    def stop(self, grace_s: float = 5.0) -> int:
        """End the child: SIGTERM, `grace_s` to comply, then SIGKILL to the group; block until the child has ended.

        A child that got a SIGTERM before gets no second SIGTERM. The second could arrive at the very end of the
        program, when its handler is removed, or the program could take it for "end without grace".
        """
        if not self._sigterm_sent:
            self.request_stop()
        try:
            return self.join(grace_s)
        except TimeoutError:
            self.kill()
            return self.join()

    async def stop_async(self, grace_s: float = 5.0) -> int:
        """End the child as `stop` does, without blocking."""
        if not self._sigterm_sent:
            self.request_stop()
        try:
            return await self.join_async(grace_s)
        except TimeoutError:
            self.kill()
            return await self.join_async()

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log, for an error message; empty without a log."""
        if self.log is None or not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    @contextlib.contextmanager
    def _exit_fd(self) -> Iterator[int | None]:
        """Yield a descriptor that is readable once the child has ended; None on kernels before 5.3."""
        try:
            fd = os.pidfd_open(self.pid)
        except OSError:  # also if the child has been reaped; then poll() returns its code before fd is used
            yield None
            return
        try:
            yield fd
        finally:
            os.close(fd)


async def _readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(fd, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(fd)
