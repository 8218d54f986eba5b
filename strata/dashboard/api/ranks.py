"""The ranks of a job's current generation, their members and devices, and how long their steps took."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from strata.coordinator.reports.progress import Reported
from strata.coordinator.status.diagnosis import world_devices
from strata.core.health.history import HEAT_S
from strata.core.job import JobView, World
from strata.core.stop.requests import leave_notice, leave_requests
from strata.dashboard.api import model
from strata.dashboard.source import Source
from strata.v1.members_pb2 import DeviceStatus, RankLog

DONE: Final = "done"
"""The phase of a rank that ended with exit code 0; it replaces the phase that the rank reported last."""


def ranks(source: Source, name: str) -> model.Ranks:
    """Return all ranks of the current generation, and the job's members."""
    job = JobView(source.view, source.keys.job(name))
    world, now_s = job.world(), source.loop_now_ms() / 1000
    reports = _reports(source, name, world)
    source.soft.look(name, None)
    workers, owner = _workers(source, job, world, now_s)
    size = world.head.size if world is not None else 0
    by_rank = [reports.get(rank) for rank in range(size)]
    found = source.diagnosis(name).scores if world is not None else {}
    scores = [found.get(rank) for rank in range(size)]
    over = job.done(world.head.generation) if world is not None else set()
    doing = [
        DONE if rank in over else each.phase if each is not None else "" for rank, each in enumerate(by_rank)
    ]
    phases = sorted({*doing, ""})
    index = {phase: number for number, phase in enumerate(phases)}
    return model.Ranks(
        generation=world.head.generation if world is not None else 0,
        size=size,
        workers=tuple(workers),
        worker=tuple(owner.get(rank, -1) for rank in range(size)),
        step=tuple(None if each is None else each.step for each in by_rank),
        phases=tuple(phases),
        phase=tuple(index[each] for each in doing),
        last_seen_ms=tuple(None if each is None else _age_ms(each, now_s) for each in by_rank),
        stalled_ms=tuple(
            max(1, _age_ms(each, now_s)) if each is not None and each.stalled else 0 for each in by_rank
        ),
        compute_us=tuple(map(_compute_us, by_rank)),
        median_compute_us=tuple(map(_median_us, by_rank)),
        relative_score=tuple(None if each is None else each.relative for each in scores),
        own_score=tuple(None if each is None else each.own for each in scores),
    )


def rank(source: Source, name: str, number: int) -> model.Rank | None:
    """Return one rank of the current generation; None if there is no such rank."""
    job = JobView(source.view, source.keys.job(name))
    world, now_s = job.world(), source.loop_now_ms() / 1000
    if world is None or not 0 <= number < world.head.size:
        return None
    report = _reports(source, name, world).get(number)
    place = world.member_of(number)
    entry = job.worker(place.worker)
    found = source.diagnosis(name)
    score = found.scores.get(number)
    source.soft.look(name, number)
    evidence = source.soft.evidence(name, world.head.generation, number)
    return model.Rank(
        rank=number,
        worker_id=place.worker,
        host=entry.record.host if entry is not None else "",
        step=report.step if report is not None else None,
        phase=report.phase if report is not None else "",
        last_seen_ms=_age_ms(report, now_s) if report is not None else None,
        stalled_ms=max(1, _age_ms(report, now_s)) if report is not None and report.stalled else 0,
        compute_us=_compute_us(report),
        median_compute_us=_median_us(report),
        relative_score=score.relative if score is not None else None,
        own_score=score.own if score is not None else None,
        finding=found.of_rank(number),
        stack=(evidence.stack if evidence is not None else "")
        or (report.stack if report is not None else ""),
        trace_file=report.trace_file if report is not None else "",
        trace_bytes=report.trace_bytes if report is not None else 0,
        log=tuple(evidence.log) if evidence is not None else (),
        log_file=evidence.log_file if evidence is not None else None,
        log_generation=(evidence.log_generation or None) if evidence is not None else None,
        log_ended=evidence.log_ended if evidence is not None else "",
        log_before=_log(evidence.before) if evidence is not None and evidence.HasField("before") else None,
        devices=tuple(each for each in _devices(source, name, world) if each.worker_id == place.worker),
    )


def devices(source: Source, name: str) -> model.Devices:
    """Return the accelerators of the world's members, those with a fault first."""
    world = JobView(source.view, source.keys.job(name)).world()
    found = _devices(source, name, world) if world is not None else ()
    return model.Devices(
        devices=tuple(sorted(found, key=lambda each: (not each.fault, each.worker_id, each.index)))
    )


