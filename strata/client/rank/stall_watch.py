"""The watch over ranks that live but do nothing: an agent's over its own.

It hears what each rank says on its way up (`core.health.stalls` has the rules), adds how long steps take,
and looks twice a second who is late, and who has stood still for too long. It tells of a late rank at once: an agent
that reports no late rank is taken for one that can report nothing. Then the rank is asked where its threads
are, and one that stands still also what its communication library recorded, which may take seconds and holds up no
look; both go up as soon as they are there, so that any replica can tell who holds up whom. With `evict` the rank that seems to hold up the others is killed, which
ends the generation: one restart instead of a hang of hours.

What it decides costs nobody's life by default: a long evaluation that was told as a step is reported,
and the report ends by itself when the rank moves.
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

LOOK_S: Final = 0.5
"""How often it looks who is late, and who stands still."""
OVERSLEPT_S: Final = 0.5
"""A look that came later than this tells of our own stall: nobody is blamed for that time."""
STACKS: Final = 16
"""At most so many stacks are asked for at a time, and told of: hundreds of slots may stand still. Where the main
thread stands is told of all that were asked."""
STACK_CHARS: Final = 4000
EVICT_AFTER_S: Final = 3.0
"""Between the first stall and the eviction: others come to stand still in the same moments, and who
holds up whom shows only then."""

Tell = Callable[[int, Sequence[RankProgress]], None]
"""Called with (generation, ranks): tells the coordinators."""


class Log(Protocol):
    """Where people read what the watch finds: an event and its facts."""

    def info(self, event: str, **facts: Any) -> None:
        """Say what has become better."""
        ...

    def warning(self, event: str, **facts: Any) -> None:
        """Say what is wrong."""
        ...


@dataclass(slots=True, kw_only=True)
class Actions:
    """What the watch may do; the supervisor's other parts do it."""

    log: Log
    tell: Tell
    stack: Callable[[int], Awaitable[str | None]]
    """Returns the stacks of a rank's threads, or None when it cannot tell."""
    trace: Callable[[int], Awaitable[tuple[Path, int] | None]]
    """Returns where the recording of a rank's communication lies and its size, if there is one."""
    evict: Callable[[int, int, str], None] | None
    """Kills (rank, generation) for a reason; None: ranks are only reported."""
    process: Callable[[int], str] = lambda _rank: ""
    """Returns the state of a rank's process, as `RankProgress.process` has it; "" when it cannot tell."""
    blame: Callable[[], Awaitable[Collection[int] | None]]
    """Returns the ranks that hold up the others, of the whole world, if that shows; None: nobody answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evidence:
    """What a rank that does not move was found to do: its process's state, and where its threads are."""

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
    """Whether it has not moved for clearly longer than usual."""
    asked: bool = False
    """Whether it was asked where it stands, since it is late."""
    evidence: _Evidence = _Evidence()
    since_s: float = 0.0
    """When the stall was found."""
    times: StepTimes | None = None
    """What its steps cost it, in its own last words."""
    save_hold: SaveHold | None = None
    """Why it cannot save for now, in its own last words."""
    own_us: deque[int] = field(default_factory=lambda: deque(maxlen=KEPT))
    """How long the rank says its own part of its steps took, without waiting for others."""


