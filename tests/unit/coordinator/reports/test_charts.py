"""Each replica records the charts of every job, and a replica that starts gets the earlier values from its peers."""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Iterator

import pytest

from strata.coordinator.reports.charts import MESSAGE_VALUES, Charts, JobCharts
from strata.coordinator.reports.progress import Reported
from strata.core.health.history import INTERVALS, Excerpt
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import JobSpec, encode
from strata.core.kv.txn import Event, KeyValue
from strata.core.kv.view import View
from strata.v1.members_pb2 import RankProgress, TrainingReport
from strata.v1.peers_pb2 import PeerHistory
from strata.v1.session_pb2 import Progress
from tests.not_none import not_none
from tests.unit.coordinator.rig import now
from tests.unit.coordinator.serving_rig import Cluster, Member, in_world


def tell(members: list[Member], step: int) -> None:
    """Let every rank report a step, and rank 0 the progress of the training."""
    for rank, member in enumerate(members):
        report = RankProgress(rank=rank, step=step, phase="step", step_us=100_000 * (rank + 1))
        if rank == 0:
            report.training.CopyFrom(
                TrainingReport(
                    samples=8 * step,
                    target_step=100,
                    reported={"loss": 1 / (1 + step), "not a name": 1.0, "bad": math.nan},
                    goodput_s={"step": 0.9 * step, "save": 0.1 * step},
                )
            )
        member.send(progress=Progress(generation=1, ranks=[report]))


async def train(members: list[Member], first: int, steps: int) -> None:
    for step in range(first, first + steps):
        tell(members, step)
        await asyncio.sleep(1)


def series(c: Cluster, replica: str, name: str, interval_s: int = 1) -> list[float]:
    charts = c[replica].context.charts.job("job")
    if charts is None:
        return []
    now_s = int(now()) + 1
    found = charts.history.excerpt(interval_s, 0, now_s).series.get(name, ())
    return [value for value in found if not math.isnan(value)]


@in_world("r1", "r2", members=2)
async def test_every_replica_records_the_reports_of_all_ranks(c: Cluster, members: list[Member]) -> None:
    await train(members, 1, 40)
    for name in ("r1", "r2", "r3"):
        steps = series(c, name, "step")
        assert len(steps) > 35, name
        assert steps == sorted(steps)
        assert 0.8 < series(c, name, "steps_per_s")[-1] < 1.2
        assert 6 < series(c, name, "samples_per_s")[-1] < 10
        assert series(c, name, "reported.loss")[-1] < 0.03
        assert series(c, name, "reported.bad") == [] == series(c, name, "reported.not a name")
        assert series(c, name, "step_time_p50")[-1] == pytest.approx(0.1)
        assert abs(series(c, name, "goodput")[-1] - 0.9) < 0.05
        assert len(series(c, name, "step", 15)) in (1, 2, 3)
        charts = not_none(c[name].context.charts.job("job"))
        assert charts.training is not None
        assert charts.training.target_step == 100
        account = not_none(charts.goodput(now()))
        assert abs(account.total_s - sum(account.spent_s.values())) < 1e-6


@in_world("r1", "r2", members=2)
async def test_a_restarted_replica_learns_the_recorded_history_from_its_peers(
    c: Cluster, members: list[Member]
) -> None:
    await train(members, 1, 60)
    before = series(c, "r1", "step")
    c["r3"].kill()
    await asyncio.sleep(1)
    c.add("r3")
    await train(members, 61, 10)
    learned = series(c, "r3", "step")
    assert [value for value in learned if value <= 55] == [value for value in before if value <= 55]
    assert learned[-1] > 65
    assert len(series(c, "r3", "step", 15)) >= 3


@in_world("r1", "r2", members=2)
async def test_time_without_a_rank_0_is_down(c: Cluster, members: list[Member]) -> None:
    await train(members, 1, 10)
    charts = not_none(c["r1"].context.charts.job("job"))
    now_s = now()
    lively, later = charts.goodput(now_s), charts.goodput(now_s + 100)
    assert lively is not None
    assert later is not None
    assert "down" not in lively.spent_s
    assert later.spent_s["down"] > 99
    assert later.total_s - lively.total_s == pytest.approx(100)


@pytest.mark.parametrize(("ranks", "expected"), [(1, (1, 1, 1)), (2, (1, 2, 2)), (3, (2, 3, 3))])
def test_the_slowest_rank_of_a_small_world_is_its_99th_percentile(
    ranks: int, expected: tuple[int, ...]
) -> None:
    charts = JobCharts()
    reports = {
        rank: Reported(step=1, phase="step", at=0.0, step_us=1_000_000 * (ranks - rank))
        for rank in range(ranks)
    }
    charts.take(1, ranks, reports, 0.0, 1_700_000_000)
    found = charts.history.excerpt(1, 0, 1_700_000_001).series
    assert tuple(found[f"step_time_p{percent}"][-1] for percent in (50, 90, 99)) == expected


def recording(unix_s: int) -> Charts:
    """Return the charts of a replica that started at `unix_s` and sees one job."""
    view, keys = View(), ClusterKeys("default")
    spec = KeyValue(
        key=keys.job("job").spec, value=encode(JobSpec(min_workers=1, max_workers=1)), create_revision=1, mod_revision=1, version=1
    )  # fmt: skip
    view.apply(1, (Event(kv=spec),))
    return Charts(view, keys, unix_now=lambda: unix_s)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Run the test without the collector, which would search the millions of objects that other tests have left."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("uncollected")
def test_a_day_of_history_is_sent_without_blocking_the_event_loop() -> None:
    """The time is CPU time of this thread, so that other processes of the machine do not count."""
    unix_s, names = 1_700_000_010 // 15 * 15, [f"reported.x{number}" for number in range(64)]
    theirs, ours = recording(unix_s), recording(unix_s)
    theirs.round_ended("job", 1.0)
    recorded = not_none(theirs.job("job"))
    for interval_s, kept in INTERVALS.items():
        values = [float(number) for number in range(kept)]
        day = Excerpt(
            interval_s=interval_s, from_unix_s=unix_s - interval_s * kept, series=dict.fromkeys(names, values)
        )
        recorded.history.fill(day, before_s=unix_s)
    longest_s, letters = 0.0, theirs.before(unix_s)
    while True:
        began_s = time.thread_time()
        letter = next(letters, None)
        reported_s = time.thread_time()
        longest_s = max(longest_s, reported_s - began_s)
        if letter is None:
            break
        ours.learn(PeerHistory.FromString(letter.SerializeToString()))
        longest_s = max(longest_s, time.thread_time() - reported_s)
        assert sum(len(series.values) for series in letter.series) <= MESSAGE_VALUES
    learned = not_none(ours.job("job"))
    for interval_s in INTERVALS:
        assert learned.history.excerpt(interval_s, 0, unix_s) == recorded.history.excerpt(
            interval_s, 0, unix_s
        )
    assert longest_s < 0.05, f"{1000 * longest_s:.0f} ms at once"
