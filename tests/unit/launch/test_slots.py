"""Warm processes for the next generation are available, even if some ended meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

from strata.launch.ranks import Program
from strata.launch.slots import LASTING_S, RENEW_S, RENEWALS, Slots
from strata.launch.warm.starting import Started
from strata.testing.virtual_time import in_virtual_time


class Waiting:
    """A starter whose processes wait until the test ends them."""

    def __init__(self) -> None:
        self.count = 0
        self.started = 0

    def start(self, environment: Mapping[str, str], *, name: str) -> Started:
        raise AssertionError("nothing is started here")

    def prepare(self, count: int) -> int:
        new = count - self.count
        self.count, self.started = count, self.started + new
        return new

    def close(self) -> None:
        pass


def slots(starter: Waiting) -> Slots:
    program = Program(starter=starter, inherited={}, folder=Path())
    return Slots(program, count=2, prepare_after_s=0.0, on_exit=lambda *_: None)


@in_virtual_time()
async def test_a_warm_process_that_ends_is_replaced_before_the_next_generation() -> None:
    starter = Waiting()
    it = slots(starter)
    it.prepare(3.0)
    await asyncio.sleep(3.1)
    assert starter.count == 2
    starter.count = 1
    await asyncio.sleep(RENEW_S)
    assert (starter.count, starter.started) == (2, 3)
    it.kill()
    starter.count = 0
    await asyncio.sleep(2 * RENEW_S)
    assert starter.count == 0, "nobody waits for a generation any more"


@in_virtual_time()
async def test_a_warm_process_that_exits_at_once_is_restarted_a_few_times_only() -> None:
    starter = Waiting()
    it = slots(starter)
    for generation in (1, 2):
        it.prepare()
        for _ in range(20):
            await asyncio.sleep(RENEW_S)
            starter.count = 0
        assert starter.started == generation * 2 * (1 + RENEWALS)
    it.kill()


@in_virtual_time()
async def test_a_warm_process_that_exits_now_and_then_is_always_replaced() -> None:
    starter = Waiting()
    it = slots(starter)
    it.prepare()
    for _ in range(5 * RENEWALS):
        await asyncio.sleep(LASTING_S + RENEW_S)
        starter.count = 0
        await asyncio.sleep(RENEW_S)
        assert starter.count == 2
    it.kill()
