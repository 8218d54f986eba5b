"""What a writer does after a save, for which the trainer need not wait: old checkpoints go."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Tidying:
    """Calls something in a thread, which is waited for before the next; an error comes out of that wait."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def begin(self, act: Callable[[], None]) -> None:
        """Have `act` called; nothing may be under way. The program's end waits for it.

        Here and now where no thread can be had, as at the program's end.
        """
        assert self._thread is None, "it was waited for"

        def run() -> None:
            try:
                act()
            except Exception as error:  # noqa: BLE001  # raised by the next wait
                self._error = error

        thread = threading.Thread(target=run, name="strata-tidying", daemon=False)
        try:
            thread.start()
        except RuntimeError:
            run()
        else:
            self._thread = thread

    def wait(self) -> None:
        """Return when nothing is under way; raise the error of what was, once."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error