def heatmap(source: Source, name: str, *, since_unix_ms: int = 0) -> model.Heatmap:
    """Return the ranks' compute times over the last ten minutes, from `since_unix_ms` on.

    A column has each rank's last step in an interval of ten seconds.
    """
    charts = source.charts.job(name)
    if charts is None:
        return model.Heatmap(generation=0, from_unix_ms=0, interval_ms=1000 * HEAT_S, ranks=0, columns=())
    begun, columns = charts.heat.columns(-(-since_unix_ms // 1000), int(source.unix_now()))
    return model.Heatmap(
        generation=charts.heat.generation,
        from_unix_ms=1000 * begun,
        interval_ms=1000 * HEAT_S,
        ranks=charts.heat.ranks,
        columns=tuple(map(tuple, columns)),
    )


def _log(log: RankLog) -> model.RankLog:
    return model.RankLog(generation=log.generation, file=log.file, ended=log.ended, lines=tuple(log.lines))


def _reports(source: Source, name: str, world: World | None) -> Mapping[int, Reported]:
    if world is None:
        return {}
    generation, reports = source.soft.reported(name)
    return reports if generation == world.head.generation else {}


def _compute_us(report: Reported | None) -> int | None:
    return (report.times.compute_us or None) if report is not None and report.times is not None else None


def _median_us(report: Reported | None) -> int | None:
    return (
        (report.times.median_compute_us or None) if report is not None and report.times is not None else None
    )


def _age_ms(report: Reported, now_s: float) -> int:
    return max(0, int(1000 * (now_s - report.at)))


def _workers(
    source: Source, job: JobView, world: World | None, now_s: float
) -> tuple[list[model.Worker], dict[int, int]]:
    """Return the world's members by rank, followed by the standbys; and for each rank the index of its member."""
    registered = {(entry.name, entry.create_revision): entry for entry in job.workers()}
    workers: list[model.Worker] = []
    notices = leave_requests(job)
    owner: dict[int, int] = {}
    over = job.done(world.head.generation) if world is not None else set()
    for place in world.members if world is not None else ():
        entry = registered.pop((place.worker, place.incarnation), None)
        own = range(place.first_rank, place.first_rank + place.slots)
        owner.update(dict.fromkeys(own, len(workers)))
        workers.append(
            model.Worker(
                worker_id=place.worker,
                incarnation=place.incarnation,
                host=entry.record.host if entry is not None else "",
                pid=entry.record.pid if entry is not None else 0,
                slots=place.slots,
                first_rank=place.first_rank,
                standby=False,
                lost=entry is None and not over.issuperset(own),
                done=over.issuperset(own),
                leaving=leave_notice(notices, place.worker, place.incarnation) is not None,
                heartbeat_age_ms=_last_seen_ms(source, job, place.worker, place.incarnation, now_s),
            )
        )
    for (name, incarnation), entry in sorted(registered.items()):
        workers.append(
            model.Worker(
                worker_id=name,
                incarnation=incarnation,
                host=entry.record.host,
                pid=entry.record.pid,
                slots=entry.record.slots,
                first_rank=None,
                standby=True,
                lost=False,
                leaving=leave_notice(notices, name, incarnation) is not None,
                heartbeat_age_ms=_last_seen_ms(source, job, name, incarnation, now_s),
            )
        )
    return workers, owner


def _last_seen_ms(source: Source, job: JobView, worker: str, incarnation: int, now_s: float) -> int | None:
    at_s = source.soft.last_seen(job.keys.name, worker, incarnation)
    return max(0, int(1000 * (now_s - at_s))) if at_s is not None else None


def _devices(source: Source, name: str, world: World) -> Iterator[model.Device]:
    for worker, device in world_devices(source.soft, name, world):
        yield _device(worker, device)


def _device(worker: str, device: DeviceStatus) -> model.Device:
    def read(field: str) -> int | None:
        return int(getattr(device, field)) if device.HasField(field) else None  # type: ignore[arg-type]  # by name

    return model.Device(
        worker_id=worker,
        index=device.index,
        name=device.name,
        uuid=device.uuid,
        utilization_percent=read("utilization_percent"),
        memory_used_bytes=read("memory_used_bytes"),
        memory_total_bytes=read("memory_total_bytes"),
        temperature_c=read("temperature_c"),
        power_mw=read("power_mw"),
        ecc_uncorrected=read("ecc_uncorrected"),
        xids=tuple(device.xids),
        fault=device.fault,
    )
