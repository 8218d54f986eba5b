"""The diagnosis of a job from this replica's knowledge, for the status page, GetJob and the metrics."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from strata.core.barriers.arrivals import OpenRound
from strata.core.checkpoints.lifecycle import COMPARE_BARRIER
from strata.core.health.attribution import RankReport
from strata.core.health.findings import Device, Diagnosis, Ended, diagnose
from strata.core.health.stacks import ACTIVITIES, activity, innermost
from strata.core.health.stragglers import StepTimes
from strata.core.job import JobView, World
from strata.core.kv.records import Phase
from strata.core.stop.save_hold import SaveHold
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankProgress

DIAGNOSIS_S: Final = 0.9
"""How long a diagnosis is cached: to diagnose 1,000 ranks takes 16 ms."""


class LiveReports(Protocol):
    """The reports of ranks and members at a replica."""

    def open_rounds(self, job: str) -> Iterator[OpenRound]:
        """Yield the rounds of a job that this replica knows to be open."""
        ...

    def progress(self, job: str, generation: int, ranks: Iterable[int]) -> list[RankProgress]:
        """Return the progress of these ranks; ranks without a report are absent."""
        ...

    def devices(self, job: str) -> Iterator[MemberDevices]:
        """Yield the reported accelerators of the job's members, perhaps of departed members too."""
        ...

    def violations(self, job: str) -> Sequence[str]:
        """Return the invariants that the job's keys violate."""
        ...


class _Place(NamedTuple):
    """The place of a rank: its worker, host and slot."""

    worker: str
    host: str
    local: int
    slots: int


def diagnose_job(live: LiveReports, job: JobView) -> Diagnosis:
    """Diagnose a job's keys, and the ranks and devices of its current world."""
    world = job.world()
    if world is None:
        return diagnose((), (), live.violations(job.keys.name))
    head = world.head
    return diagnose_world(live, job, live.progress(job.keys.name, head.generation, range(head.size)), world)


class Diagnoses:
    """Cached diagnoses of jobs, each made at most once in `DIAGNOSIS_S`."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[float, Diagnosis]] = {}

    def of(self, live: LiveReports, job: JobView) -> Diagnosis:
        """Return a job's diagnosis, at most `DIAGNOSIS_S` old; `StrataError` if the job cannot be read."""
        now_s, name = asyncio.get_running_loop().time(), job.keys.name
        held = self._made.get(name)
        if held is None or now_s - held[0] >= DIAGNOSIS_S:
            self._made = {key: each for key, each in self._made.items() if now_s - each[0] < DIAGNOSIS_S}
            held = self._made[name] = (now_s, diagnose_job(live, job))
        return held[1]


def diagnose_world(
    live: LiveReports, job: JobView, reports: Iterable[RankProgress], world: World
) -> Diagnosis:
    """Diagnose a job as `diagnose_job` does, from ranks' reports that the caller already has."""
    name, generation, latest = job.keys.name, world.head.generation, job.latest()
    waiting = {
        rank
        for round_ in live.open_rounds(name)
        # a background save does not delay training
        if round_.key.generation == generation and round_.key.name != COMPARE_BARRIER
        for rank in round_.arrived
    }
    hosts = {(entry.name, entry.create_revision): entry.record.host for entry in job.workers()}
    places = {
        member.first_rank + local: _Place(
            member.worker, hosts.get((member.worker, member.incarnation), ""), local, member.slots
        )
        for member in world.members
        for local in range(member.slots)
    }
    devices = [
        (worker, device)
        for worker, device in world_devices(live, name, world)
        if device.fault or device.throttled
    ]
    throttled = {(worker, device.index): device.throttled for worker, device in devices if device.throttled}
    over = job.done(generation) | job.stopped(generation)
    host_of: dict[str, str] = {
        member.worker: hosts.get((member.worker, member.incarnation), "") for member in world.members
    }
    return diagnose(
        [
            _report(each, waiting, places, throttled)
            for each in reports
            if each.rank not in over  # a rank that is done or stopped has no work left
        ],
        [
            Device(
                worker=worker,
                index=device.index,
                fault=device.fault,
                throttled=device.throttled,
                host=host_of[worker],
            )
            for worker, device in devices
        ],
        live.violations(name),
        ended=tuple(_ended(job, world, hosts, over, places)) if job.phase() is Phase.RUNNING else (),
        committed_step=latest.record.step if latest is not None else None,
    )


