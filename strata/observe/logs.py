"""Structured logs: a static event name and fields, as JSON lines on stderr, or as plain text on a terminal.

Fields that apply to a task and its child tasks, such as the replica's name, are bound with `structlog.contextvars`,
so that no logger needs to be passed on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, Protocol, TextIO, cast

import structlog
from structlog.dev import ConsoleRenderer, plain_traceback
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from strata.errors import redacted

Logger = FilteringBoundLogger


def get_logger() -> Logger:
    """Return a logger; a later `configure` also applies to this logger."""
    return cast("Logger", structlog.get_logger())


class LogStream(Protocol):
    """The methods of a stream that logs need."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


def configure(*, fmt: str = "auto", level: str = "info", stream: LogStream | None = None) -> None:
    """Send logs of `level` and above to `stream` (stderr) as `json` or `plain`; `auto` is plain on a terminal.

    A line that cannot be written is dropped: the process must continue if stderr's reader has closed the pipe or the
    disk is full.
    """
    out: LogStream | None = (
        sys.stderr if stream is None else stream
    )  # sys.stderr is None if the shell closed it
    terminal = out is not None and out.isatty()
    plain = fmt == "plain" or (fmt == "auto" and terminal)
    colours = terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    # A terminal shows recent lines, so the time of day suffices; a file may span days, so it also has the date.
    stamp = "iso" if not plain else "%H:%M:%SZ" if terminal else "%Y-%m-%dT%H:%M:%SZ"
    renderer: list[Processor] = (
        # rich's traceback would show local variables, one of which may be a secret
        [
            _lines_below,
            ConsoleRenderer(
                0, colors=colours, exception_formatter=plain_traceback, pad_level=False, sort_keys=False
            ),
        ]
        if plain
        else [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt=stamp, utc=True),
            *renderer,
            _redact,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast("TextIO", _Unfailing(out))),
        cache_logger_on_first_use=False,
    )


def _lines_below(_logger: object, _method: str, event: EventDict) -> EventDict:
    """Print the last lines of a rank's output below the event, each on a separate line."""
    lines = event.pop("stderr", ())
    if lines:
        event["stack"] = "\n".join(f"    {line}" for line in lines)
    return event


def _redact(_logger: object, _method: str, line: Any) -> str:
    """Remove users and passwords in URLs from a rendered line, including its traceback."""
    return redacted(line)


class _Unfailing:
    """A stream, or None, for a logger. Ignores errors of the system and of a closed stream."""

    def __init__(self, stream: LogStream | None) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.write(text)

    def flush(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError, ValueError):
                self._stream.flush()


_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
