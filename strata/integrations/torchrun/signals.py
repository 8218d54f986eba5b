"""A scheduler's SIGTERM or SIGUSR1 to torchrun's agent makes ranks stop together, if they can.

torchrun itself hands SIGTERM on to its workers and goes, and dies of SIGUSR1. Where all workers of this
agent heed notices (they use `strata.init`), the coordinators are asked instead; the workers save a common
step and end with 75, and so does the agent. A second signal, a wait that is too long, or nobody who could
be asked: then torchrun does what it always does. SIGTERM after SIGUSR1 is no second one: a scheduler
warns by one and means it by the other.

Its handler is set anew with each start of workers, so ours is looked after whenever the agent asks
whether others wait, which it does in the main thread and all the time.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from strata.observe import get_logger

log = get_logger()


class AgentSignals:
    """Calls `asked(name)` for the first signal in a generation; `give_up` does torchrun's for it."""

    def __init__(self, asked: Callable[[str], None]) -> None:
        self._asked = asked
        self._before: dict[int, Any] = {}
        self._heard: set[int] = set()
        self._given_up = False

    def take(self) -> None:
        """See to it that the next signal comes here. Main thread; elsewhere nothing is done."""
        if self._heard or threading.current_thread() is not threading.main_thread():
            return
        torchs = signal.getsignal(signal.SIGTERM)
        if not callable(torchs):
            return  # torchrun was told to leave it alone
        for number in (signal.SIGTERM, signal.SIGUSR1):
            now = signal.getsignal(number)
            if now not in {self._handle, signal.SIG_IGN, None}:
                self._before[number] = now
                signal.signal(number, self._handle)

    def give_back(self) -> None:
        """Let signals mean what they did, and forget what was heard. Main thread."""
        if threading.current_thread() is threading.main_thread() and self._before:
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
            self._before.clear()
            self._heard.clear()
            self._given_up = False

    def give_up(self, reason: str) -> None:
        """Let torchrun have the signal that was heard, as SIGTERM. Any thread."""
        log.warning("agent.not_stopped_together", reason=reason)
        self._given_up = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, warned = not self._heard, self._heard == {signal.SIGUSR1} and number == signal.SIGTERM
        self._heard.add(number)
        if self._given_up or not (first or warned):
            self._before[signal.SIGTERM](signal.SIGTERM, frame)
        elif first:
            self._asked(signal.Signals(number).name)
