"""Attribution: which rank holds up a job, and why. This is a rule on the reports of all its ranks at one moment.

    crashed     a rank, or its node, ended early
    stalled     ranks stand still: for long enough to be a stall (`core.health.stalls`), or, earlier, while
                others wait for them
    slow        steps cost a rank more than they cost others (`core.health.stragglers`)

A rank that waits for others is late as well, so lateness alone is no fault. Before a stall, ranks are blamed only
on evidence: most ranks are late, at least one late rank waits for others, and the activity of the blamed ranks is
known. With this evidence the blamed rank is named within seconds, but no member is evicted: only stalls evict. An
agent reports that a rank is late before it has located the rank, that is, read its stacks. Until then the rank does
not count as silent, and its report is no evidence against any rank.
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
"""The longest delay until an agent reports a late rank. The agent reports it before it requests stacks."""

STOPPED: Final = "stopped"
BLOCKED: Final = "blocked"
"""Two process states: stopped by a signal, and blocked in uninterruptible I/O."""

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
    """The known facts about one rank of the current generation."""

    rank: int
    step: int
    phase: str
    age_ms: int
    """Time since the rank last moved, as far as this replica knows."""
    stalled_ms: int = 0
    late_ms: int = 0
    usual_ms: int = 0
    """The usual duration of the rank's phase; 0 while unknown."""
    times: StepTimes | None = None
    waits: bool = False
    """Whether the rank has arrived at an open barrier."""
    where: str = ""
    """The innermost function of the rank's main thread; "" if unknown."""
    activity: str = ""
    """The purpose of the function in `where`: one of `core.health.stacks.ACTIVITIES`."""
    process: str = ""
    worker: str = ""
    host: str = ""
    throttled: tuple[int, str] | None = None
    """The rank's device, if it runs slower than it could, and the reason."""
    trace_file: str = ""
    hold: SaveHold | None = None
    """Why the rank cannot save at present, and for how long so far."""

    @property
    def held_up(self) -> bool:
        """Whether the rank waits for other ranks, as far as is known."""
        return self.waits or self.activity == stacks.COLLECTIVE

    @property
    def silent(self) -> bool:
        """Whether the rank is certainly late by now, but its agent has not reported this.

        While the rank's phase has no usual duration, the agent cannot know that the rank is late.
        """
        late_ms = 1000 * (late_after_s(self.usual_ms / 1000) + SILENT_S)
        return not self.reported_late and not self.waits and self.usual_ms > 0 and self.age_ms > late_ms

    @property
    def unable(self) -> bool:
        """Whether the rank cannot run at all."""
        return self.silent or self.process == STOPPED

    @property
    def reported_late(self) -> bool:
        return self.stalled_ms > 0 or self.late_ms > 0

    @property
    def located(self) -> bool:
        """Whether its agent has located the rank, or failed to; the agent reports a stall only after this attempt."""
        return self.stalled_ms > 0 or bool(self.where or self.activity or self.process)


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """The ranks that hold up `others`, with the cause of each; `ranks` is empty if no rank is to blame."""

    ranks: Mapping[int, str]
    others: tuple[int, ...] = ()
    is_stall: bool = False
    """Whether any rank has stood still long enough for a stall."""


NO_BLAME: Final = Blame(ranks={})


def blame(reports: Sequence[RankReport]) -> Blame:
    """Return the ranks that hold up the others at this moment."""
    standing = [each for each in reports if each.silent or (each.reported_late and each.located)]
    if all(each.silent for each in standing):
        return NO_BLAME
    is_stall = any(each.stalled_ms > 0 for each in standing)
    if len(standing) < len(reports) and all(each.held_up and not each.silent for each in standing):
        return NO_BLAME  # the late ranks wait for a rank that still moves: that rank evaluates, or writes
    named, _how = suspects(standing)
    blamed = {each.rank: _cause(each) for each in standing if each.rank in named}
    others = [each for each in standing if each.rank not in blamed]
    if not is_stall and not _evident(blamed, others, len(reports)):
        return NO_BLAME
    return Blame(ranks=blamed, others=tuple(sorted(each.rank for each in others)), is_stall=is_stall)


def _evident(blamed: Mapping[int, str], others: Sequence[RankReport], size: int) -> bool:
    """Return whether the evidence allows blaming ranks before any has stood still long enough for a stall."""
    enough = 2 * (len(blamed) + len(others)) >= size and len(blamed) <= len(others)
    known = CAUSE_UNKNOWN not in blamed.values()
    unable = bool(blamed) and set(blamed.values()) <= {CAUSE_STOPPED, CAUSE_SILENT}
    return enough and known and (unable or any(each.held_up for each in others))


def suspects(standing: Sequence[RankReport]) -> tuple[tuple[int, ...], str]:
    """Return which of the ranks that stand still hold up the others, and the evidence in words.

    1. If some ranks cannot run at all, they hold up the others.
    2. Otherwise ranks that wait at a barrier or in a collective are excluded, unless all ranks wait.
    3. Of the rest, only ranks at the earliest step count.
    4. Of these, only ranks whose reported phase differs from the majority's count. If no phase differs, only ranks
       whose main thread is in another function than the majority's count. If nothing differs, all are named.
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
        return others, f"most others are in {most}"
    return tuple(sorted(each.rank for each in behind)), how or "only their stacks tell them apart"


def _unlike_most(what: Mapping[int, str]) -> tuple[int, ...]:
    """Return the ranks that differ from the majority; none if there is no majority."""
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

    The cause is the first that applies: its batches, if they account for most of its extra time; its device, if the
    device is throttled; its host, if the host runs several ranks, but not all ranks of the job, and each rank of
    the host is slow in compute; its own compute.
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
