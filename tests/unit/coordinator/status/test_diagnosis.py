"""A replica's diagnosis of stalled ranks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import pytest

from strata.coordinator.status.diagnosis import diagnose_job
from strata.core.barriers.arrivals import BarrierKey, OpenRound
from strata.core.checkpoints.lifecycle import COMPARE_BARRIER
from strata.v1.members_pb2 import MemberDevices, RankProgress
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import Job


class Received:
    """Reports of two stalled ranks, of which rank 0 has arrived at a barrier."""

    def __init__(self, barrier: str, generation: int) -> None:
        self.round = OpenRound(BarrierKey("job", barrier, generation, 1), (), 2)
        self.round.arrived[0] = b""

    def open_rounds(self, job: str) -> Iterator[OpenRound]:
        yield self.round

    def progress(self, job: str, generation: int, ranks: Iterable[int]) -> list[RankProgress]:
        return [RankProgress(rank=rank, step=5, age_ms=60_000, stalled_ms=60_000) for rank in (0, 1)]

    def devices(self, job: str) -> Iterator[MemberDevices]:
        return iter(())

    def violations(self, job: str) -> Sequence[str]:
        return ()


@pytest.mark.parametrize(("barrier", "suspects"), [("epoch", (1,)), (COMPARE_BARRIER, (0, 1))])
def test_a_rank_in_the_background_compare_barrier_does_not_count_as_waiting(
    barrier: str, suspects: tuple[int, ...]
) -> None:
    job = Job(a=1, b=1).store.job()
    found = diagnose_job(Received(barrier, not_none(job.head()).record.generation), job)
    assert found.suspects == suspects
