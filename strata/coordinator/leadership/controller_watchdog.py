"""The controller watchdog: the leader renews its lease only while its world controller makes progress.

Waiting for etcd counts as progress: if etcd is slow, another leader would wait for the same etcd. A controller
that hangs for any other reason makes no progress, so the lead passes to another replica (PROTOCOLS 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class ControllerWatchdog:
    """Records when the controller's loop last made a turn, by `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._waiting = 0

    def beat(self) -> None:
        """Record a turn of the loop."""
        self._at = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time in the body as progress: the body waits for etcd."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self.beat()

    @property
    def turned_s(self) -> float:
        """When the loop last made a turn; the current time while the loop waits for etcd."""
        return self._clock() if self._waiting else self._at
