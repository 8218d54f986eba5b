"""A lone trainer that stands still is told of by itself, with where its threads are."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import pytest

from strata.client.lone_watch import Words, lone_watch
from strata.client.stall_watch import kept
from strata.errors import ConfigError
from strata.testing import virtual_time
from strata.v1.members_pb2 import RankProgress


def test_a_lone_trainer_that_stands_still_is_reported_with_its_stack(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="strata.client")
    told: list[RankProgress] = []

    def tell(generation: int, ranks: Sequence[RankProgress]) -> None:
        assert generation == 3
        told.extend(ranks)

    async def stands_still() -> None:
        watch = lone_watch(tell, detect_s=2.0, environment={"STRATA_RUN_STALL_LIMITS": "step=6"})
        watch.watch(3)
        watching = asyncio.create_task(kept(watch.run, Words()))
        watch.hear(3, [RankProgress(rank=0, step=7, phase="step")])
        await asyncio.sleep(10)
        (stalled,) = (each for each in told if each.stalled_ms)
        assert (stalled.rank, stalled.step, stalled.phase) == (0, 7, "step")
        assert "most recent call first" in stalled.stack
        assert "rank.stalled: rank = 0, generation = 3, step = 7" in caplog.text
        watch.hear(3, [RankProgress(rank=0, step=8, phase="step")])
        assert "rank.moves_again" in caplog.text
        watching.cancel()

    virtual_time.run(stands_still())


def test_limits_that_are_none_are_refused() -> None:
    with pytest.raises(ConfigError, match="no limit of a phase"):
        lone_watch(lambda *_: None, detect_s=2.0, environment={"STRATA_RUN_STALL_LIMITS": "six"})
