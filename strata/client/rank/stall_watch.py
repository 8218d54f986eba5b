"""The watch over ranks that live but make no progress; each agent watches its own ranks.

The watch receives each rank's reports on their way to the coordinators, and adds step times to them. Twice a second
it looks for ranks that are late and ranks that have stalled (made no progress for too long; `core.health.stalls`
has the rules). It reports a late rank immediately: if an agent reports no late rank, the coordinators assume that
the agent cannot report. Then the watch fetches the rank's stacks and, for a stalled rank, the recording of its
communication library. Fetching may take seconds and does not delay the next look. Stacks and recording are reported
as soon as they are fetched, so that any replica can determine which rank blocks which.

With `evict`, the rank that seems to block the others is killed, which ends the generation: one restart instead of a
hang of hours. By default no rank is killed. Limit: a long evaluation that was reported as a step is reported as a
stall; the stall ends when the rank makes progress again.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

from strata.core.health.attribution import STOPPED, RankReport, suspects
from strata.core.health.stacks import activity, innermost, shortened
from strata.core.health.stalls import KEPT, RankPace, Stall, StallLimits, kind_of
from strata.v1.members_pb2 import RankProgress, SaveHold, StepTimes

POLL_S: Final = 0.5
"""Seconds between two looks for late and stalled ranks."""
OVERSLEPT_S: Final = 0.5
"""If a look is later than this, the agent's own process stalled: that time does not count for any rank's stall."""
STACKS: Final = 16
"""The most ranks whose stacks are fetched and reported at a time: hundreds of slots may stall. The innermost frame of
the main thread is reported for every rank whose stacks were fetched.
"""
STACK_CHARS: Final = 4000
EVICT_AFTER_S: Final = 3.0
"""Seconds between the first stall and the eviction: the other ranks must stall, too, before the coordinators can
determine which rank blocks the others.
"""

Tell = Callable[[int, Sequence[RankProgress]], None]
"""Called with (generation, ranks): reports the ranks' progress to the coordinators."""


class Log(Protocol):
    """The log of the watch's findings: an event and its facts."""

    def info(self, event: str, **facts: Any) -> None:
        """Log an improvement."""
        ...

    def warning(self, event: str, **facts: Any) -> None:
        """Log a problem."""
        ...


@dataclass(slots=True, kw_only=True)
class Actions:
    """The watch's actions, carried out by other parts of the agent."""

    log: Log
    tell: Tell
    stack: Callable[[int], Awaitable[str | None]]
    """Returns the stacks of a rank's threads, or None if they are unknown."""
    trace: Callable[[int], Awaitable[tuple[Path, int] | None]]
    """Returns the file with the recording of a rank's communication, and the file's size; None without a recording."""
    evict: Callable[[int, int, str], None] | None
    """Kills (rank, generation) for a reason; None: ranks are only reported."""
    process: Callable[[int], str] = lambda _rank: ""
    """Returns the state of a rank's process in the format of `RankProgress.process`; "" if it is unknown."""
    blame: Callable[[], Awaitable[Collection[int] | None]]
    """Returns the ranks of the whole world that block the others; empty if no such rank is known; None if no
    coordinator answers.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """The state of a rank that makes no progress: its process, its threads' stacks, its recording."""

    process: str = ""
    stack: str = ""
    where: str = ""
    activity: str = ""
    trace: tuple[Path, int] | None = None


@dataclass(slots=True)
class _Watched:
    pace: RankPace = field(default_factory=RankPace)
    stall: Stall | None = None
    late: bool = False
    """Whether the rank made no progress for clearly longer than usual."""
    fetched: bool = False
    """Whether the rank's stacks were fetched since it became late."""
    evidence: _Evidence = _Evidence()
    since_s: float = 0.0
    """When the stall was found."""
    times: StepTimes | None = None
    """The rank's step times, from its last report."""
    save_hold: SaveHold | None = None
    """The reason why the rank cannot save for now, from its last report."""
    own_us: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    """The time of each step as the rank reports it, without waiting for other ranks."""


