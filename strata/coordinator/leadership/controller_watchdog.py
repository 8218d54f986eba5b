"""The world controller's sign of life, on which the renewal of leadership depends.

To wait for etcd counts as turning: a slow etcd is no reason to give the lead to another replica
that waits for the same etcd. To be stuck anywhere else is one (PROTOCOLS 4.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Heartbeat:
    """When the loop last turned, by `clock`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._at = clock()
        self._waiting = 0

    def beat(self) -> None:
        """Say that the loop turns."""
        self._at = self._clock()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Beat for as long as the body waits for etcd."""
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
            self.beat()

    @property
    def turned_s(self) -> float:
        """When the loop last turned; now, while it waits for etcd."""
        return self._clock() if self._waiting else self._at
