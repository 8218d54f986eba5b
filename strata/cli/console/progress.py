"""Progress of long operations on stderr: a bar on a terminal, else a line every ten seconds."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from strata.cli.console.output import printable, size

LINE_EVERY_S: Final = 10.0


@contextlib.contextmanager
def byte_progress(what: str, total_bytes: int) -> Iterator[Callable[[int], None]]:
    """Yield a function to call with the number of bytes completed since the last call."""
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _lines(printable(what), total_bytes)
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(printable(what), total=total_bytes)
        yield lambda count: progress.update(task, advance=count)


@contextlib.contextmanager
def item_progress(what: str) -> Iterator[Callable[[], None]]:
    """Yield a function to call for each completed item, when the total is not known.

    If the command prints a line for each item to the same terminal, those lines show the progress.
    """
    console = Console(stderr=True, highlight=False, emoji=False)
    if not console.is_terminal or console.is_dumb_terminal:
        yield _counts(printable(what))
        return
    if sys.stdout.isatty():
        yield lambda: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}: {task.completed:.0f}", markup=False))
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(printable(what), total=None)
        yield lambda: progress.update(task, advance=1)


def _counts(what: str) -> Callable[[], None]:
    done, reported_s = 0, time.monotonic()

    def advance() -> None:
        nonlocal done, reported_s
        done += 1
        now = time.monotonic()
        if now - reported_s >= LINE_EVERY_S:
            reported_s = now
            sys.stderr.write(f"{what}: {done}\n")
            sys.stderr.flush()

    return advance


def _lines(what: str, total_bytes: int) -> Callable[[int], None]:
    done, reported_s = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, reported_s
        done += count
        now = time.monotonic()
        if now - reported_s >= LINE_EVERY_S:
            reported_s = now
            sys.stderr.write(f"{what}: {size(done)} of {size(total_bytes)}\n")
            sys.stderr.flush()

    return advance
