"""The newest reports of ranks and devices: in memory, for people, and to state the last phase of ranks that a barrier
misses.

A rank's agent detects a stall, and reports the stall together with the rank's newest report. The rank's next
report ends the stall. An older message that arrives late through a peer does not end the stall.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from strata.coordinator.reports.interest import MAX_OBSERVED_RANKS
from strata.core.barriers.arrivals import MAX_PHASE_CHARS, MAX_TIME_MS
from strata.core.health.goodput import MAX_NAME, MAX_PARTS
from strata.core.health.reported import MAX_NAMES, is_name
from strata.core.stop.save_hold import MAX_HOST_CHARS, MAX_REASON_CHARS
from strata.observe.words import age
from strata.v1 import members_pb2, peers_pb2

MAX_STACK_CHARS: Final = 4096
MAX_STACKS: Final = 64
"""Stacks stored for one job: those of its ranks that are furthest behind."""
MAX_PATH_CHARS: Final = 512
MAX_WHERE_CHARS: Final = 256
MAX_WORD_CHARS: Final = 16
MAX_DEVICES: Final = 64
MAX_LINES: Final = 40
MAX_LINE_CHARS: Final = 300
LAST_SEEN_BATCH: Final = 1_000
UNSERVED_S: Final = 60.0
"""How long the last-seen time of a member is stored after a replica last reported that time."""
EVIDENCE_S: Final = 10.0
"""How long reports that are collected only for viewers are stored."""
MAX_XIDS: Final = 32
NEWS_BYTES: Final = 1 << 20
"""The maximum size of one message to a peer."""


@dataclass(slots=True, kw_only=True)
class Reported:
    """The newest report of one rank."""

    step: int
    phase: str
    at: float
    """When the report was made, on this loop's clock, computed from its age on arrival."""
    stalled: bool = False
    stack: str = ""
    step_us: int = 0
    median_step_us: int = 0
    trace_file: str = ""
    trace_bytes: int = 0
    hold: members_pb2.SaveHold | None = None
    """Why the rank could not save at the time of the report."""
    training: members_pb2.TrainingReport | None = None
    """The state of the training; reported by rank 0 only."""
    late: bool = False
    usual_ms: int = 0
    where: str = ""
    activity: str = ""
    process: str = ""
    times: members_pb2.StepTimes | None = None

    def keeps_of(self, before: Reported) -> None:
        """Add the fields of an earlier copy of this report; keep the newer `hold`, which may change without a step."""
        if before.at > self.at:
            self.hold, self.training = before.hold, before.training
        self.at = max(self.at, before.at)
        self.stalled = self.stalled or before.stalled
        self.stack = self.stack or before.stack
        self.step_us = self.step_us or before.step_us
        self.median_step_us = self.median_step_us or before.median_step_us
        self.late = self.late or before.late
        self.usual_ms = self.usual_ms or before.usual_ms
        if not (self.where or self.process):
            self.where, self.activity, self.process = before.where, before.activity, before.process
        self.times = self.times or before.times
        if not self.trace_file:
            self.trace_file, self.trace_bytes = before.trace_file, before.trace_bytes


@dataclass(slots=True)
class _Generation:
    number: int
    reports: dict[int, Reported] = field(default_factory=dict)
    own: set[int] = field(default_factory=set)
    """The ranks that reported to this replica, not through a peer."""
    news: set[int] = field(default_factory=set)
    """The ranks in `own` whose report was not yet sent to peers."""


@dataclass(slots=True)
class _Devices:
    """The accelerators of a job's members, by worker; they outlive generations."""

    known: dict[str, members_pb2.MemberDevices] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    news: set[str] = field(default_factory=set)


class _LastSeen(NamedTuple):
    """When a member was last seen, and when its serving replica last reported that time."""

    at_s: float
    reported_s: float


@dataclass(slots=True)
class _Viewed:
    """The reports about one job that are collected only while somebody views it."""

    last_seen: dict[tuple[str, int], _LastSeen] = field(default_factory=dict)
    """When each member was last seen, by worker and incarnation."""
    evidence: dict[int, tuple[members_pb2.RankEvidence, float]] = field(default_factory=dict)
    """The evidence about the ranks of the newest generation, each with its time."""
    generation: int = 0
    last_seen_updates: list[members_pb2.MemberLastSeen] = field(default_factory=list)
    evidence_news: dict[int, members_pb2.RankEvidence] = field(default_factory=dict)
    until_s: float = 0.0


