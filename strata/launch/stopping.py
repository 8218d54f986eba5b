"""What somebody asked of a supervisor: to stop, by which signal, and how urgently."""

from __future__ import annotations

import asyncio
import signal

PREEMPT_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopRequest:
    """At first nobody asked; the first signal says why, and a second one that it is urgent."""

    def __init__(self) -> None:
        self.number = 0
        self._heard: set[int] = set()
        self.asked = asyncio.Event()
        self.urgent = asyncio.Event()

    def ask(self, number: int) -> None:
        """Take note of a signal. SIGTERM after SIGUSR1 is no second one: a scheduler that warned means it."""
        if self._heard and (number in self._heard or self._heard != {signal.SIGUSR1}):
            self.urgent.set()
        self._heard.add(number)
        self.number = self.number or number
        self.asked.set()

    @property
    def next_signal(self) -> asyncio.Event:
        """What is set when somebody asks again, or asks at all if nobody has: who leaves anyhow hurries then."""
        return self.urgent if self.asked.is_set() else self.asked

    @property
    def preempts(self) -> bool:
        """Whether all ranks of the job are to stop together because of that signal."""
        return self.number in PREEMPT_SIGNALS

    @property
    def signal_name(self) -> str:
        """The name of the signal that asked first."""
        return signal.Signals(self.number).name
