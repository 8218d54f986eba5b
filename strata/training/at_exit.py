"""A run that nobody closed ends with its program: as done, if no step was under way; else nothing is saved.

Python tells those who are called at exit neither of the exception nor of the status that ends a program. The exception is
noted in `sys.excepthook`. The status is not known here, so a loop that was left within a step looks like one that failed:
its state may be that of half a step. Nor does Python take an error from those called at exit for one of the program: what
is not done is ended from here, with 1.
"""

from __future__ import annotations

import atexit
import logging
import sys
from typing import Any

from strata.errors import JobDone, Preempted
from strata.training.ending import exit_preempted, exit_with
from strata.training.run import Run

log = logging.getLogger("strata.training")


def close_at_exit(run: Run) -> None:
    """End the run with the program; what is noted for that is taken away when it ends before."""
    failed: list[str] = []
    show = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.append(f"{kind.__name__}: {error}")
        if isinstance(error, JobDone):  # nothing is wrong then, if it is this run's job
            run.failed(error)
        show(kind, error, trace)
        run.failed(error)

    def end() -> None:
        if failed:
            run.abandon(failed[0])
            return
        if run.begun > run.step:
            log.error(
                "NOT DONE, AND STEP %d IS NOT SAVED if it was not before: the program ended without run.close(),"
                " and its last run.steps was left within a step",
                run.step,
            )
            run.abandon("the program ended within a step, without run.close()")
            exit_with(1)
        # not patient: it may be that only this rank ends, by sys.exit(1), and the others wait for it
        try:
            run.close(patient=False)
        except Preempted:  # at exit Python takes no other code
            exit_preempted()
        except BaseException:  # noqa: BLE001  # nor this: the job would be done, and its last step is lost
            sys.excepthook(*sys.exc_info())
            exit_with(1)

    def forget() -> None:
        atexit.unregister(end)
        if sys.excepthook is hook:
            sys.excepthook = show

    sys.excepthook = hook
    atexit.register(end)
    run.at_end(forget)
