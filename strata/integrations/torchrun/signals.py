"""A scheduler's SIGTERM or SIGUSR1 to torchrun's agent makes all ranks stop together, if they support it.

torchrun itself forwards SIGTERM to its workers and exits; SIGUSR1 kills it. If all workers of this agent support
graceful stop (they use `strata.init`), the agent sends a stop request to the coordinators instead. The workers save a
common step and exit with 75, and so does the agent. torchrun's own behaviour applies after a second signal, after too
long a wait, or if no coordinator takes the request. SIGTERM after SIGUSR1 does not count as a second signal: schedulers
warn by SIGUSR1 and then terminate by SIGTERM.

torchrun sets its handler again at each start of workers. So Strata's handler is reinstalled at each call of
`num_nodes_waiting`, which the agent calls continually in the main thread.
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
    """Calls `on_signal(name)` for the first signal in a generation; `give_up` hands that signal to torchrun."""

    def __init__(self, on_signal: Callable[[str], None]) -> None:
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._received: set[int] = set()
        self._given_up = False

    def take(self) -> None:
        """Install our handlers for the next signal. Main thread; does nothing in other threads."""
        if self._received or threading.current_thread() is not threading.main_thread():
            return
        torchs = signal.getsignal(signal.SIGTERM)
        if not callable(torchs):
            return  # torchrun was configured not to handle SIGTERM
        for number in (signal.SIGTERM, signal.SIGUSR1):
            now = signal.getsignal(number)
            if now not in {self._handle, signal.SIG_IGN, None}:
                self._before[number] = now
                signal.signal(number, self._handle)

    def give_back(self) -> None:
        """Restore the earlier handlers, and forget the signals received. Main thread."""
        if threading.current_thread() is threading.main_thread() and self._before:
            for number, before in self._before.items():
                if signal.getsignal(number) == self._handle:
                    signal.signal(number, before)
            self._before.clear()
            self._received.clear()
            self._given_up = False

    def give_up(self, reason: str) -> None:
        """Hand the received signal to torchrun, as SIGTERM. Any thread."""
        log.warning("agent.not_stopped_together", reason=reason)
        self._given_up = True
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, warned = not self._received, self._received == {signal.SIGUSR1} and number == signal.SIGTERM
        self._received.add(number)
        if self._given_up or not (first or warned):
            self._before[signal.SIGTERM](signal.SIGTERM, frame)
        elif first:
            self._on_signal(signal.Signals(number).name)
