"""The charts of each job: recorded once a second from the ranks' reports, at every replica.

Every replica receives the reports of all ranks (`reports.progress`) and records for itself, so the loss of a replica
loses no history. A replica that starts requests the earlier history from its peers (`PeerHistory`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from strata.coordinator.measures import ROUND_BOUNDS_S
from strata.coordinator.reports.progress import ProgressBoard, Reported
from strata.core.health.goodput import DOWN, STEP, Goodput
from strata.core.health.history import (
    INTERVALS,
    SERIES_BYTES,
    Excerpt,
    Heat,
    JobHistory,
    Kind,
    Pace,
    percentile,
)
from strata.core.health.reported import MAX_NAMES
from strata.core.health.stalls import kind_of
from strata.core.job import JobView
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import JobPhase, Phase, PoisonRecord
from strata.core.kv.view import View
from strata.observe import get_logger
from strata.observe.metrics import Histogram
from strata.v1.members_pb2 import TrainingReport
from strata.v1.peers_pb2 import HistorySeries, PeerHistory

log = get_logger()

SAMPLE_S: Final = 1.0
FRESH_S: Final = 5.0
"""A job whose generation has not run for longer than this is down."""
MAX_SERIES: Final = (128 << 20) // SERIES_BYTES
"""The limit for all jobs together. Above three quarters of the limit, the longest-idle job loses its history. At the
limit, no series is added."""
IDLE_S: Final = 60
NOT_YET: Final = frozenset({"restore", "join", "begin", "start"})
"""The phases in which a rank has no meaningful step yet."""
LEARN_S: Final = 60.0
"""For this long after its start a replica requests the earlier history from its peers."""
MESSAGE_VALUES: Final = 20_000
"""Values in one message to a peer: 80 kB. The peer's event loop serves nobody else while it stores a message."""
SEND_PAUSE_S: Final = 0.02
MAX_NAME_CHARS: Final = 96

GOODPUT_PREFIX: Final = "goodput."
REPORTED_PREFIX: Final = "reported."
KINDS: Final[Mapping[str, Kind]] = {
    "step": Kind.LAST,
    "ranks": Kind.LAST,
    "steps_per_s": Kind.MEAN,
    "samples_per_s": Kind.MEAN,
    "step_time_p50": Kind.MEAN,
    "step_time_p90": Kind.MEAN,
    "step_time_p99": Kind.MAX,
    "save_s": Kind.SUM,
    "commit_s": Kind.MAX,
    "goodput": Kind.LAST,
}
UNITS: Final[Mapping[str, str]] = {
    "step": "",
    "ranks": "",
    "steps_per_s": "1/s",
    "samples_per_s": "1/s",
    "goodput": "ratio",
}
"""All other series are in seconds, except the series that programs report."""


def series_kind(name: str) -> Kind:
    """Return how several values of a series in one interval are combined."""
    return KINDS.get(name, Kind.LAST if name.startswith(GOODPUT_PREFIX) else Kind.MEAN)


def series_unit(name: str) -> str:
    """Return the unit of a series; an empty string for numbers without one."""
    return "" if name.startswith(REPORTED_PREFIX) else UNITS.get(name, "s")