class StallWatch:
    """Watches the ranks of one generation at a time. `run` is its life; the rest is told to it."""

    def __init__(self, limits: StallLimits, actions: Actions) -> None:
        self._limits = limits
        self._actions = actions
        self._generation = 0
        self._ranks: dict[int, _Watched] = {}
        self._evicted = False
        """Whether a rank of this generation was: one is enough to end it."""
        self._unanswered_s = -EVICT_AFTER_S

    # -- what it is told

    def watch(self, generation: int) -> None:
        """Watch the ranks of this generation from now on, and no others; 0: nobody."""
        self._generation = generation
        self._evicted = False
        self._ranks.clear()

    def hear(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        """Take note of what ranks say, and pass it on with how long their steps take."""
        if generation == self._generation:
            ranks = [self._heard(rank) for rank in ranks]
        self._actions.tell(generation, ranks)

    def gone(self, generation: int, rank: int) -> None:
        """Watch a rank no more that has said farewell."""
        if generation == self._generation:
            self._ranks.pop(rank, None)

    def _heard(self, said: RankProgress) -> RankProgress:
        now_s = asyncio.get_running_loop().time()
        watched = self._ranks.setdefault(said.rank, _Watched())
        before = watched.pace.step
        if watched.pace.hear(said.step, said.phase, now_s - max(0, said.age_ms) / 1000):
            if watched.stall is not None:
                self._actions.log.info(
                    "rank.moves_again",
                    rank=said.rank,
                    step=said.step,
                    stood_still_s=round(watched.stall.still_s + now_s - watched.since_s, 1),
                )
            watched.stall, watched.evidence = None, _Evidence()
            watched.late = watched.asked = False
        if said.step_us > 0 and said.step != before:
            watched.own_us.append(said.step_us)
        if said.HasField("step_times"):
            watched.times = said.step_times
        self._note_hold(watched, said)
        told = RankProgress()
        told.CopyFrom(said)  # with what is none of this watch's business
        told.MergeFrom(self._message(said.rank, watched, age_ms=said.age_ms))
        return told

    def _note_hold(self, watched: _Watched, said: RankProgress) -> None:
        before, now = watched.save_hold, said.save_hold if said.HasField("save_hold") else None
        watched.save_hold = now
        if now is not None and (before is None or before.reason != now.reason):
            self._actions.log.warning(
                "rank.saves_held", rank=said.rank, step=now.step, reason=now.reason, host=now.host
            )
        elif now is None and before is not None:
            self._actions.log.info("rank.saves_again", rank=said.rank, step=before.step)

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

    # -- its life

    async def run(self) -> None:
        """Look twice a second who stands still, until cancelled."""
        loop = asyncio.get_running_loop()
        asking: asyncio.Task[None] | None = None
        async with asyncio.TaskGroup() as tasks:
            while True:
                due_s = loop.time() + LOOK_S
                await asyncio.sleep(LOOK_S)
                late_s = loop.time() - due_s
                if late_s > OVERSLEPT_S:
                    for watched in self._ranks.values():
                        watched.pace.forgive(late_s)
                self._note_late(loop.time())
                if asking is None or asking.done():
                    asking = tasks.create_task(self._ask(), name="where late ranks stand")

    def _note_late(self, now_s: float) -> None:
        """Tell of each rank that has become late since the last look, before anybody asks where it stands."""
        late = []
        for rank, watched in self._ranks.items():
            if watched.stall is None and not watched.late and watched.pace.late_s(now_s) is not None:
                watched.late = True
                if (
                    self._actions.process(rank) == STOPPED
                ):  # it is not asked anything: that is all there is to know
                    watched.evidence = _Evidence(process=STOPPED)
                late.append(rank)
        self._tell(self._generation, late)

    async def _ask(self) -> None:
        loop = asyncio.get_running_loop()
        while await self._look(loop.time()):
            pass  # others have become late meanwhile, or are too many to be asked at a time
        await self._evict(loop.time())

    async def _look(self, now_s: float) -> bool:
        """Ask late ranks where they stand, some at a time, and report each that has come to stand still; False if none.

        A rank is asked where it stands when it is late, and once more when that is a stall.
        """
        generation = self._generation
        found: dict[int, Stall] = {}
        late: set[int] = set()
        for rank, watched in self._ranks.items():
            if watched.stall is None and (stall := watched.pace.stall(now_s, self._limits)) is not None:
                watched.stall, watched.since_s = stall, now_s
                found[rank] = stall
            elif watched.late and not watched.asked:
                late.add(rank)
        if not (found or late):
            return False
        moved = {rank: (watched.pace.step, watched.pace.phase) for rank, watched in self._ranks.items()}
        asked = sorted([*found, *late], key=lambda rank: (rank not in found, moved[rank], rank))[:STACKS]
        seen = await asyncio.gather(*(self._evidence(rank, stalled=rank in found) for rank in asked))
        if generation != self._generation:
            return True
        held = sum(1 for rank, watched in self._ranks.items() if watched.evidence.stack and rank not in asked)
        for rank, evidence in zip(asked, seen, strict=True):
            now = self._ranks.get(rank)
            if now is None or (now.pace.step, now.pace.phase) != moved[rank]:
                continue  # it moved while it was asked
            if evidence.stack:
                held += 1
            now.asked, now.evidence = True, evidence if held <= STACKS else replace(evidence, stack="")
        still = [rank for rank, stall in found.items() if self._stall_of(rank) is stall]
        self._warn(generation, still)
        self._tell(generation, [*still, *(rank for rank in asked if rank in late and self._is_late(rank))])
        return True

    def _stall_of(self, rank: int) -> Stall | None:
        watched = self._ranks.get(rank)
        return watched.stall if watched is not None else None

    def _is_late(self, rank: int) -> bool:
        return rank in self._ranks and self._ranks[rank].late and self._ranks[rank].stall is None

    def _tell(self, generation: int, ranks: Sequence[int]) -> None:
        """Tell for how long these ranks have not moved, and what is known of them."""
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
        """Return what a rank does, and of a stalled one its recording."""
        process = self._actions.process(rank)
        if process == STOPPED:
            return _Evidence(process=process)  # it answers nothing
        trace = None
        if stalled:
            told, trace = await asyncio.gather(self._actions.stack(rank), self._actions.trace(rank))
        else:
            told = await self._actions.stack(rank)
        stack = told or ""
        return _Evidence(
            process=process,
            stack=shortened(stack, STACK_CHARS),
            where=innermost(stack),
            activity=activity(stack),
            trace=trace,
        )

    async def _evict(self, now_s: float) -> None:
        """Kill one of the ranks here that hold up the others, once all had time to come to stand still.

        Of those whom the coordinators blame, who know all ranks: what stands still here may wait for one elsewhere
        that moves. While none answers nobody is killed: ranks may stand still because they wait for them, and a
        new generation needs them, too.
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
            return  # they may move, now that somebody is there
        if not blamed or generation != self._generation:
            return
        still = {rank: watched for rank, watched in still.items() if watched.stall is not None}
        if not still.keys() & blamed:
            return  # another node's rank: its supervisor sees to it
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
    """Run a watch, and begin it anew after a bug: it must not end the training that it watches."""
    while True:
        try:
            await watch()
        except Exception:  # noqa: BLE001
            # as the docstring says; a minute later, so that it does not fill the log
            log.warning("health.watch_failed", reason=traceback.format_exc())
            await asyncio.sleep(60)


def _us(seconds: float | None) -> int:
    return 0 if seconds is None else round(seconds * 1e6)
