"""Which rank holds up a job, and why: a rule on what is known of all its ranks at one moment.

    crashed     a rank ended before its time, or its node did
    stalled     ranks stand still: long enough to be a stall (`core.health.stalls`), or, earlier, while others wait for them
    slow        steps cost a rank more than they cost others (`core.health.stragglers`)

A rank that others hold up is late as well, so being late is no fault. Before it is a stall somebody is blamed only
with evidence: most ranks are late, at least one of them waits for others, and what the blamed ones do instead is known.
That names the rank within seconds, and costs nobody's life: evictions go by stalls alone. An agent reports that a rank
is late before it knows where the rank stands. Such a rank has a word of its agent, so it is not silent; it is no
evidence either, neither against itself nor against others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from strata.core.health import stacks
from strata.core.health.stalls import kind_of, late_after_s
from strata.core.health.stragglers import Slow, StepTimes
from strata.core.stop.save_hold import SaveHold

SILENT_S: Final = 2.3
"""How long it takes at most until a late rank is reported: its agent looks, and reports it before it asks for stacks."""

STOPPED: Final = "stopped"
BLOCKED: Final = "blocked"
"""States of a process: stopped by a signal, in uninterruptible I/O."""

CAUSE_STOPPED: Final = "stopped"
CAUSE_SILENT: Final = "silent"
CAUSE_DATA: Final = "data"
CAUSE_STORAGE: Final = "storage"
CAUSE_COLLECTIVE: Final = "collective"
CAUSE_CODE: Final = "code"
CAUSE_UNKNOWN: Final = "unknown"
CAUSE_COMPUTE: Final = "compute"
CAUSE_HOST: Final = "host"
CAUSE_DEVICE: Final = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """What is known of one rank of the current generation."""

    rank: int
    step: int
    phase: str
    age_ms: int
    """Since it moved, as far as is known here."""
    stalled_ms: int = 0
    late_ms: int = 0
    usual_ms: int = 0
    """How long its phase usually takes; 0 while that is unknown."""
    times: StepTimes | None = None
    waits: bool = False
    """It has arrived at a barrier that is open."""
    where: str = ""
    """The innermost function of its main thread, if that is known."""
    activity: str = ""
    """What that is for, one of `core.health.stacks.ACTIVITIES`."""
    process: str = ""
    worker: str = ""
    host: str = ""
    throttled: tuple[int, str] | None = None
    """The device of it that runs slower than it could, and why."""
    trace_file: str = ""
    hold: SaveHold | None = None
    """Why it cannot save for now, and for how long by now."""

    @property
    def held_up(self) -> bool:
        """Whether it waits for other ranks, for all that is known."""
        return self.waits or self.activity == stacks.COLLECTIVE

    @property
    def silent(self) -> bool:
        """Whether it must be late by now, and its agent does not say so.

        While nothing is usual for its phase, a rank's agent does not know when it is late.
        """
        late_ms = 1000 * (late_after_s(self.usual_ms / 1000) + SILENT_S)
        return not self.reported_late and not self.waits and self.usual_ms > 0 and self.age_ms > late_ms

    @property
    def unable(self) -> bool:
        """Whether it can do nothing at all."""
        return self.silent or self.process == STOPPED

    @property
    def reported_late(self) -> bool:
        return self.stalled_ms > 0 or self.late_ms > 0

    @property
    def located(self) -> bool:
        """Whether its agent has told where it stands, or has found no way to: it reports a stall only then."""
        return self.stalled_ms > 0 or bool(self.where or self.activity or self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The ranks that hold up `others`, with the cause of each; `ranks` is empty if nobody is to be named."""

    ranks: Mapping[int, str]
    others: tuple[int, ...] = ()
    is_stall: bool = False
    """Whether any rank has stood still for long enough to be a stall."""


NOBODY: Final = Blame(ranks={})