class ProgressBoard:
    """The newest report of every rank of every job's newest generation, and of its members' devices."""

    def __init__(self) -> None:
        self._jobs: dict[str, _Generation] = {}
        self._devices: dict[str, _Devices] = {}
        self._viewed: dict[str, _Viewed] = {}

    def note(
        self, job: str, generation: int, ranks: Iterable[members_pb2.RankProgress], *, own: bool
    ) -> None:
        """Record ranks' reports; `own`: this replica serves the ranks, so it sends their reports to peers."""
        held = self._jobs.get(job)
        if held is None or held.number < generation:
            held = self._jobs[job] = _Generation(generation)
        elif held.number > generation:
            return
        now = asyncio.get_running_loop().time()
        for rank in ranks:
            report = _bounded_report(rank, now)
            before = held.reports.get(rank.rank)
            if before is not None:
                if (before.step, before.phase) == (report.step, report.phase):
                    report.keeps_of(before)
                elif before.at > report.at:
                    continue
            held.reports[rank.rank] = report
            if report.stack:
                _keep_few_stacks(held)
            if own:
                held.own.add(rank.rank)
                held.news.add(rank.rank)

    def note_devices(self, job: str, member: members_pb2.MemberDevices, *, own: bool) -> None:
        """Record a member's accelerators; ignore an older incarnation."""
        held = self._devices.setdefault(job, _Devices())
        before = held.known.get(member.worker_id)
        if before is not None and before.incarnation > member.incarnation:
            return
        held.known[member.worker_id] = _bounded(member)
        if own:
            held.own.add(member.worker_id)
            held.news.add(member.worker_id)

    def note_last_seen(self, job: str, members: Iterable[members_pb2.MemberLastSeen], *, own: bool) -> None:
        """Record when members of a viewed job were last seen."""
        held, now_s = self._of_viewed(job), asyncio.get_running_loop().time()
        for member in members:
            key = (member.worker_id, member.incarnation)
            at_s = now_s - min(max(0, member.age_ms), MAX_TIME_MS) / 1000
            before = held.last_seen.get(key)
            held.last_seen[key] = _LastSeen(at_s if before is None else max(at_s, before.at_s), now_s)
            if own:
                held.last_seen_updates.append(member)

    def note_evidence(
        self, job: str, generation: int, evidence: Iterable[members_pb2.RankEvidence], *, own: bool
    ) -> None:
        """Record hosts' evidence about viewed ranks."""
        held, now_s = self._of_viewed(job), asyncio.get_running_loop().time()
        if generation > held.generation:
            held.generation = generation
            held.evidence.clear()
        for each in evidence if generation == held.generation else ():
            if each.rank not in held.evidence and len(held.evidence) >= MAX_OBSERVED_RANKS:
                continue  # nobody views so many
            kept = members_pb2.RankEvidence(
                rank=each.rank,
                stack=each.stack[:MAX_STACK_CHARS],
                log=_bounded_lines(each.log),
                log_file=each.log_file[:MAX_PATH_CHARS],
                log_generation=max(0, each.log_generation),
                log_ended=each.log_ended[:MAX_LINE_CHARS],
                before=_bounded_log(each.before) if each.HasField("before") else None,
                age_ms=min(max(0, each.age_ms), MAX_TIME_MS),
            )
            held.evidence[each.rank] = (kept, now_s - kept.age_ms / 1000)
            if own:
                held.evidence_news[each.rank] = kept

    def last_seen(self, job: str, worker: str, incarnation: int) -> float | None:
        """Return when a member was last seen, on this loop's clock; None if unknown or the job is not viewed."""
        held = self._viewed.get(job)
        found = held.last_seen.get((worker, incarnation)) if held is not None else None
        return found.at_s if found is not None else None

    def evidence(self, job: str, generation: int, rank: int) -> members_pb2.RankEvidence | None:
        """Return the recent evidence of a viewed rank's host, or None."""
        held = self._viewed.get(job)
        found = held.evidence.get(rank) if held is not None and held.generation == generation else None
        if found is None or found[1] < asyncio.get_running_loop().time() - EVIDENCE_S:
            return None
        return found[0]

    def _of_viewed(self, job: str) -> _Viewed:
        held = self._viewed.setdefault(job, _Viewed())
        held.until_s = asyncio.get_running_loop().time() + EVIDENCE_S
        return held

    def _viewed_updates(self) -> Iterator[peers_pb2.PeerProgress]:
        """Yield the unsent reports about viewed jobs; forget jobs that nobody views any more."""
        now_s = asyncio.get_running_loop().time()
        for job in [job for job, held in self._viewed.items() if held.until_s < now_s]:
            del self._viewed[job]
        for job, held in self._viewed.items():
            for key in [
                key for key, last_seen in held.last_seen.items() if last_seen.reported_s < now_s - UNSERVED_S
            ]:
                del held.last_seen[key]  # a job may be viewed for weeks, while its members change
            for start in range(0, len(held.last_seen_updates), LAST_SEEN_BATCH):
                yield peers_pb2.PeerProgress(
                    job=job, last_seen=held.last_seen_updates[start : start + LAST_SEEN_BATCH]
                )
            for evidence in held.evidence_news.values():
                yield peers_pb2.PeerProgress(job=job, generation=held.generation, evidence=[evidence])
            held.last_seen_updates.clear()
            held.evidence_news.clear()

    def forget(self, job: str) -> None:
        """Drop the reports of a job that has ended."""
        self._viewed.pop(job, None)
        self._jobs.pop(job, None)
        self._devices.pop(job, None)

    def forget_member(self, job: str, worker: str) -> None:
        """Drop the devices of a departed member."""
        held = self._devices.get(job)
        if held is not None and held.known.pop(worker, None) is not None:
            held.own.discard(worker)
            held.news.discard(worker)

    def phases(self, job: str, generation: int) -> dict[int, str]:
        """Return, by rank, the activity in its newest report."""
        held = self._jobs.get(job)
        if held is None or held.number != generation:
            return {}
        now = asyncio.get_running_loop().time()
        return {rank: _activity_text(report, now) for rank, report in held.reports.items() if report.phase}

    def reported(self, job: str) -> tuple[int, Mapping[int, Reported]]:
        """Return the newest generation that ranks of a job reported from, and their reports, or (0, {})."""
        held = self._jobs.get(job)
        return (held.number, held.reports) if held is not None else (0, {})

    def jobs(self) -> list[str]:
        """Return the jobs whose ranks have reported."""
        return list(self._jobs)

    def ranks(self, job: str, generation: int, ranks: Iterable[int]) -> list[members_pb2.RankProgress]:
        """Return the progress of these ranks; ranks without a report are absent."""
        held = self._jobs.get(job)
        if held is None or held.number != generation:
            return []
        return [_message(rank, held.reports[rank]) for rank in ranks if rank in held.reports]

    def devices(self, job: str) -> Iterator[members_pb2.MemberDevices]:
        """Yield the reported accelerators of the job's members."""
        held = self._devices.get(job)
        if held is not None:
            yield from held.known.values()

    def devices_of(self, job: str, worker: str, incarnation: int) -> Iterable[members_pb2.DeviceStatus]:
        """Return one member's reported accelerators."""
        held = self._devices.get(job)
        known = held.known.get(worker) if held is not None else None
        return known.devices if known is not None and known.incarnation == incarnation else ()

    def news(self) -> list[peers_pb2.PeerProgress]:
        """Return messages of bounded size with all reports not yet sent to peers, and count them as sent."""
        messages: list[peers_pb2.PeerProgress] = []
        for job in sorted(self._jobs.keys() | self._devices.keys()):
            held = self._jobs.get(job) or _Generation(0)
            devices = self._devices.get(job) or _Devices()
            ranks = [_message(rank, held.reports[rank]) for rank in sorted(held.news)]
            members = [devices.known[worker] for worker in sorted(devices.news)]
            messages += _messages(job, held.number, [*ranks, *members])
            held.news.clear()
            devices.news.clear()
        messages += self._viewed_updates()
        return messages

    def resend(self) -> None:
        """Count all own reports as unsent: there is a new peer."""
        for held in self._jobs.values():
            held.news |= held.own
        for devices in self._devices.values():
            devices.news |= devices.own