class JobCharts:
    """The charts of one job, and the state of its training as a whole."""

    def __init__(self) -> None:
        self.history = JobHistory()
        self.heat = Heat(0, 0)
        self.steps, self.samples = Pace(), Pace()
        self.rounds = Histogram(ROUND_BOUNDS_S)
        self.training: TrainingReport | None = None
        self._account: Goodput | None = None
        self._account_s = 0.0
        """When rank 0 reported the account, on the loop's clock."""
        self._phase = DOWN
        self._ran_s = 0.0
        """When the job's generation was last seen running."""
        self._generation = 0
        self.full = False
        """Whether no series may be added."""
        self._saved_s: float | None = None
        self._seen: dict[int, float] = {}
        """When each rank's report in the heat map was made."""

    def goodput(self, now_s: float, *, over: bool = False) -> Goodput | None:
        """Return the use of wall time up to now, or up to the end of a job that is `over`; None if unknown."""
        if self._account is None:
            return None
        ran_s = max(0.0, self._ran_s - self._account_s)
        found = self._account.after(ran_s, self._phase)
        down_s = now_s - max(self._ran_s, self._account_s)
        if over or down_s <= 0:
            return found
        return found.after(down_s, DOWN if down_s >= FRESH_S else self._phase)

    def samples_per_s(self, now_s: float) -> float | None:
        """Return the samples a second that the running generation uses; None if no generation runs or no samples
        are reported.
        """
        if self.training is None or not self.training.samples or now_s - self._ran_s > FRESH_S:
            return None
        return self.samples.per_s(now_s)

    def _put(self, second: int, name: str, value: float) -> None:
        if name in self.history.names or not self.full:
            self.history.put(second, name, value, series_kind(name))

    def take(
        self, generation: int, size: int, reports: Mapping[int, Reported], now_s: float, second: int
    ) -> None:
        """Record one second of a running generation."""
        self._ran_s = now_s
        if generation != self._generation:
            self._generation, self.steps, self.samples = generation, Pace(), Pace()
        last = min(reports.values(), key=lambda report: report.step)
        if kind_of(last.phase) not in NOT_YET:
            self.steps.note(now_s, last.step)
            self._put(second, "step", last.step)
        self._put(second, "ranks", len(reports))
        rate = self.steps.per_s(now_s)
        if rate is not None:
            self._put(second, "steps_per_s", rate)
        times = sorted(report.step_us for report in reports.values() if report.step_us > 0)
        for percent in (50, 90, 99) if times else ():
            self._put(second, f"step_time_p{percent}", percentile(times, percent) / 1e6)
        self._heat(generation, size, reports, second)
        if (first := reports.get(0)) is not None and first.training is not None:
            self._take_training(first, first.training, now_s, second)

    def _heat(self, generation: int, size: int, reports: Mapping[int, Reported], second: int) -> None:
        if (self.heat.generation, self.heat.ranks) != (generation, size):
            self.heat, self._seen = Heat(generation, size), {}
        for rank, report in reports.items():
            step_us = report.times.compute_us if report.times is not None else report.step_us
            if step_us > 0 and self._seen.get(rank) != report.at:
                self._seen[rank] = report.at
                self.heat.put(second, rank, step_us)

    def _take_training(self, first: Reported, report: TrainingReport, now_s: float, second: int) -> None:
        self.training = report
        if kind_of(first.phase) not in NOT_YET:
            self.samples.note(now_s, report.samples)
        rate = self.samples.per_s(now_s)
        if rate is not None and report.samples:
            self._put(second, "samples_per_s", rate)
        known = sum(name.startswith(REPORTED_PREFIX) for name in self.history.names)
        for name, value in report.reported.items():
            series = f"{REPORTED_PREFIX}{name}"
            if series in self.history.names or known < MAX_NAMES:
                known += series not in self.history.names
                self._put(second, series, value)
        if not report.goodput_s:
            return
        self._account, self._account_s = Goodput(spent_s=dict(report.goodput_s)), first.at
        self._phase = kind_of(first.phase) or STEP
        now = self.goodput(now_s) or self._account
        self._put(second, "goodput", now.ratio)
        for cause, seconds in now.spent_s.items():
            self._put(second, f"{GOODPUT_PREFIX}{cause}", seconds)
        saved_s, before_s = now.spent_s.get("save", 0.0), self._saved_s
        self._saved_s = saved_s
        if before_s is not None and saved_s > before_s:
            self._put(second, "save_s", saved_s - before_s)


