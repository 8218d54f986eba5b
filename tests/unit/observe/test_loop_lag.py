"""The lag of the event loop, measured on a loop that is really blocked."""

from __future__ import annotations

import asyncio
import time

from strata.observe.loop_lag import EVERY_S, LoopLag


async def test_a_stall_is_seen_and_remembered() -> None:
    lag = LoopLag()
    running = asyncio.create_task(lag.run())
    try:
        await asyncio.sleep(2 * EVERY_S)  # two measurements, as a baseline
        before = lag.worst_s()
        time.sleep(0.6)  # noqa: ASYNC251  # the test must block the loop
        assert lag.worst_s() > before
        assert lag.worst_s() >= 0.3, "a stall that is not measured yet counts already"
        await asyncio.sleep(2 * EVERY_S)
        assert lag.last_s < lag.worst_s()
        assert lag.worst_s() >= 0.3
    finally:
        running.cancel()
