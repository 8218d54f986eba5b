"""One job as data: `/api/jobs/<job>` and its page.

Ranks are grouped by what they do (step and phase), those furthest behind first; members and ranks are
listed in pages of `PAGE`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from strata.core.arrivals import OpenRound
from strata.core.checkpoints import acked, is_latest, sealed
from strata.core.job import JobView, World
from strata.core.records import CheckpointRecord, CheckpointState, Member
from strata.core.view import Entry
from strata.dashboard.generations import GenerationStatus, NoticeStatus, generations_of, notice_of
from strata.dashboard.source import Source
from strata.dashboard.status import EventStatus, JobStatus, events, job_line
from strata.dashboard.troubles import TroubleStatus, trouble_status
from strata.observe.words import ranks as as_runs
from strata.v1.members_pb2 import RankProgress

PAGE: Final = 100
GROUPS: Final = 20
MISSING: Final = 20
"""How many missing ranks of a barrier are shown with what they were doing."""
CHECKPOINTS: Final = 10

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """One registered member. `ranks` is empty for a standby; ages are those of its quietest rank."""

    worker_id: str
    incarnation: int
    host: str
    pid: int
    slots: int
    ranks: str
    step_low: int | None
    step_high: int | None
    phases: tuple[str, ...]
    heard_ms: int | None
    gone: bool
    """Of this generation, and not registered any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    rank: int
    worker_id: str
    step: int | None
    phase: str
    heard_ms: int | None
    """None for a rank that has not said anything yet."""
    stalled_ms: int = 0
    """For how long it has stood still, once that is longer than its phase may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankGroup:
    """Ranks that do the same. `heard_ms` is the age of the oldest word among them."""

    step: int | None
    phase: str
    count: int
    ranks: str
    heard_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class BarrierStatus:
    name: str
    generation: int
    round: int
    arrived: int
    expected: int
    age_ms: int
    missing_count: int
    missing_ranks: str
    missing: tuple[RankStatus, ...]
    """The first `MISSING` of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointStatus:
    step: int
    generation: int
    type: str
    state: str
    acked: int
    ranks: int
    missing_ranks: str
    """Of an open one: whose ack it waits for."""
    sealed: bool
    size_bytes: int
    created_unix_ms: int
    path: str
    reason: str
    latest: bool
    pinned: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDetail:
    """One job as far as one page of it shows. `page` counts from 1."""

    job: JobStatus
    settle_s: float
    restored_step: int | None
    fruitless: int
    max_fruitless: int
    silent_ranks: int
    groups: tuple[RankGroup, ...]
    more_groups: int
    page: int
    pages: int
    page_size: int
    members: tuple[MemberStatus, ...]
    ranks: tuple[RankStatus, ...]
    barriers: tuple[BarrierStatus, ...]
    checkpoints: tuple[CheckpointStatus, ...]
    checkpoint_count: int
    generations: tuple[GenerationStatus, ...]
    notice: NoticeStatus | None
    events: tuple[EventStatus, ...]
    trouble: TroubleStatus


