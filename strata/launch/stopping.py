"""What somebody asked of a supervisor: to stop, by which signal, and how urgently."""

from __future__ import annotations

import asyncio
import signal


class StopRequest:
    """At first nobody asked; the first signal says why, and a second one that it is urgent."""

    def __init__(self) -> None:
        self.number = 0
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def ask(self, number: int) -> None:
        """Take note of a signal."""
        if self.asked.is_set():
            self.urgent.set()
        self.number = self.number or number
        self.asked.set()

    @property
    def signal_name(self) -> str:
        """The name of the signal that asked first."""
        return signal.Signals(self.number).name
