"""Findings: faults of a job's ranks, saves, devices and keys, each with one sentence that every display uses.

The status page, the commands, the logs and the labels of metrics take their words from here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from strata.core.health import attribution as cause_of
from strata.core.health.attribution import Blame, RankReport, blame, slow_causes
from strata.core.health.stragglers import Scores, Slow, scores, stragglers
from strata.core.stop.save_hold import SaveHold, no_checkpoint
from strata.core.words import ranks_text, span

T = TypeVar("T")

NAMED: Final = 3
"""One sentence names at most this many things of a kind, and counts the others."""
MAX_FINDINGS: Final = 50
"""The maximum number of findings per job at one time."""
RUNS: Final = 8
"""One sentence names at most this many runs of ranks (`0-3, 7`)."""

CRASHED: Final = "crashed"
STALLED: Final = "stalled"
SLOW: Final = "slow"
HELD: Final = "held"
DEVICE: Final = "device"
INVARIANT: Final = "invariant"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault. `cause` is a cause listed in docs/observability.md, or a text of the driver or the storage."""

    kind: str
    text: str
    ranks: tuple[int, ...] = ()
    worker_id: str = ""
    host: str = ""
    device: int | None = None
    cause: str = ""
    since_ms: int | None = None
    """How long the fault has existed, if known."""

    @property
    def key(self) -> tuple[str, str, tuple[int, ...], str, str, int | None]:
        """The identity of the finding over time. The text is no identity, because it includes durations."""
        return self.kind, self.cause, self.ranks, self.worker_id, self.host, self.device

    @property
    def rank_runs(self) -> str:
        """The ranks in text form, `0-3, 7`; only the first runs."""
        return ranks_text(self.ranks, most=RUNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator that must not be trained on (`fault`), or that runs slower than it could (`throttled`)."""

    worker: str
    index: int
    fault: str = ""
    throttled: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rank that ended early; `lost`: its node was lost with it, so the cause is unknown."""

    rank: int
    worker: str
    host: str
    reason: str
    lost: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All faults at this moment; `says` is empty if none is known."""

    findings: tuple[Finding, ...] = ()
    stalled: tuple[RankReport, ...] = ()
    suspects: tuple[int, ...] = ()
    """The ranks that hold up the stalled ones, as far as is known."""
    slow: tuple[Slow, ...] = ()
    sick: tuple[Device, ...] = ()
    held: tuple[RankReport, ...] = ()
    """The ranks that train on but cannot save at present; the rank that could not save for longest comes first."""
    held_up: tuple[int, ...] = ()
    """The ranks that wait for ranks that a finding names."""
    scores: Mapping[int, Scores] = field(default_factory=dict)
    """The scores, by rank, of the ranks that report the cost of their steps."""
    says: str = ""

    @property
    def held_s(self) -> float:
        """How long some rank has not been able to save, in seconds; 0 while all can."""
        return self.held[0].hold.held_s if self.held and self.held[0].hold is not None else 0.0

    def of_rank(self, rank: int) -> str:
        """Return the faults of one rank: the sentences that name this rank, or a rank for which it waits."""
        named = [each.text for each in self.findings if rank in each.ranks]
        if not named and rank in self.held_up:
            blamed = [each for each in self.findings if each.kind in {STALLED, CRASHED}]
            named = [f"waits for others: {each.text}" for each in blamed[:1]]
        return "; ".join(named)


def diagnose(
    reports: Sequence[RankReport],
    devices: Iterable[Device] = (),
    impossible: Sequence[str] = (),
    *,
    ended: Sequence[Ended] = (),
    committed_step: int | None = None,
) -> Diagnosis:
    """Return the faults of the ranks with these reports, of their devices, and of the job's keys.

    `ended`: ranks of this generation that ended early; other ranks that stand still count as waiting for these.
    `committed_step`: the step of the job's newest checkpoint, shown in the finding about held saves.
    """
    by_rank = {each.rank: each for each in reports}
    known = sorted(devices, key=lambda each: (each.worker, each.index))
    stalled = tuple(each for each in reports if each.stalled_ms > 0)
    found = blame([each for each in reports if each.rank not in {one.rank for one in ended}])
    times = {each.rank: each.times for each in reports if each.times is not None}
    slow = tuple(stragglers(times))
    holds = {each: each.hold for each in reports if each.hold is not None}
    held = tuple(sorted(holds, key=lambda each: (-holds[each].held_s, each.rank)))
    throttled = tuple(slow_findings(slow, by_rank))
    kinds = (
        ([_held(held, committed_step)] if held else [], ""),
        (list(_ended(ended)), "ranks that ended"),
        (list(_stalls(found, by_rank)) if not ended else [], "groups of stalled ranks"),
        (list(throttled), "groups of slow ranks"),
        (list(_devices(known, {(each.worker_id, each.device) for each in throttled})), "faulty devices"),
        (
            [
                Finding(kind=INVARIANT, text=f"its keys are inconsistent: {each}", cause=each)
                for each in impossible
            ],
            "inconsistencies",
        ),
    )
    late = tuple(each.rank for each in reports if each.reported_late)
    return Diagnosis(
        findings=tuple(each for findings, _ in kinds for each in findings)[:MAX_FINDINGS],
        stalled=stalled,
        suspects=tuple(sorted(found.ranks)) if found.is_stall else (),
        slow=slow,
        sick=tuple(each for each in known if each.fault),
        held=held,
        held_up=late if ended else found.others,
        scores=scores(times),
        says="; ".join(sentence for findings, kind in kinds for sentence in _few(findings, kind)),
    )


# -- one function per kind of finding


def _held(held: Sequence[RankReport], committed_step: int | None) -> Finding:
    holds: list[SaveHold] = [each.hold for each in held if each.hold is not None]
    hosts, reasons = {hold.host for hold in holds}, {hold.reason for hold in holds}
    return Finding(
        kind=HELD,
        text=no_checkpoint(*holds, committed_step=committed_step),
        ranks=tuple(sorted(each.rank for each in held)),
        worker_id=_only(each.worker for each in held),
        host=_only(hosts),
        cause=_only(reasons),
        since_ms=round(max(hold.held_s for hold in holds) * 1000),
    )


def _ended(ended: Sequence[Ended]) -> Iterator[Finding]:
    for group in _grouped(
        sorted(ended, key=lambda each: each.rank), lambda each: (each.lost, each.worker, each.reason)
    ):
        first, ranks = group[0], tuple(each.rank for each in group)
        has = "has" if len(ranks) == 1 else "have"
        yield Finding(
            kind=CRASHED,
            text=f"{_subject(ranks, first.host)} {has} ended: {first.reason}",
            ranks=ranks,
            worker_id=first.worker,
            host=first.host,
            cause="lost" if first.lost else "exit",
        )


def _stalls(found: Blame, by_rank: Mapping[int, RankReport]) -> Iterator[Finding]:
    """Yield a finding for each host and cause with ranks that stand still; one finding for all if none is to blame."""
    blamed = [by_rank[rank] for rank in sorted(found.ranks)]
    uniform = not found.others and len(blamed) > NAMED
    for group in _grouped(blamed, lambda each: () if uniform else (each.host, found.ranks[each.rank])):
        ranks = tuple(each.rank for each in group)
        longest_ms = max(_still_ms(each) for each in group)
        first = group[0]
        cause = _only(found.ranks[rank] for rank in ranks) or cause_of.CAUSE_UNKNOWN
        phase = f" ({first.phase})" if first.phase and not uniform else ""
        stands = "stands" if len(ranks) == 1 else "stand"
        subject = f"{len(ranks)} ranks" if uniform else _subject(ranks, first.host)
        text = f"{subject} {stands} still at step {min(each.step for each in group)}{phase} for {longest_ms / 1000:.0f} s"
        if found.others:
            text += f", and {len(found.others)} more with {'it' if len(blamed) == 1 else 'them'}"
        yield Finding(
            kind=STALLED,
            text=text + _why_stalled(cause, group),
            ranks=ranks,
            worker_id=_only(each.worker for each in group),
            host=_only(each.host for each in group),
            cause=cause,
            since_ms=longest_ms,
        )


def _why_stalled(cause: str, group: Sequence[RankReport]) -> str:
    where = _only(each.where for each in group)
    inside = f" in {where}" if where else ""
    why = {
        cause_of.CAUSE_STOPPED: "stopped by a signal",
        cause_of.CAUSE_SILENT: "its agent reports nothing",
        cause_of.CAUSE_DATA: f"waiting for the data loader{inside}",
        cause_of.CAUSE_STORAGE: f"writing or reading a checkpoint{inside}",
        cause_of.CAUSE_COLLECTIVE: f"waiting for other ranks{inside}",
        cause_of.CAUSE_CODE: f"in its own code{inside}",
    }.get(cause, "")
    trace = next((each.trace_file for each in group if each.trace_file), "")
    return (f": {why}" if why else "") + (f"; NCCL recorded {trace}" if trace else "")


def slow_findings(slow: Iterable[Slow], by_rank: Mapping[int, RankReport]) -> Iterator[Finding]:
    """Yield a finding for each host and cause with slow ranks."""
    slow = list(slow)
    causes = slow_causes(slow, by_rank)

    def group_of(each: Slow) -> tuple[object, ...]:
        report, cause = by_rank[each.rank], causes[each.rank]
        device = report.throttled if cause == cause_of.CAUSE_DEVICE else None
        return (report.host or each.rank, cause, device)

    for group in _grouped(slow, group_of):
        ranks = tuple(sorted(each.rank for each in group))
        first, cause = by_rank[group[0].rank], causes[group[0].rank]
        device, reason = first.throttled if cause == cause_of.CAUSE_DEVICE and first.throttled else (None, "")
        why = {
            cause_of.CAUSE_DATA: f"slow data loading, {span(max(each.data_more_s for each in group))} more a step",
            cause_of.CAUSE_DEVICE: f"device {device} is throttled ({reason})",
            cause_of.CAUSE_HOST: "all ranks of the host are slow",
            cause_of.CAUSE_COMPUTE: "slow compute",
        }[cause]
        take = "takes" if len(ranks) == 1 else "take"
        times = max(each.times for each in group)
        slowed_s = [each.slowed_s for each in group if each.slowed_s > 0]
        yield Finding(
            kind=SLOW,
            text=f"{_subject(ranks, first.host)} {take} {times:.1f} times the median for a step: {why}",
            ranks=ranks,
            worker_id=_only(by_rank[rank].worker for rank in ranks),
            host=first.host,
            device=device,
            cause=cause,
            since_ms=round(max(slowed_s) * 1000) if slowed_s else None,
        )


def _devices(devices: Iterable[Device], reported: set[tuple[str, int | None]]) -> Iterator[Finding]:
    for each in devices:
        throttled = each.throttled and (each.worker, each.index) not in reported
        if each.fault or throttled:
            where = f"device {each.index} of {each.worker}" + (f" on host {each.host}" if each.host else "")
            yield Finding(
                kind=DEVICE,
                text=f"{where}: {each.fault}" if each.fault else f"{where} is throttled ({each.throttled})",
                worker_id=each.worker,
                host=each.host,
                device=each.index,
                cause=each.fault or "throttled",
            )


# -- text


def _still_ms(report: RankReport) -> int:
    return report.stalled_ms or report.late_ms or report.age_ms


def _subject(ranks: Sequence[int], host: str) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {ranks_text(ranks, most=RUNS)}" + (
        f" on host {host}" if host else ""
    )


def _grouped(items: Iterable[T], key: Callable[[T], object]) -> Iterator[list[T]]:
    groups: dict[object, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    yield from groups.values()


def _only(values: Iterable[str]) -> str:
    """Return the common value; "" if the values differ."""
    found = set(values)
    return found.pop() if len(found) == 1 else ""


def _few(findings: Sequence[Finding], kind: str) -> list[str]:
    sentences = [each.text for each in findings]
    if len(sentences) <= NAMED:
        return sentences
    return [*sentences[:NAMED], f"{len(sentences) - NAMED} more {kind}"]