def job_detail(source: Source, name: str, page: int) -> JobDetail | None:
    """Return a job as `source` sees it, None when there is none; `PoisonRecord` if it cannot be read."""
    job = JobView(source.view, source.keys.job(name))
    if not job.exists:
        return None
    world, spec, saves = job.world(), job.spec(), list(job.checkpoints())
    said = _said(source, name, world)
    size = world.head.size if world is not None else 0
    members = _members(job, world)
    pages = max(1, -(-max(size, len(members)) // PAGE))
    page = min(max(1, page), pages)
    shown = slice((page - 1) * PAGE, page * PAGE)
    groups = _groups(said, range(size))
    return JobDetail(
        job=job_line(source, job, said.values()),
        settle_s=spec.record.settle_s if spec is not None else 0.0,
        restored_step=world.head.restore.step if world is not None and world.head.restore else None,
        fruitless=world.head.fruitless if world is not None else 0,
        max_fruitless=spec.record.max_fruitless_generations if spec is not None else 0,
        silent_ranks=size - len(said),
        groups=tuple(groups[:GROUPS]),
        more_groups=max(0, len(groups) - GROUPS),
        page=page,
        pages=pages,
        page_size=PAGE,
        members=tuple(_member_row(*each, said) for each in members[shown]),
        ranks=tuple(_rank_rows(world, said, range(size)[shown])),
        barriers=tuple(_barriers(source, name, world, said)),
        checkpoints=tuple(_checkpoint(job, entry) for entry in _shown_saves(saves)),
        checkpoint_count=len(saves),
        generations=generations_of(job),
        notice=notice_of(job),
        events=events(source, name),
        trouble=trouble_status(source, job, world, said),
    )


# -- members and ranks


def _said(source: Source, name: str, world: World | None) -> dict[int, RankProgress]:
    if world is None or source.soft is None:
        return {}
    told = source.soft.progress(name, world.head.generation, range(world.head.size))
    return {progress.rank: progress for progress in told}


_Row = tuple[str, int, str, int, int, Member | None, bool]


def _members(job: JobView, world: World | None) -> list[_Row]:
    """Return the world's members in the order of their ranks, then the standbys."""
    registered = {(entry.name, entry.create_revision): entry for entry in job.workers()}
    rows: list[_Row] = []
    for place in world.members if world is not None else ():
        entry = registered.pop((place.worker, place.incarnation), None)
        host, pid = (entry.record.host, entry.record.pid) if entry is not None else ("", 0)
        rows.append((place.worker, place.incarnation, host, pid, place.slots, place, entry is None))
    rows += [
        (name, incarnation, entry.record.host, entry.record.pid, entry.record.slots, None, False)
        for (name, incarnation), entry in registered.items()
    ]
    return rows


def _member_row(
    worker: str,
    incarnation: int,
    host: str,
    pid: int,
    slots: int,
    place: Member | None,
    gone: bool,
    said: dict[int, RankProgress],
) -> MemberStatus:
    ranks = _ranks_of(place)
    told = [said[rank] for rank in ranks if rank in said]
    return MemberStatus(
        worker_id=worker,
        incarnation=incarnation,
        host=host,
        pid=pid,
        slots=slots,
        ranks=as_runs(ranks),
        step_low=min((p.step for p in told), default=None),
        step_high=max((p.step for p in told), default=None),
        phases=tuple(sorted({p.phase for p in told if p.phase})),
        heard_ms=max((p.age_ms for p in told), default=None),
        gone=gone,
    )


def _ranks_of(place: Member | None) -> range:
    return range(0) if place is None else range(place.first_rank, place.first_rank + place.slots)


def _rank_rows(
    world: World | None, said: dict[int, RankProgress], wanted: Iterable[int]
) -> Iterator[RankStatus]:
    if world is None:
        return
    owners = {rank: m.worker for m in world.members for rank in _ranks_of(m)}
    for rank in wanted:
        progress = said.get(rank)
        yield RankStatus(
            rank=rank,
            worker_id=owners.get(rank, ""),
            step=progress.step if progress is not None else None,
            phase=progress.phase if progress is not None else "",
            heard_ms=progress.age_ms if progress is not None else None,
            stalled_ms=progress.stalled_ms if progress is not None else 0,
        )


def _groups(said: dict[int, RankProgress], ranks: range) -> list[RankGroup]:
    """Return the ranks by what they do, those furthest behind first; the silent ones before all."""
    by_work: dict[tuple[int | None, str], list[int]] = defaultdict(list)
    for rank in ranks:
        progress = said.get(rank)
        by_work[(progress.step, progress.phase) if progress is not None else (None, "")].append(rank)
    return [
        RankGroup(
            step=step,
            phase=phase,
            count=len(of),
            ranks=as_runs(of),
            heard_ms=max((said[rank].age_ms for rank in of if rank in said), default=None),
        )
        for (step, phase), of in sorted(
            by_work.items(), key=lambda item: (-1 if item[0][0] is None else item[0][0], item[0][1])
        )
    ]


# -- barriers


def _barriers(
    source: Source, name: str, world: World | None, said: dict[int, RankProgress]
) -> Iterator[BarrierStatus]:
    now_ms = source.loop_now_ms()
    for round_ in () if source.soft is None else sorted(source.soft.open_rounds(name), key=_since):
        missing = round_.missing()
        current = world if world is not None and world.head.generation == round_.key.generation else None
        yield BarrierStatus(
            name=round_.key.name,
            generation=round_.key.generation,
            round=round_.key.round,
            arrived=len(round_.arrived),
            expected=len(round_.participants),
            age_ms=max(0, int(now_ms - round_.since_ms)),
            missing_count=len(missing),
            missing_ranks=as_runs(missing),
            missing=tuple(_rank_rows(current, said, missing[:MISSING])),
        )


def _since(round_: OpenRound) -> float:
    return round_.since_ms


# -- checkpoints


def _shown_saves(saves: list[Entry[CheckpointRecord]]) -> list[Entry[CheckpointRecord]]:
    """Return all open ones, then the newest of the others."""
    is_open = [e for e in saves if e.record.state is CheckpointState.OPEN]
    ended = [e for e in saves if e.record.state is not CheckpointState.OPEN]
    ended.sort(key=lambda e: (e.record.generation, e.record.step), reverse=True)
    return [*is_open, *ended[:CHECKPOINTS]]


def _checkpoint(job: JobView, entry: Entry[CheckpointRecord]) -> CheckpointStatus:
    record, latest = entry.record, job.latest()
    acks = acked(job, record)
    is_open = record.state is CheckpointState.OPEN
    return CheckpointStatus(
        step=record.step,
        generation=record.generation,
        type=record.type.value,
        state=record.state.value,
        acked=len(acks),
        ranks=record.ranks,
        missing_ranks=as_runs(set(range(record.ranks)) - acks) if is_open else "",
        sealed=sealed(job, record) is not None,
        size_bytes=record.size_bytes,
        created_unix_ms=record.created_unix_ms,
        path=record.path,
        reason=record.reason,
        latest=is_latest(latest.record if latest is not None else None, record),
        pinned=job.view.get(job.keys.pin(record.step, record.attempt)) is not None,
    )
