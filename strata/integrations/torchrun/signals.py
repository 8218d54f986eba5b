"""A scheduler's SIGTERM to torchrun's agent makes all ranks stop together, if they can.

torchrun itself hands it on to its workers and goes. Where all workers of this agent heed notices
(they use `strata.init`), the coordinators are asked instead; the workers save a common step and
end with 75, and so does the agent. A second signal, a wait that is too long, or nobody who could
be asked: then torchrun does what it always does.

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
    """Calls `asked(number)` for the first SIGTERM in a generation; `give_up` does torchrun's for it."""

    def __init__(self, asked: Callable[[str], None]) -> None:
        self._asked = asked
        self._torchs: Any = None
        self._heard = False

    def take(self) -> None:
        """See to it that the next SIGTERM comes here. Main thread; elsewhere nothing is done."""
        if self._heard or threading.current_thread() is not threading.main_thread():
            return
        now = signal.getsignal(signal.SIGTERM)
        if callable(now) and now != self._handle:  # else torchrun was told to leave it alone
            self._torchs = now
            signal.signal(signal.SIGTERM, self._handle)

    def give_back(self) -> None:
        """Let signals mean what they did, and forget the one that was heard. Main thread."""
        if threading.current_thread() is threading.main_thread() and self._torchs is not None:
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._torchs)
            self._torchs = None
            self._heard = False

    def give_up(self, reason: str) -> None:
        """Let torchrun have the signal that was heard. Any thread."""
        log.warning("agent.not_stopped_together", reason=reason)
        os.kill(os.getpid(), signal.SIGTERM)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._heard:
            self._torchs(number, frame)
            return
        self._heard = True
        self._asked(signal.Signals(number).name)
