"""Closes a run when its program exits without `run.close()`.

The run counts as done if the program has left a loop of `run.steps` with its last step complete. Otherwise the
program exits with 1, and nothing is saved, since the state may be that of an unfinished step.

Python passes neither the exception nor the exit status of the program to `atexit` callbacks. `sys.excepthook` records
an exception of the main thread; the status stays unknown. A multiprocessing child calls no `sys.excepthook`:

    Python 3.11 and 3.12    its finalizers run while the exception is in `sys.exc_info()`
    since Python 3.13       its finalizers run later, by `atexit`; `threading` calls its own callbacks while the frame
                            that holds the exit status is still running

An error raised in any of these callbacks does not change the exit status, so this module ends the process with 1
itself.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import multiprocessing
import os
import sys
import threading
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from types import CodeType, FrameType
from typing import Any, Final, NoReturn

from strata.core.exit_codes import is_success
from strata.errors import JobDone, Preempted
from strata.training.generation_exit import exit_preempted, exit_with, is_interactive
from strata.training.loop.run import Run

EARLY: Final = 100
"""The finalizer's priority: in a child process it runs before multiprocessing joins that child's own children."""

_BOOTSTRAP: Final[CodeType] = BaseProcess._bootstrap.__code__  # type: ignore[attr-defined]
"""The function that runs a multiprocessing child, and has its exit status in a local variable."""

log: Final = logging.getLogger("strata.training")


def close_at_exit(run: Run) -> None:
    """End the run when the program exits; if the run ends earlier, remove the callbacks."""
    run.at_end(_AtExit(run).forget)


class _AtExit:
    def __init__(self, run: Run) -> None:
        self._run = run
        self._made_in = os.getpid()
        self._failed: BaseException | None = None
        self._show, sys.excepthook = sys.excepthook, self._hook
        self._finalizer: Finalize[Any] | None = None
        if multiprocessing.parent_process() is not None:
            self._finalizer = Finalize(None, self._end_child, exitpriority=EARLY)
            with contextlib.suppress(RuntimeError):  # the main thread has ended: the status stays unknown
                threading._register_atexit(_call, weakref.WeakMethod(self._read_status))  # type: ignore[attr-defined]
        atexit.register(self._end)

    def forget(self) -> None:
        atexit.unregister(self._end)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if sys.excepthook == self._hook:  # `==`: each access to a method makes a new object
            sys.excepthook = self._show

    def _hook(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        # a program may call `sys.excepthook` itself, with an error that does not end it
        if getattr(sys, "last_value", None) is error and not is_interactive():
            self._failed = error
            if isinstance(error, JobDone):  # no failure, if the done job is this run's job
                self._run.failed(error)
        self._show(kind, error, trace)
        if self._failed is error:
            self._run.failed(error)

    def _read_status(self) -> None:
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            if frame.f_code is _BOOTSTRAP:
                self._note(SystemExit(frame.f_locals.get("exitcode", 1)))
                return
            frame = frame.f_back

    def _end_child(self) -> None:
        self._note(sys.exc_info()[1])
        self._end()

    def _note(self, error: BaseException | None) -> None:
        if error is not None and not is_success(error):
            self._failed = error
            self._run.failed(error)

    def _end(self) -> None:
        run = self._run
        if os.getpid() != self._made_in:  # a forked child, whose exit does not end the run
            return
        if self._failed is not None:
            run.abandon(f"{type(self._failed).__name__}: {self._failed}")
        elif run.at_rest:
            self._close()
        else:
            log.error(
                "NOT DONE, AND STEP %d IS NOT SAVED unless it was before: the program ended without run.close(),"
                " before or within a loop of run.steps",
                run.step,
            )
            run.abandon("the program ended without run.close(), before or within a loop of run.steps")
            _exit_failed()

    def _close(self) -> None:
        # not patient: if only this rank calls sys.exit(1), the others never arrive at the barrier
        try:
            self._run.close(patient=False)
        except Preempted:  # an exception raised at exit does not set the exit code
            exit_preempted()
        except BaseException:  # noqa: BLE001  # exit code 0 would mark the job done, and lose its last step
            sys.excepthook(*sys.exc_info())
            _exit_failed()


def _call(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method if its object is still in use: a callback of `threading` cannot be removed."""
    if (act := method()) is not None:
        act()


def _exit_failed() -> NoReturn:
    """Exit with 1, after terminating the daemonic children as multiprocessing would do."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    exit_with(1)
