"""Event loop lag: how late the loop runs a callback that is due."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

EVERY_S: Final = 0.25
WINDOW_S: Final = 10.0
"""How long a stall is remembered: callers run in the same loop, so they learn of a stall only after its end."""


class LoopLag:
    """Measures, while `run` runs, how much later than requested the loop wakes a task."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=int(WINDOW_S / EVERY_S))
        """Time and lag of each measurement of the last `WINDOW_S`."""

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + EVERY_S
            await asyncio.sleep(EVERY_S)
            now = loop.time()
            self.last_s = max(0.0, now - due)
            self._seen.append((now, self.last_s))

    def worst_s(self) -> float:
        """Return the longest stall of the last `WINDOW_S`, including a stall that `run` has not measured yet."""
        now = asyncio.get_running_loop().time()
        worst = max((late for at, late in self._seen if now - at <= WINDOW_S), default=0.0)
        pending = now - self._seen[-1][0] - EVERY_S if self._seen else 0.0
        return max(worst, pending)