class StallWatch:
    """Watches the ranks of one generation at a time. Run `run` as a task."""

    def __init__(self, limits: StallLimits, actions: Actions) -> None:
        self._limits = limits
        self._actions = actions
        self._generation = 0
        self._ranks: dict[int, _Watched] = {}
        self._evicted = False
        """Whether a rank of this generation was evicted: one eviction ends the generation."""
        self._unanswered_s = -EVICT_AFTER_S

    # -- input

    def watch(self, generation: int) -> None:
        """Watch only the ranks of this generation from now on; 0: watch no rank."""
        self._generation = generation
        self._evicted = False
        self._ranks.clear()

    def on_progress(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        """Record the reports of ranks, add their step times, and pass the reports on."""
        if generation == self._generation:
            ranks = [self._annotate(rank) for rank in ranks]
        self._actions.tell(generation, ranks)

    def on_detached(self, generation: int, rank: int) -> None:
        """Stop watching a rank that has announced its exit."""
        if generation == self._generation:
            self._ranks.pop(rank, None)

    def _annotate(self, report: RankProgress) -> RankProgress:
        now_s = asyncio.get_running_loop().time()
        watched = self._ranks.setdefault(report.rank, _Watched())
        before = watched.pace.step
        if watched.pace.observe(report.step, report.phase, now_s - max(0, report.age_ms) / 1000):
            if watched.stall is not None:
                self._actions.log.info(
                    "rank.moves_again",
                    rank=report.rank,
                    step=report.step,
                    stood_still_s=round(watched.stall.still_s + now_s - watched.since_s, 1),
                )
            watched.stall, watched.evidence = None, _Evidence()
            watched.late = watched.fetched = False
        if report.step_us > 0 and report.step != before:
            watched.own_us.append(report.step_us)
        if report.HasField("step_times"):
            watched.times = report.step_times
        self._note_hold(watched, report)
        merged = RankProgress()
        merged.CopyFrom(report)  # with the fields that this watch does not use
        merged.MergeFrom(self._message(report.rank, watched, age_ms=report.age_ms))
        return merged

    def _note_hold(self, watched: _Watched, report: RankProgress) -> None:
        before, now = watched.save_hold, report.save_hold if report.HasField("save_hold") else None
        watched.save_hold = now
        if now is not None and (before is None or before.reason != now.reason):
            self._actions.log.warning(
                "rank.saves_held", rank=report.rank, step=now.step, reason=now.reason, host=now.host
            )
        elif now is None and before is not None:
            self._actions.log.info("rank.saves_no_longer_held", rank=report.rank, step=before.step)

    def _message(self, rank: int, watched: _Watched, *, age_ms: int) -> RankProgress:
        pace, stall, evidence = watched.pace, watched.stall, watched.evidence
        trace, trace_bytes = evidence.trace or ("", 0)
        return RankProgress(
            rank=rank,
            step=pace.step,
            phase=pace.phase,
            age_ms=age_ms,
            step_us=watched.own_us[-1] if watched.own_us else _us(pace.last_step_s),
            median_step_us=round(median(watched.own_us)) if watched.own_us else _us(pace.usual_s()),
            stalled_ms=max(1, round(stall.still_s * 1000)) if stall is not None else 0,
            stack=evidence.stack,
            trace_file=str(trace),
            trace_bytes=trace_bytes,
            save_hold=watched.save_hold,
            late_ms=max(1, age_ms) if watched.late else 0,
            usual_ms=round(1000 * (pace.usual_s(kind_of(pace.phase)) or 0)),
            where=evidence.where,
            activity=evidence.activity,
            process=evidence.process,
            step_times=watched.times,
        )

    # -- the task

    async def run(self) -> None:
        """Look for late and stalled ranks twice a second, until cancelled."""
        loop = asyncio.get_running_loop()
        asking: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                due_s = loop.time() + POLL_S
                await asyncio.sleep(POLL_S)
                late_s = loop.time() - due_s
                if late_s > OVERSLEPT_S:
                    for watched in self._ranks.values():
                        watched.pace.forgive(late_s)
                self._note_late(loop.time())
                if asking is None or asking.done():
                    asking = tasks.create_task(self._ask(), name="stacks of late ranks")

    def _note_late(self, now_s: float) -> None:
        """Report each rank that became late since the last look, before its stacks are fetched."""
        late = []
        for rank, watched in self._ranks.items():
            if watched.stall is None and not watched.late and watched.pace.late_s(now_s) is not None:
                watched.late = True
                if (
                    self._actions.process(rank) == STOPPED
                ):  # a stopped process cannot dump its stacks, so its state is the only evidence
                    watched.evidence = _Evidence(process=STOPPED)
                late.append(rank)
        self._tell(self._generation, late)

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        while await self._look(loop.time()):
            pass  # repeat: more ranks are late by now, or too many were late to fetch at a time
        await self._evict(loop.time())

    async def _look(self, now_s: float) -> bool:
        """Fetch the stacks of late ranks, some at a time, and report each new stall; return False if nothing was
        fetched or reported.

        A rank's stacks are fetched when it becomes late, and once more when it has stalled.
        """
        generation = self._generation
        found: dict[int, Stall] = {}
        late: set[int] = set()
        for rank, watched in self._ranks.items():
            if watched.stall is None and (stall := watched.pace.stall(now_s, self._limits)) is not None:
                watched.stall, watched.since_s = stall, now_s
                found[rank] = stall
            elif watched.late and not watched.fetched:
                late.add(rank)
        if not (found or late):
            return False
        moved = {rank: (watched.pace.step, watched.pace.phase) for rank, watched in self._ranks.items()}
        chosen = sorted([*found, *late], key=lambda rank: (rank not in found, moved[rank], rank))[:STACKS]
        seen = await asyncio.gather(*(self._evidence(rank, stalled=rank in found) for rank in chosen))
        if generation != self._generation:
            return True
        held = sum(
            1 for rank, watched in self._ranks.items() if watched.evidence.stack and rank not in chosen
        )
        for rank, evidence in zip(chosen, seen, strict=True):
            now = self._ranks.get(rank)
            if now is None or (now.pace.step, now.pace.phase) != moved[rank]:
                continue  # the rank made progress meanwhile
            if evidence.stack:
                held += 1
            now.fetched, now.evidence = (
                True,
                evidence if held <= STACKS else replace(evidence, stack=""),
            )
        still = [rank for rank, stall in found.items() if self._stall_of(rank) is stall]
        self._warn(generation, still)
        self._tell(generation, [*still, *(rank for rank in chosen if rank in late and self._is_late(rank))])
        return True

    def _stall_of(self, rank: int) -> Stall | None:
        watched = self._ranks.get(rank)
        return watched.stall if watched is not None else None

    def _is_late(self, rank: int) -> bool:
        return rank in self._ranks and self._ranks[rank].late and self._ranks[rank].stall is None

    def _tell(self, generation: int, ranks: Sequence[int]) -> None:
        """Report for how long these ranks have made no progress, and the evidence found."""
        if ranks:
            now_s = asyncio.get_running_loop().time()
            ages_ms = {rank: round(1000 * self._ranks[rank].pace.still_s(now_s)) for rank in ranks}
            self._actions.tell(
                generation, [self._message(rank, self._ranks[rank], age_ms=ages_ms[rank]) for rank in ranks]
            )

    def _warn(self, generation: int, ranks: Sequence[int]) -> None:
        for rank in ranks:
            watched = self._ranks[rank]
            assert watched.stall is not None
            evidence = watched.evidence
            self._actions.log.warning(
                "rank.stalled",
                rank=rank,
                generation=generation,
                step=watched.stall.step,
                phase=watched.stall.phase,
                reason=watched.stall.reason,
                stack=evidence.stack or None,
                trace=str(evidence.trace[0]) if evidence.trace else None,
            )

    async def _evidence(self, rank: int, *, stalled: bool) -> _Evidence:
        """Return a rank's evidence; a recording only if it has stalled."""
        process = self._actions.process(rank)
        if process == STOPPED:
            return _Evidence(process=process)  # a stopped process cannot dump its stacks
        trace = None
        if stalled:
            fetched, trace = await asyncio.gather(self._actions.stack(rank), self._actions.trace(rank))
        else:
            fetched = await self._actions.stack(rank)
        stack = fetched or ""
        return _Evidence(
            process=process,
            stack=shortened(stack, STACK_CHARS),
            where=innermost(stack),
            activity=activity(stack),
            trace=trace,
        )

    async def _evict(self, now_s: float) -> None:
        """Kill one local rank that blocks the others, once all ranks had time to stall.

        Only ranks that the coordinators blame are candidates, since coordinators see all ranks: a rank that stalls
        here may wait for a rank on another node that has not stalled. While no coordinator answers, no rank is killed:
        the ranks may have stalled because they wait for the coordinators, and a new generation needs coordinators, too.
        """
        still = {rank: watched for rank, watched in self._ranks.items() if watched.stall is not None}
        evict = self._actions.evict
        if evict is None or self._evicted or not still:
            return
        if now_s - min(watched.since_s for watched in still.values()) < EVICT_AFTER_S:
            return
        generation = self._generation
        blamed = await self._actions.blame()
        if blamed is None:
            self._unanswered_s = asyncio.get_running_loop().time()
        if now_s - self._unanswered_s < EVICT_AFTER_S:
            return  # the ranks may make progress, now that a coordinator answers
        if not blamed or generation != self._generation:
            return
        still = {rank: watched for rank, watched in still.items() if watched.stall is not None}
        if not still.keys() & blamed:
            return  # another node's rank: its agent handles it
        named, how = suspects(
            [
                RankReport(
                    rank=rank,
                    step=w.pace.step,
                    phase=w.pace.phase,
                    age_ms=0,
                    where=w.evidence.where,
                    activity=w.evidence.activity,
                    process=w.evidence.process,
                )
                for rank, w in still.items()
                if rank in blamed
            ]
        )
        for rank in named[:1]:
            if (stall := still[rank].stall) is not None:
                evict(rank, generation, f"stalled: {stall.reason}" + (f" ({how})" if how else ""))
                self._evicted = True


async def kept(watch: Callable[[], Awaitable[None]], log: Log) -> None:
    """Run a watch, and restart it after an exception: a bug in the watch must not end the training."""
    while True:
        try:
            await watch()
        except Exception:  # noqa: BLE001
            # restart a minute later, so that a permanent bug does not fill the log
            log.warning("health.watch_failed", reason=traceback.format_exc())
            await asyncio.sleep(60)


def _us(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1e6)
