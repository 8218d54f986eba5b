"""`/metrics` in the Prometheus format: the replica's counters, and gauges read from the replica's view at the scrape.

Gauges have no state between scrapes: once a key is removed from the keyspace, the next answer has no series for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from strata.core.job import JobView, job_names
from strata.core.leadership.coordinators import unreachable
from strata.dashboard.choosing import shown_jobs
from strata.dashboard.job_families import job_families
from strata.dashboard.source import Source
from strata.errors import StrataError
from strata.observe.metrics import Counter, Family, Histogram

Samples = Iterable[tuple[tuple[str, ...], float]]
Read = Callable[[Source, Sequence[str]], Samples]
"""Samples of a gauge, from the replica and the names of the jobs that are shown."""


class _Gauge:
    """A gauge and the function that reads its values."""

    def __init__(self, name: str, says: str, read: Read, *, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.says = says
        self.labels = labels
        self.read = read

    def collect(self, source: Source, jobs: Sequence[str]) -> Metric:
        metric = GaugeMetricFamily(self.name, self.says, labels=self.labels)
        for values, value in self.read(source, jobs):
            metric.add_metric(values, value)
        return metric


def _one(read: Callable[[Source], float]) -> Read:
    return lambda source, _jobs: (((), float(read(source))),)


def _jobs(read: Callable[[Source, JobView], float | None]) -> Read:
    """Return a reader that yields one value for each job; a job that cannot be read is left out."""

    def samples(source: Source, jobs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
        for name in jobs:
            try:
                value = read(source, JobView(source.view, source.keys.job(name)))
            except StrataError:  # somebody wrote the record or the name by hand
                continue
            if value is not None:
                yield (name,), float(value)

    return samples


def _size(_source: Source, job: JobView) -> float:
    head = job.head()
    return head.record.size if head is not None else 0


def _generation(_source: Source, job: JobView) -> float:
    head = job.head()
    return head.record.generation if head is not None else 0


def _latest(_source: Source, job: JobView) -> float | None:
    latest = job.latest()
    return latest.record.step if latest is not None else None


def _open(source: Source, job: JobView) -> float:
    return sum(1 for _ in source.soft.open_rounds(job.keys.name))


def _phases(source: Source, jobs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name in jobs:
        try:
            phase = JobView(source.view, source.keys.job(name)).phase()
        except StrataError:  # somebody wrote the record or the name by hand
            continue
        yield (name, phase.value), 1.0


def _etcd(read: Callable[..., float]) -> Read:
    return lambda source, _jobs: [((m.endpoint,), float(read(m))) for m in source.etcd_members()]


def _replicas_ready(source: Source, _jobs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    for state in source.replicas():
        yield (state.entry.name,), float(state.ready)
    for name in unreachable(source.view, source.keys):
        yield (name,), 0.0


def _replicas_unreachable_s(source: Source, _jobs: Sequence[str]) -> Iterator[tuple[tuple[str, ...], float]]:
    for name, record in unreachable(source.view, source.keys).items():
        since_s = record.unreachable_since_unix_ms / 1000
        yield (name,), max(0.0, source.unix_now() - since_s) if since_s else 0.0


GAUGES: Final = (
    _Gauge(
        "strata_build_info",
        "Always 1; the labels identify the replica.",
        lambda s, _jobs: [((s.keys.cluster, s.replica, s.version), 1.0)],
        labels=("cluster", "replica", "version"),
    ),
    _Gauge(
        "strata_is_leader", "1 while this replica may act as leader.", _one(lambda s: s.epoch() is not None)
    ),
    _Gauge(
        "strata_leader_epoch",
        "The leader's epoch, as this replica sees it; 0 without a leader.",
        _one(lambda s: held.create_revision if (held := s.leader()) is not None else 0),
    ),
    _Gauge(
        "strata_ready",
        "1 while members may be sent to this replica and etcd takes writes.",
        _one(lambda s: s.is_ready()[0]),
    ),
    _Gauge(
        "strata_writable",
        "0 while nothing can be written, at any replica: etcd's quota is used up, or it has no leader.",
        _one(lambda s: not s.outage()),
    ),
    _Gauge(
        "strata_sessions",
        "Members and clients that this replica serves.",
        _one(lambda s: s.soft.session_count()),
    ),
    _Gauge(
        "strata_connections",
        "Connections that are open at this replica's ports.",
        lambda s, _jobs: [((port,), float(count)) for port, count in s.connections.open.items()],
        labels=("port",),
    ),
    _Gauge(
        "strata_peers_ready",
        "Other replicas that reported within the last second that they are ready.",
        _one(lambda s: len(s.soft.ready_peers())),
    ),
    _Gauge(
        "strata_replicas",
        "Registered replicas, this one included.",
        _one(lambda s: len(s.view.names(s.keys.replicas))),
    ),
    _Gauge(
        "strata_replica_ready",
        "1 for a replica that is ready as this one sees it, 0 for another; removed once an operator has forgotten it.",
        _replicas_ready,
        labels=("replica",),
    ),
    _Gauge(
        "strata_replica_unreachable_seconds",
        "For how long a lost replica has not been registered; without a sample for a registered one.",
        _replicas_unreachable_s,
        labels=("replica",),
    ),
    _Gauge("strata_jobs", "Jobs in the keyspace.", _one(lambda s: len(job_names(s.view, s.keys)))),
    _Gauge("strata_job_phase", "1 for the phase that the job is in.", _phases, labels=("job", "phase")),
    _Gauge(
        "strata_job_members",
        "Registered members of the job, standbys included.",
        _jobs(lambda _s, job: len(job.view.names(job.keys.workers))),
        labels=("job",),
    ),
    _Gauge("strata_job_world_size", "Ranks of the job's current generation.", _jobs(_size), labels=("job",)),
    _Gauge("strata_job_generation", "The job's current generation.", _jobs(_generation), labels=("job",)),
    _Gauge(
        "strata_job_open_barriers",
        "Rounds of barriers that are open as far as this replica knows.",
        _jobs(_open),
        labels=("job",),
    ),
    _Gauge(
        "strata_job_latest_step",
        "Step of the job's latest committed checkpoint.",
        _jobs(_latest),
        labels=("job",),
    ),
    _Gauge(
        "strata_view_revision",
        "The etcd revision that this replica's view is at.",
        _one(lambda s: s.view.revision),
    ),
    _Gauge(
        "strata_watch_lag_revisions",
        "Revisions that an answer of etcd has named and the watch has not delivered yet. Where etcd serves"
        " others as well, theirs count too.",
        _one(lambda s: max(0, s.etcd_revision() - s.view.revision)),
    ),
    _Gauge(
        "strata_etcd_silence_seconds",
        "Since etcd last answered anything; above 2 the replica is not ready.",
        _one(lambda s: s.etcd_silence_s()),
    ),
    _Gauge(
        "strata_etcd_member_healthy",
        "1 for an etcd member that answers, knows a leader and reports no error.",
        _etcd(lambda m: m.healthy),
        labels=("endpoint",),
    ),
    _Gauge(
        "strata_etcd_member_db_size_bytes",
        "Size of an etcd member's database.",
        _etcd(lambda m: m.db_size_bytes),
        labels=("endpoint",),
    ),
    _Gauge(
        "strata_event_loop_lag_seconds",
        "How late the event loop was when last measured, four times a second.",
        _one(lambda s: s.loop_lag_s()[0]),
    ),
    _Gauge(
        "strata_event_loop_lag_max_seconds",
        "The longest stall of the event loop within the last ten seconds.",
        _one(lambda s: s.loop_lag_s()[1]),
    ),
)


class Exposition:
    """Answers scrapes of one replica, in the format that the scraper requests."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._process = CollectorRegistry(auto_describe=False)
        ProcessCollector(registry=self._process)
        PlatformCollector(registry=self._process)

    async def answer(self, accept: str) -> tuple[bytes, str]:
        """Return the body and its content type.

        A cluster may have ten thousand members, and the same event loop serves barriers. So this coroutine yields to
        the loop after each family and each job, and a thread renders the text.
        """
        metrics: list[Metric] = []
        for metric in self._collect():
            if metric is not None:
                metrics.append(metric)
            await asyncio.sleep(0)
        encode, content_type = choose_encoder(accept)

        def text() -> bytes:
            try:
                return encode(_Collected(metrics))
            finally:
                while (
                    metrics
                ):  # pop one at a time: freeing a hundred thousand samples together would block the loop
                    metrics.pop()

        return await asyncio.to_thread(text), content_type

    def _collect(self) -> Iterator[Metric | None]:
        jobs = shown_jobs(self._source.view, self._source.keys)
        for gauge in GAUGES:
            yield gauge.collect(self._source, jobs)
        yield from job_families(self._source, jobs)
        yield CounterMetricFamily(
            "strata_audit_differences",
            "Keys that an audit found different in etcd and in the view: an event was lost. Must stay 0.",
            value=self._source.audit_differences(),
        )
        for family in (*self._source.measures.families(), self._source.connections.closed):
            yield _metric(family)
        yield from self._process.collect()


class _Collected(CollectorRegistry):
    """Collected metrics, in the form of a registry that an encoder accepts."""

    def __init__(self, metrics: Sequence[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        yield from self._metrics


def _metric(family: Family[Counter] | Family[Histogram]) -> Metric:
    counter = CounterMetricFamily(family.name, family.says, labels=family.labels)
    histogram = HistogramMetricFamily(family.name, family.says, labels=family.labels)
    for values, child in family.children.items():
        if isinstance(child, Counter):
            counter.add_metric(values, child.value)
            continue
        buckets = [("+Inf" if math.isinf(bound) else str(bound), count) for bound, count in child.cumulated()]
        histogram.add_metric(values, buckets, child.sum)
    return counter if family.kind is Counter else histogram
