"""Shortens the traceback of a Strata error that ends a program to the program's own frames and the message.

Frames of Strata and of libraries that it called, and errors raised only within these, do not help to fix the program.
They are left out of the traceback; the log has the full traceback at level debug.
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
    """From now on shorten the tracebacks of Strata errors that end this program; other errors stay as they are."""
    if not getattr(sys.excepthook, "is_brief", False):
        sys.excepthook = _brief(sys.excepthook)


def _brief(show: Callable[..., Any]) -> Callable[..., Any]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
        if isinstance(error, StrataError):
            log.debug("%s", error, exc_info=(kind, error, trace))
            _shorten(error.with_traceback(trace))
            trace = error.__traceback__
        return show(kind, error, trace)

    hook.is_brief = True  # type: ignore[attr-defined]  # marks this hook as installed
    return hook


def _shorten(error: BaseException, *, called: bool = False) -> None:
    """Keep only the program's own frames of an error and of its causes; drop causes without such frames."""
    error.__traceback__ = users_frames(error.__traceback__, called=called)
    led = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while led is not None:
        _shorten(led, called=True)
        if led.__traceback__ is not None:
            break
        led = led.__cause__
    error.__cause__ = led  # setting the cause hides the context too


def users_frames(trace: TracebackType | None, *, called: bool = False) -> TracebackType | None:
    """Return the frames of `trace` that belong to the program, or None.

    Library frames after the first Strata frame do not count as the program's. `called`: Strata frames precede `trace`.
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