def blame(reports: Sequence[RankReport]) -> Blame:
    """Return who holds up the others at this moment."""
    standing = [each for each in reports if each.silent or (each.reported_late and each.located)]
    if all(each.silent for each in standing):
        return NOBODY
    is_stall = any(each.stalled_ms > 0 for each in standing)
    if len(standing) < len(reports) and all(each.held_up and not each.silent for each in standing):
        return NOBODY  # they wait for one that moves: it evaluates, or writes
    named, _how = suspects(standing)
    blamed = {each.rank: _cause(each) for each in standing if each.rank in named}
    others = [each for each in standing if each.rank not in blamed]
    if not is_stall and not _evident(blamed, others, len(reports)):
        return NOBODY
    return Blame(ranks=blamed, others=tuple(sorted(each.rank for each in others)), is_stall=is_stall)


def _evident(blamed: Mapping[int, str], others: Sequence[RankReport], size: int) -> bool:
    """Tell whether ranks may be blamed though nobody has stood still for long enough to be a stall."""
    enough = 2 * (len(blamed) + len(others)) >= size and len(blamed) <= len(others)
    known = CAUSE_UNKNOWN not in blamed.values()
    unable = bool(blamed) and set(blamed.values()) <= {CAUSE_STOPPED, CAUSE_SILENT}
    return enough and known and (unable or any(each.held_up for each in others))


def suspects(standing: Sequence[RankReport]) -> tuple[tuple[int, ...], str]:
    """Return which of the ranks that stand still hold up the others, and how that shows.

    A rank that can do nothing at all holds up the others. Who waits at a barrier or in a collective is held up; who
    is at an earlier step than others is not; of ranks at the same step those are that say they do something else than
    most, or whose main thread stands in another function than that of most. When nothing tells them apart, all are
    named.
    """
    if unable := tuple(sorted(each.rank for each in standing if each.unable)):
        return unable, "" if len(unable) == len(standing) else "the others wait for them"
    left = [each for each in standing if not each.held_up] or list(standing)
    if len(left) < len(standing):
        how = "the others wait for them"
    elif len(left) == 1 or not left:
        return tuple(each.rank for each in left), ""
    else:
        how = ""
    least = min(each.step for each in left)
    behind = [each for each in left if each.step == least]
    if len(behind) < len(left):
        how = f"the others got beyond step {least}"
    others = _unlike_most({each.rank: kind_of(each.phase) for each in behind})
    if others:
        return others, "most others do something else at the same step"
    where = {each.rank: each.where for each in behind if each.where}
    others = _unlike_most(where)
    if others:
        most = Counter(where.values()).most_common(1)[0][0]
        return others, f"most others stand in {most}"
    return tuple(sorted(each.rank for each in behind)), how or "nothing tells them apart but their stacks"


def _unlike_most(what: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that are not with the majority; nobody when there is none."""
    counted = Counter(what.values()).most_common(1)
    if not counted or 2 * counted[0][1] <= len(what):
        return ()
    return tuple(sorted(rank for rank, each in what.items() if each != counted[0][0]))


def _cause(report: RankReport) -> str:
    if report.silent:
        return CAUSE_SILENT
    if report.process == STOPPED:
        return CAUSE_STOPPED
    kind = kind_of(report.phase)
    if report.activity == stacks.DATA or kind == "data":
        return CAUSE_DATA
    if report.activity == stacks.STORAGE or kind in {"save", "restore"} or report.process == BLOCKED:
        return CAUSE_STORAGE
    if report.held_up:
        return CAUSE_COLLECTIVE
    return CAUSE_CODE if report.activity else CAUSE_UNKNOWN


def slow_causes(slow: Iterable[Slow], reports: Mapping[int, RankReport]) -> dict[int, str]:
    """Return why each of the slow ranks is slow.

    Its batches, if they cost most of what it takes longer; else its device, if that is throttled; else its host, if
    all ranks of the host are slow alike and there are several, and another host has none that are.
    """
    causes = {
        each.rank: CAUSE_DATA
        if each.data_more_s > each.compute_more_s
        else CAUSE_DEVICE
        if reports[each.rank].throttled is not None
        else CAUSE_COMPUTE
        for each in slow
    }
    by_host: dict[str, list[int]] = {}
    for rank, report in reports.items():
        by_host.setdefault(report.host, []).append(rank)
    for host, ranks in by_host.items():
        if (
            host
            and 1 < len(ranks) < len(reports)
            and all(causes.get(rank) == CAUSE_COMPUTE for rank in ranks)
        ):
            causes.update(dict.fromkeys(ranks, CAUSE_HOST))
    return causes
