"""A run that nobody closed ends with its program: as a success, unless the program fails.

Python tells those who are called at exit neither of the exception nor of the status that ends it. So
both are noted when they come: in `sys.excepthook`, and in `sys.exit`. Nor does it take an error from
them for one of the program: where the last step cannot be saved the process is ended from here, with 1.
"""

from __future__ import annotations

import atexit
import sys
import threading
from typing import Any, NoReturn

from strata.errors import JobDone, Preempted
from strata.training.ending import exit_preempted, exit_with
from strata.training.run import Run


def close_at_exit(run: Run) -> None:
    """End the run with the program; what is noted for that is taken away when it ends before."""
    failed: list[str] = []
    left: list[tuple[Any, int]] = []
    """The status that the program asked to leave with, and the step that had begun then."""
    show, leave = sys.excepthook, sys.exit

    def hook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
        failed.append(f"{kind.__name__}: {error}")
        if isinstance(error, JobDone):  # nothing is wrong then, if it is this run's job
            run.failed(error)
        show(kind, error, trace)
        run.failed(error)

    def leaving(status: Any = None, /) -> NoReturn:
        if threading.current_thread() is threading.main_thread():  # in another one it ends that only
            left[:] = [(status, run.begun)]
        leave(status)

    def end() -> None:
        for status, begun in left:
            if status not in (None, 0) and begun == run.begun:  # else somebody caught it, and went on
                failed.append(f"sys.exit({status!r})")
        if failed:
            run.abandon(failed[0])
        else:
            # not patient: it may be that only this rank ends, by SystemExit(1), and the others wait for it
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
        if sys.exit is leaving:
            setattr(sys, "exit", leave)  # noqa: B010  # typed as if it could not be replaced

    sys.excepthook = hook
    setattr(sys, "exit", leaving)  # noqa: B010
    atexit.register(end)
    run.at_end(forget)
