"""How an error of Strata's that ends a program is shown: its message last, below the program's own frames alone.

What stands between them (Strata's frames, those of libraries that it called, the errors that led to this one) says
nothing to whoever has to mend the program. The log has it at the level debug.
"""

from __future__ import annotations

import logging
import os
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from strata.errors import StrataError

_OWN: Final = f"{Path(__file__).resolve().parents[1]}{os.sep}"
_LIBRARIES: Final = tuple(
    f"{folder}{os.sep}" for folder in {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
)

log: Final = logging.getLogger("strata.training")


def show_errors_briefly() -> None:
    """Have errors of Strata's that end this program shown so, from now on; all others as before."""
    if not getattr(sys.excepthook, "is_brief", False):
        sys.excepthook = _brief(sys.excepthook)


def _brief(show: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if isinstance(error, StrataError):
            log.debug("%s", error, exc_info=(kind, error, trace))
            error.__cause__, error.__suppress_context__ = None, True
            trace = users_frames(trace)
            error = error.with_traceback(trace)
        return show(kind, error, trace)

    hook.is_brief = True  # type: ignore[attr-defined]  # a mark of ours
    return hook


def users_frames(trace: TracebackType | None) -> TracebackType | None:
    """Return the frames of `trace` that are the program's own; from the first of Strata's on, libraries' are not."""
    kept: list[TracebackType] = []
    inside = False
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        inside = inside or name.startswith(_OWN)
        if not (name.startswith(_OWN) or (inside and name.startswith(_LIBRARIES))):
            kept.append(trace)
        trace = trace.tb_next
    shown = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown
