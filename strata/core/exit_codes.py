"""What a process's exit code tells the program that started it, where more than 0 and 1 is said."""

from __future__ import annotations

from typing import Final

REFUSED: Final = 4
"""The state of the cluster forbids what it was to do, and said why."""

PREEMPTED: Final = 75
"""It saved and left because it was asked to (sysexits.h: EX_TEMPFAIL): put it back into the queue."""

DO_NOT_REQUEUE: Final = 78
"""It failed for a reason that another try will meet again (sysexits.h: EX_CONFIG)."""


def is_success(error: BaseException | None) -> bool:
    """Tell whether a program that ends by `error` is done: without one it is, and by `sys.exit()` or `sys.exit(0)`."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
