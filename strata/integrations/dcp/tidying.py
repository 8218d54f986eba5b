"""What a writer does after a save, for which the trainer need not wait: old checkpoints go."""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import Final

END_S: Final = 5.0
"""How long the program's end waits for what is under way; the next pass does the rest."""

log: Final = logging.getLogger("strata.checkpoint")

_RUNNING: Final[weakref.WeakSet[threading.Thread]] = weakref.WeakSet()


class Tidying:
    """Calls something in a thread, which is waited for before the next; an error comes out of `check`."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, act: Callable[[], None]) -> None:
        """Have `act` called; nothing may be under way. The program's end waits for it, for a while.

        Here and now where no thread can be had, as at the program's end.
        """
        assert self._thread is None, "it was waited for"

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  # raised by `check`
                log.warning("old checkpoints were not all removed: %s", error)
                self._error = error

        thread = threading.Thread(target=run, name="strata-tidying", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            run()
        else:
            self._thread = thread
            _RUNNING.add(thread)

    def wait(self) -> None:
        """Return when nothing is under way."""
        if self._thread is not None:
            self._thread.join()  # first: when this is interrupted, it is still under way
            self._thread = None

    def check(self) -> None:
        """Raise the error of what was called last, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error


def _end() -> None:
    until = time.monotonic() + END_S
    for thread in list(_RUNNING):
        thread.join(max(0.0, until - time.monotonic()))


atexit.register(_end)