def _report(
    progress: RankProgress,
    waiting: set[int],
    places: Mapping[int, _Place],
    throttled: Mapping[tuple[str, int], str],
) -> RankReport:
    place = places.get(progress.rank)
    device = None
    if throttled and place is not None and (place.worker, place.local) in throttled:
        # an agent's devices are in the order of its ranks: each rank uses the device with its local number
        device = (place.local, throttled[place.worker, place.local])
    return RankReport(
        rank=progress.rank,
        step=progress.step,
        phase=progress.phase,
        age_ms=progress.age_ms,
        stalled_ms=progress.stalled_ms,
        late_ms=progress.late_ms,
        usual_ms=progress.usual_ms,
        times=step_times(progress),
        waits=progress.rank in waiting,
        where=progress.where or (innermost(progress.stack) if progress.stack else ""),
        activity=_activity(progress),
        process=progress.process,
        worker=place.worker if place is not None else "",
        host=place.host if place is not None else "",
        throttled=device,
        trace_file=progress.trace_file,
        hold=_hold(progress),
    )


def _activity(progress: RankProgress) -> str:
    """Return what the rank is doing at its current place; an older agent sends only the stack."""
    if progress.activity in ACTIVITIES:
        return progress.activity
    return activity(progress.stack) if progress.stack and not progress.activity else ""


def step_times(reports: RankProgress) -> StepTimes | None:
    """Return a rank's step times, or None if it reports none.

    Some agents see only the intervals between steps, and report the intervals as step times. Such a report does
    not show when the times last changed, so these ranks are compared at the same step only.
    """
    if reports.HasField("step_times"):
        times = reports.step_times
        return StepTimes(
            compute_s=times.compute_us / 1e6,
            data_wait_s=times.data_wait_us / 1e6,
            median_compute_s=times.median_compute_us / 1e6,
            median_data_wait_s=times.median_data_wait_us / 1e6,
            best_compute_s=times.best_compute_us / 1e6,
            step=reports.step,
            cheaper_s=times.cheaper_us / 1e6,
            steady_steps=times.steady_steps,
            slowed_s=(times.slowed_ms + reports.age_ms) / 1000 if times.slowed_ms else 0.0,
        )
    if reports.median_step_us <= 0:
        return None
    return StepTimes(
        compute_s=reports.step_us / 1e6,
        data_wait_s=0.0,
        median_compute_s=reports.median_step_us / 1e6,
        median_data_wait_s=0.0,
        cheaper_s=reports.median_step_us / 1e6,
        step=reports.step,
        steady_steps=1,
    )


def _ended(
    job: JobView,
    world: World,
    hosts: Mapping[tuple[str, int], str],
    over: set[int],
    places: Mapping[int, _Place],
) -> Iterator[Ended]:
    """Yield this generation's failed ranks, and the ranks whose member is no longer registered."""
    generation = world.head.generation
    failed = job.failed(generation)
    for rank, record in sorted(failed.items()):
        place = places.get(rank)
        host = place.host if place is not None else ""
        yield Ended(rank=rank, worker=record.worker, host=host, reason=record.reason)
    if job.notice(generation) is not None:
        return  # members leave because of the stop notice
    for member in world.members:
        if (member.worker, member.incarnation) in hosts:
            continue
        for rank in range(member.first_rank, member.first_rank + member.slots):
            if rank not in failed and rank not in over:
                reason = f"its node {member.worker} is gone"
                yield Ended(rank=rank, worker=member.worker, host="", reason=reason, lost=True)


def _hold(progress: RankProgress) -> SaveHold | None:
    """Return why a rank cannot save, and for how long by now: the report is `age_ms` old."""
    if not progress.HasField("save_hold"):
        return None
    held = progress.save_hold
    return SaveHold(
        step=held.step, reason=held.reason, host=held.host, held_s=(held.held_ms + progress.age_ms) / 1000
    )


def world_devices(live: LiveReports, name: str, world: World) -> Iterator[tuple[str, DeviceStatus]]:
    """Yield the devices of this world's members, each with its worker."""
    here = {(member.worker, member.incarnation) for member in world.members}
    for member in live.devices(name):
        if (member.worker_id, member.incarnation) in here:
            for device in member.devices:
                yield member.worker_id, device
