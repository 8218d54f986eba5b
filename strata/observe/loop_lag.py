"""How late an event loop is: what everything on it waits for before it even begins."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

EVERY_S: Final = 0.25
WINDOW_S: Final = 10.0
"""For how long a stall is remembered: whoever asks can do so only after it is over."""


class LoopLag:
    """Measures how much later than asked the loop wakes it. `run` does the measuring."""

    def __init__(self) -> None:
        self.last_s = 0.0
        self._seen: deque[tuple[float, float]] = deque(maxlen=int(WINDOW_S / EVERY_S))
        """When, and how late, of the last `WINDOW_S`."""

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
        """Return the longest stall of the last `WINDOW_S`, one that is not over yet included."""
        now = asyncio.get_running_loop().time()
        worst = max((late for at, late in self._seen if now - at <= WINDOW_S), default=0.0)
        pending = now - self._seen[-1][0] - EVERY_S if self._seen else 0.0
        return max(worst, pending)
