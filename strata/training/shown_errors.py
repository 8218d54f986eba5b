"""How an error of Strata's that ends a program is shown: its message last, below the program's own frames alone.

What stands between them (Strata's frames, those of libraries that it called, errors within these that led to this one)
says nothing to whoever has to mend the program. The log has it at the level debug.
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
            _shorten(error.with_traceback(trace))
            trace = error.__traceback__
        return show(kind, error, trace)

    hook.is_brief = True  # type: ignore[attr-defined]  # a mark of ours
    return hook


def _shorten(error: BaseException, *, called: bool = False) -> None:
    """Leave the program's own frames of an error and of those that led to it, and of the latter those that have any."""
    error.__traceback__ = users_frames(error.__traceback__, called=called)
    led = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while led is not None:
        _shorten(led, called=True)
        if led.__traceback__ is not None:
            break
        led = led.__cause__
    error.__cause__ = led  # which hides the context, too


def users_frames(trace: TracebackType | None, *, called: bool = False) -> TracebackType | None:
    """Return the frames of `trace` that are the program's own.

    From the first of Strata's on, those of libraries are not; if `called`, Strata's were before these.
    """
    kept: list[TracebackType] = []
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        own = name.startswith(_OWN)
        called = called or own
        if not own and not (called and name.startswith((*_LIBRARIES, "<frozen "))):
            kept.append(trace)
        trace = trace.tb_next
    shown = None
    for each in reversed(kept):
        shown = TracebackType(shown, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return shown
