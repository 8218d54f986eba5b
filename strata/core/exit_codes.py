"""Exit codes other than 0 and 1, and their meaning for the program that started the process."""

from __future__ import annotations

from typing import Final

REFUSED: Final = 4
"""The cluster's state forbids the requested operation; the error text says why."""

PREEMPTED: Final = 75
"""The process saved and left because a notice asked for it (sysexits.h: EX_TEMPFAIL): requeue the process."""

DO_NOT_REQUEUE: Final = 78
"""The process failed, and a retry would fail for the same reason (sysexits.h: EX_CONFIG)."""


def is_success(error: BaseException | None) -> bool:
    """Return whether a program that ends with `error` succeeded: with None, `sys.exit()` or `sys.exit(0)`."""
    return error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
