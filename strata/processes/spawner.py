"""Starts guarded children of this process; `strata.processes.children` is its only user.

There is one `Spawner` per process. It forks on a thread that lives as long as the process, keeps the guardian running,
and knows the living children.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeVar

from strata.processes import guard

_T = TypeVar("_T")
_BARE_PYTHON = (sys.executable, "-I", "-S", guard.__file__)


class ForkThread:
    """Runs forking calls on one thread that ends only with the process.

    PR_SET_PDEATHSIG depends on the thread that forked: a child of a short-lived pool thread would be killed when that
    thread ends.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] | None = None
        self._start = threading.Lock()

    def call(self, job: Callable[[], _T]) -> _T:
        """Return `job()`, run on the main thread if the caller is on it, else on this object's thread."""
        if threading.current_thread() is threading.main_thread():
            return job()
        with self._start:
            if self._jobs is None:
                self._jobs = queue.SimpleQueue()
                threading.Thread(target=self._run, name="strata-fork", daemon=True).start()
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(job())
            except BaseException as error:  # noqa: BLE001 - raised again where the result is awaited
                done.set_exception(error)

        self._jobs.put(run)
        return done.result()

    def _run(self) -> None:
        assert self._jobs is not None
        while True:
            self._jobs.get()()


class Spawner:
    """Starts guarded children and reports to the guardian which groups live."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.RLock()
        self._fork = ForkThread()
        self._guardian: subprocess.Popen[bytes] | None = None
        self._orders = -1
        self._live: set[int] = set()
        atexit.register(self._at_exit)

    def spawn(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        cwd: str | os.PathLike[str] | None,
        stdin: int,
        stdout: int | None,
        stderr: int | None,
        pass_fds: Sequence[int],
        new_session: bool,
    ) -> subprocess.Popen[bytes]:
        """Start `command` in its own group, bound to this process; see `Child.start`."""

        def start() -> subprocess.Popen[bytes]:
            orders = self._orders
            return subprocess.Popen(
                [
                    *_BARE_PYTHON,
                    *("exec", str(self._owner), str(orders)),
                    "1" if "LC_CTYPE" in environment else "0",
                    *command,
                ],
                env=environment,
                cwd=cwd,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(*pass_fds, orders),
                start_new_session=new_session,
                process_group=None if new_session else 0,
            )

        with self._lock:
            self._ensure_guardian()
            process = self._fork.call(start)
            self._live.add(process.pid)
            return process

    def forget(self, group: int) -> None:
        """Drop a group that has ended: another process may soon get its id."""
        with self._lock:
            self._live.discard(group)
            self._order(b"-%d\n" % group)

    def _order(self, line: bytes) -> None:
        if self._guardian is None:
            return  # in a fork, the children belong to the first process
        with contextlib.suppress(BrokenPipeError):
            os.write(self._orders, line)

    def _ensure_guardian(self) -> None:
        if self._guardian is not None:
            if self._guardian.poll() is None:
                return
            os.close(self._orders)  # the guardian was killed
        read_end, self._orders = os.pipe()
        try:
            # In a session of its own: a signal to the parent's group or terminal must not end it.
            self._guardian = subprocess.Popen(
                [*_BARE_PYTHON, "watch", str(self._owner), str(read_end)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                env={},
                pass_fds=(read_end,),
                start_new_session=True,
            )
        finally:
            os.close(read_end)
        for group in self._live:
            self._order(b"+%d\n" % group)

    def _at_exit(self) -> None:
        """At an orderly exit of this process, kill the children, then the guardian, which is no longer needed."""
        if os.getpid() != self._owner or self._guardian is None:
            return
        for group in self._live:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, signal.SIGKILL)
        self._guardian.kill()
        self._guardian.wait()


_of_process = {os.getpid(): Spawner()}


def _after_fork() -> None:
    _of_process.clear()
    _of_process[os.getpid()] = Spawner()


os.register_at_fork(after_in_child=_after_fork)


def spawner() -> Spawner:
    """Return this process's spawner; a fork of the process has one of its own."""
    return _of_process[os.getpid()]
