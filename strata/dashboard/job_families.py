"""Metric families of jobs: members, devices, findings, training progress and goodput.

Each job is read once a scrape, however many ranks and devices it has. A job, member or device that ended or was
removed from the keyspace has no series in the next answer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Final

from prometheus_client.core import GaugeMetricFamily, Metric

from strata.coordinator.status.diagnosis import diagnose_world, world_devices
from strata.coordinator.status.job_phases import phase_of
from strata.core.job import JobView
from strata.dashboard.api.cluster import OVER
from strata.dashboard.source import Source
from strata.errors import StrataError
from strata.v1.members_pb2 import DeviceStatus

_Sample = tuple[str, tuple[str, ...], float]
"""The name of a family, the label values without the job's, and the value."""

FINDING: Final = "strata_job_finding"
MAX_FINDINGS: Final = 20
"""The limit for one job in one scrape."""
MAX_CAUSE_CHARS: Final = 64
HEARTBEAT: Final = "strata_worker_heartbeat_age_seconds"
SAMPLES: Final = "strata_job_samples"
SAMPLES_PER_S: Final = "strata_job_samples_per_second"
GOODPUT: Final = "strata_job_goodput_ratio"
SPENT: Final = "strata_job_time_seconds"


def _of_device(field: str, *, per: float = 1.0) -> Callable[[DeviceStatus], float | None]:
    return lambda device: getattr(device, field) / per if device.HasField(field) else None  # type: ignore[arg-type]  # a field's name


_DIAGNOSES: Final = (
    (
        "strata_job_stalled_ranks",
        "Ranks of the job that have stood still for longer than their phase may take.",
    ),
    (
        "strata_job_slow_ranks",
        "Ranks of the job whose steps cost at least 1.5 times as much as those of most others.",
    ),
    ("strata_job_sick_devices", "Accelerators of the job that are not to be trained on."),
    (
        "strata_job_saves_held_ranks",
        "Ranks of the job that train on and cannot save: the storage refuses for a reason that time may heal.",
    ),
    (
        "strata_job_saves_held_seconds",
        "For how long a rank of the job has not been able to save; 0 while all can.",
    ),
    (
        "strata_job_step_seconds",
        "How long a step of the job usually takes: the median of its ranks' medians.",
    ),
)
_DEVICES: Final = (
    (
        "strata_device_utilization_ratio",
        "How much of the last moments the accelerator was busy.",
        _of_device("utilization_percent", per=100),
    ),
    (
        "strata_device_memory_used_bytes",
        "Memory of the accelerator that is in use.",
        _of_device("memory_used_bytes"),
    ),
    ("strata_device_memory_bytes", "Memory that the accelerator has.", _of_device("memory_total_bytes")),
    ("strata_device_temperature_celsius", "Temperature of the accelerator.", _of_device("temperature_c")),
    ("strata_device_power_watts", "Power that the accelerator draws.", _of_device("power_mw", per=1000)),
    (
        "strata_device_ecc_uncorrected",
        "Uncorrectable memory errors of the accelerator since its driver was loaded.",
        _of_device("ecc_uncorrected"),
    ),
    (
        "strata_device_fault",
        "1 for an accelerator that is not to be trained on.",
        lambda device: float(bool(device.fault)),
    ),
)
_FAMILIES: Final[Sequence[tuple[str, str, tuple[str, ...]]]] = (
    *((name, says, ()) for name, says in _DIAGNOSES),
    (
        FINDING,
        "1 for each finding of the job; removed when it ends.",
        ("kind", "rank", "host", "device", "cause"),
    ),
    *((name, says, ("worker", "device")) for name, says, _read in _DEVICES),
    (
        HEARTBEAT,
        "Since the last message of the member; for members that this replica serves.",
        ("worker",),
    ),
    (SAMPLES, "Samples that the ranks of the job used together since its beginning.", ()),
    (SAMPLES_PER_S, "Samples that the ranks of the job use together in a second.", ()),
    (GOODPUT, "The share of the job's time that went to steps that count, from 0 to 1.", ()),
    (SPENT, "Seconds of the job's time by cause.", ("cause",)),
)


def job_families(source: Source, jobs: Sequence[str]) -> Iterator[Metric | None]:
    """Yield None after each job, so that the caller can yield to the event loop, and all families at the end."""
    families = {name: GaugeMetricFamily(name, says, labels=("job", *more)) for name, says, more in _FAMILIES}
    for job in jobs:
        for part in (_diagnosis, _devices, _heartbeats, _training):
            with contextlib.suppress(StrataError):  # somebody wrote the record or the name by hand
                for name, labels, value in part(source, JobView(source.view, source.keys.job(job))):
                    families[name].add_metric((job, *labels), value)
        yield None
    yield from families.values()


def _diagnosis(source: Source, job: JobView) -> Iterator[_Sample]:
    world = job.world()
    if world is None:
        return
    reports = source.soft.progress(job.keys.name, world.head.generation, range(world.head.size))
    found = diagnose_world(source.soft, job, reports, world)
    usual_us = [each.median_step_us for each in reports if each.median_step_us > 0]
    values = (
        len(found.stalled),
        len(found.slow),
        len(found.sick),
        len(found.held),
        found.held_s,
        median(usual_us) / 1e6 if usual_us else None,
    )
    for (name, _says), value in zip(_DIAGNOSES, values, strict=True):
        if value is not None:
            yield name, (), float(value)
    labels = (
        (
            each.kind,
            each.rank_runs,
            each.host,
            "" if each.device is None else str(each.device),
            each.cause[:MAX_CAUSE_CHARS],
        )
        for each in found.findings
    )
    for label in list(dict.fromkeys(labels))[:MAX_FINDINGS]:
        yield FINDING, label, 1.0


def _devices(source: Source, job: JobView) -> Iterator[_Sample]:
    """Yield the values that the drivers of the world's accelerators report."""
    world = job.world()
    if world is None:
        return
    for worker, device in world_devices(source.soft, job.keys.name, world):
        labels = (worker, str(device.index))
        for name, _says, read in _DEVICES:
            if (value := read(device)) is not None:
                yield name, labels, float(value)


def _heartbeats(source: Source, job: JobView) -> Iterator[_Sample]:
    for worker, age_s in source.soft.member_ages(job.keys.name):
        yield HEARTBEAT, (worker,), age_s


def _training(source: Source, job: JobView) -> Iterator[_Sample]:
    """Yield the training progress that rank 0 reported, or nothing if it reported none."""
    charts = source.charts.job(job.keys.name)
    if charts is None:
        return
    now_s = source.loop_now_ms() / 1000
    if charts.training is not None and charts.training.samples:
        yield SAMPLES, (), float(charts.training.samples)
    if (rate := charts.samples_per_s(now_s)) is not None:
        yield SAMPLES_PER_S, (), rate
    over = phase_of(source.view, source.keys, job.keys.name) in OVER
    if (account := charts.goodput(now_s, over=over)) is not None:
        yield GOODPUT, (), account.ratio
        for cause, seconds in account.spent_s.items():
            yield SPENT, (cause,), seconds
