"""A run that nobody closed ends with its program: as done, if a loop of `run.steps` was left with its last step complete.

Otherwise nothing is saved, for the state may be that of half a step, and the program ends with 1.

Python tells those who are called at exit neither of the exception nor of the status that ends a program. An exception of
the main thread is noted in `sys.excepthook`; a status is not known. A child by multiprocessing runs no one at exit if it
was forked, and calls no `sys.excepthook`; its own finalizers are called with what ends it. Nor does Python take an error
from any of them for one of the program: what is not done is ended from here, with 1.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import sys
from multiprocessing.util import Finalize
from typing import Any, Final, NoReturn

from strata.core.exit_codes import is_success
from strata.errors import JobDone, Preempted
from strata.training.generation_exit import exit_preempted, exit_with, is_interactive
from strata.training.loop.run import Run

EARLY: Final = 100
"""Before multiprocessing joins the children of a child."""

log: Final = logging.getLogger("strata.training")


def close_at_exit(run: Run) -> None:
    """End the run with the program; what is noted for that is taken away when it ends before."""
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
        atexit.register(self._end)

    def forget(self) -> None:
        atexit.unregister(self._end)
        if self._finalizer is not None:
            self._finalizer.cancel()
        if sys.excepthook == self._hook:  # each look at a method is another object
            sys.excepthook = self._show

    def _hook(self, kind: type[BaseException], error: BaseException, trace: Any) -> None:
        # anybody may call it with an error that ends nothing
        if getattr(sys, "last_value", None) is error and not is_interactive():
            self._failed = error
            if isinstance(error, JobDone):  # nothing is wrong then, if it is this run's job
                self._run.failed(error)
        self._show(kind, error, trace)
        if self._failed is error:
            self._run.failed(error)

    def _end_child(self) -> None:
        error = sys.exc_info()[1]
        if error is not None and not is_success(error):
            self._failed = error
            self._run.failed(error)
        self._end()

    def _end(self) -> None:
        run = self._run
        if os.getpid() != self._made_in:  # a fork of it, whose end is its own
            return
        if self._failed is not None:
            run.abandon(f"{type(self._failed).__name__}: {self._failed}")
        elif run.at_rest:
            self._close()
        else:
            log.error(
                "NOT DONE, AND STEP %d IS NOT SAVED if it was not before: the program ended without run.close(),"
                " before or within a loop of run.steps",
                run.step,
            )
            run.abandon("the program ended without run.close(), before or within a loop of run.steps")
            _exit_failed()

    def _close(self) -> None:
        # not patient: it may be that only this rank ends, by sys.exit(1), and the others wait for it
        try:
            self._run.close(patient=False)
        except Preempted:  # at exit Python takes no other code
            exit_preempted()
        except BaseException:  # noqa: BLE001  # nor this: the job would be done, and its last step is lost
            sys.excepthook(*sys.exc_info())
            _exit_failed()


def _exit_failed() -> NoReturn:
    """End this process with 1, and its daemonic children, which multiprocessing would end now."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.terminate()
    exit_with(1)