def _messages(
    job: str, generation: int, news: Iterable[members_pb2.RankProgress | members_pb2.MemberDevices]
) -> Iterator[peers_pb2.PeerProgress]:
    """Yield a job's unsent reports in messages of bounded size."""
    message, size = peers_pb2.PeerProgress(job=job, generation=generation), 0
    for each in news:
        size += each.ByteSize()
        if size > NEWS_BYTES:
            yield message
            message, size = peers_pb2.PeerProgress(job=job, generation=generation), each.ByteSize()
        if isinstance(each, members_pb2.RankProgress):
            message.ranks.append(each)
        else:
            message.devices.append(each)
    if message.ranks or message.devices:
        yield message


def _bounded_report(rank: members_pb2.RankProgress, now: float) -> Reported:
    """Return a rank's report within bounds: its sender may be of any version, or faulty."""
    age_ms = min(max(0, rank.age_ms), MAX_TIME_MS)
    return Reported(
        step=rank.step,
        phase=rank.phase[:MAX_PHASE_CHARS],
        at=now - age_ms / 1000,
        stalled=rank.stalled_ms > 0,
        stack=rank.stack[:MAX_STACK_CHARS],
        step_us=max(0, rank.step_us),
        median_step_us=max(0, rank.median_step_us),
        trace_file=rank.trace_file[:MAX_PATH_CHARS],
        trace_bytes=max(0, rank.trace_bytes),
        hold=_hold(rank.save_hold) if rank.HasField("save_hold") else None,
        training=_training(rank.training) if rank.rank == 0 and rank.HasField("training") else None,
        late=rank.late_ms > 0,
        usual_ms=min(max(0, rank.usual_ms), MAX_TIME_MS),
        where=rank.where[:MAX_WHERE_CHARS],
        activity=rank.activity[:MAX_WORD_CHARS],
        process=rank.process[:MAX_WORD_CHARS],
        times=_times(rank.step_times) if rank.HasField("step_times") else None,
    )


