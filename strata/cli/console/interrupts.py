"""Ctrl-C as an event, for commands that may end only between two steps."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Iterator
from typing import Final

INTERRUPTED: Final = 128 + signal.SIGINT
"""The exit code of a command that Ctrl-C ended."""


@contextlib.contextmanager
def interruptible() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; a second Ctrl-C ends the program as usual."""
    loop, interrupted = asyncio.get_running_loop(), asyncio.Event()

    def interrupt() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)


async def paused(interrupted: asyncio.Event, seconds: float) -> None:
    """Return after `seconds`, or at Ctrl-C."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(interrupted.wait(), seconds)