class Charts:
    """The charts of all jobs. `run` records the ranks' reports."""

    def __init__(self, view: View, keys: ClusterKeys, *, unix_now: Callable[[], float]) -> None:
        self._view = view
        self._keys = keys
        self._unix_now = unix_now
        self._jobs: dict[str, JobCharts] = {}
        self._since_s = int(unix_now()) + 1
        """The first second that this replica recorded."""
        self._full = False

    def job(self, name: str) -> JobCharts | None:
        """Return the charts of a job, or None if nothing was recorded."""
        return self._jobs.get(name)

    async def run(self, board: ProgressBoard) -> None:
        """Record once a second, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(SAMPLE_S)
            self.sample(board, loop.time())

    def sample(self, board: ProgressBoard, now_s: float) -> None:
        """Record the last second of each running job."""
        second = int(self._unix_now())
        for name in board.jobs():
            generation, reports = board.reported(name)
            size = self._running(name, generation) if reports else 0
            if size:
                charts = self._charts(name)
                charts.full = self._full
                charts.take(generation, size, reports, now_s, second)
        self._bound(second)

    def _running(self, name: str, generation: int) -> int:
        """Return the size of the generation if it is the job's current one and the job runs; else 0."""
        try:
            job = JobView(self._view, self._keys.job(name))
            head, phase = job.head(), self._view.record(job.keys.phase, JobPhase)
        except PoisonRecord:
            return 0
        if (
            head is None
            or head.record.generation != generation
            or (phase and phase.phase is not Phase.RUNNING)
        ):
            return 0
        return head.record.size

    def _exists(self, name: str) -> bool:
        return JobView(self._view, self._keys.job(name)).exists

    def _charts(self, name: str) -> JobCharts:
        return self._jobs.setdefault(name, JobCharts())

    def _bound(self, second: int) -> None:
        """Drop deleted jobs, then the longest-idle jobs while there are too many series."""
        for name in [name for name in self._jobs if not self._exists(name)]:
            del self._jobs[name]
        count = sum(len(each.history.names) for each in self._jobs.values())
        while count > MAX_SERIES * 3 // 4:
            name, idle = min(self._jobs.items(), key=lambda each: each[1].history.newest_s)
            if idle.history.newest_s > second - IDLE_S:
                break
            count -= len(idle.history.names)
            del self._jobs[name]
        full = count >= MAX_SERIES
        if full and not self._full:
            log.warning("history_full", series=MAX_SERIES, hint="new jobs and new names have no charts")
        self._full = full

    # -- barriers and saves

    def round_ended(self, job: str, seconds: float) -> None:
        """Record how long a round of a barrier was open."""
        self._charts(job).rounds.observe(seconds)

    def committed(self, job: str, seconds: float) -> None:
        """Record how long a checkpoint took to be committed."""
        second = int(self._unix_now())
        self._charts(job).history.put(second, "commit_s", seconds, series_kind("commit_s"))

    # -- between replicas

    def history_since_s(self) -> int:
        """Return the second before which peers should send their history; 0 once the start is `LEARN_S` ago."""
        return self._since_s if self._unix_now() - self._since_s < LEARN_S else 0

    def before(self, second: int) -> Iterator[PeerHistory]:
        """Yield the history recorded before `second`, in messages of bounded size."""
        for name, charts in list(self._jobs.items()):
            series = list(charts.history.names)
            for interval_s, kept in INTERVALS.items():
                count = MESSAGE_VALUES // kept
                for start in range(0, len(series), count):
                    names = series[start : start + count]
                    found = charts.history.excerpt(interval_s, 0, second, names=names)
                    message = _message(name, found)
                    if message.series:
                        yield message

    def learn(self, received: PeerHistory) -> None:
        """Store a peer's history from before this replica began to record."""
        if not self._exists(received.job) or received.interval_s not in INTERVALS:
            return
        series = {
            each.name: each.values
            for each in received.series
            if len(each.name) <= MAX_NAME_CHARS and len(each.values) <= INTERVALS[received.interval_s]
        }
        excerpt = Excerpt(interval_s=received.interval_s, from_unix_s=received.from_unix_s, series=series)
        self._charts(received.job).history.fill(excerpt, before_s=self._since_s)
        self._bound(int(self._unix_now()))


def _message(job: str, found: Excerpt) -> PeerHistory:
    message = PeerHistory(job=job, interval_s=found.interval_s, from_unix_s=found.from_unix_s)
    for name, values in found.series.items():
        if any(map(math.isfinite, values)):
            message.series.append(HistorySeries(name=name, values=values))
    return message