def _times(times: members_pb2.StepTimes) -> members_pb2.StepTimes:
    return members_pb2.StepTimes(
        **{field.name: min(max(0, value), MAX_TIME_MS) for field, value in times.ListFields()}
    )


def _training(report: members_pb2.TrainingReport) -> members_pb2.TrainingReport:
    """Return the report within bounds."""
    kept = members_pb2.TrainingReport(
        epoch=report.epoch, samples=max(0, report.samples), target_step=max(0, report.target_step)
    )
    for name, value in itertools.islice(sorted(report.reported.items()), MAX_NAMES):
        if is_name(name):
            kept.reported[name] = value
    for cause, seconds in itertools.islice(sorted(report.goodput_s.items()), MAX_PARTS + 1):
        if 0 <= seconds < MAX_TIME_MS:
            kept.goodput_s[cause[:MAX_NAME]] = seconds
    return kept


def _hold(hold: members_pb2.SaveHold) -> members_pb2.SaveHold:
    return members_pb2.SaveHold(
        step=hold.step,
        held_ms=min(max(0, hold.held_ms), MAX_TIME_MS),
        reason=hold.reason[:MAX_REASON_CHARS],
        host=hold.host[:MAX_HOST_CHARS],
    )


def _keep_few_stacks(held: _Generation) -> None:
    """Drop the stacks of the ranks that are furthest ahead, if there are too many stacks."""
    with_stack = [(report.step, rank) for rank, report in held.reports.items() if report.stack]
    for _step, rank in sorted(with_stack)[MAX_STACKS:]:
        held.reports[rank].stack = ""


def _bounded_log(log: members_pb2.RankLog) -> members_pb2.RankLog:
    return members_pb2.RankLog(
        generation=max(0, log.generation),
        file=log.file[:MAX_PATH_CHARS],
        ended=log.ended[:MAX_LINE_CHARS],
        lines=_bounded_lines(log.lines),
    )


def _bounded_lines(lines: Sequence[str]) -> list[str]:
    return [line[:MAX_LINE_CHARS] for line in lines[-MAX_LINES:]]


def _bounded(member: members_pb2.MemberDevices) -> members_pb2.MemberDevices:
    kept = members_pb2.MemberDevices(worker_id=member.worker_id, incarnation=member.incarnation)
    for device in member.devices[:MAX_DEVICES]:
        copy = kept.devices.add()
        copy.CopyFrom(device)
        copy.name, copy.uuid, copy.fault = device.name[:128], device.uuid[:128], device.fault[:256]
        copy.throttled = device.throttled[:256]
        del copy.xids[:-MAX_XIDS]
    return kept


def _activity_text(report: Reported, now: float) -> str:
    still = f", stalled for {age((now - report.at) * 1000)}" if report.stalled else ""
    return f"{report.phase}, step {report.step}{still}"


def _message(rank: int, report: Reported) -> members_pb2.RankProgress:
    age_ms = max(0, int((asyncio.get_running_loop().time() - report.at) * 1000))
    return members_pb2.RankProgress(
        rank=rank,
        step=report.step,
        phase=report.phase,
        age_ms=age_ms,
        # the rank has made no report since the stall began
        stalled_ms=max(1, age_ms) if report.stalled else 0,
        stack=report.stack,
        step_us=report.step_us,
        median_step_us=report.median_step_us,
        trace_file=report.trace_file,
        trace_bytes=report.trace_bytes,
        save_hold=report.hold,
        training=report.training,
        late_ms=max(1, age_ms) if report.late else 0,
        usual_ms=report.usual_ms,
        where=report.where,
        activity=report.activity,
        process=report.process,
        step_times=report.times,
    )
