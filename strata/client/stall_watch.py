"""The watch over ranks that live but do nothing: a supervisor's over its own, a lone trainer's over itself.

It hears what each rank says on its way up (`core.stalls` has the rules), adds how long steps take,
and looks once a second who has stood still for too long. Such a rank is asked where its threads are
and what its communication library recorded; both go up with its next word, so that the status page
of any replica shows them. With `evict` the rank that seems to hold up the others is killed, which
ends the generation: one restart instead of a hang of hours.

What it decides costs nobody's life by default: a long evaluation that was told as a step is reported,
and the report ends by itself when the rank moves.
"""

from __future__ import annotations

import asyncio
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final, Protocol

from strata.core.stalls import KEPT, RankPace, Stall, StallLimits, Standing, innermost, shortened, suspects
from strata.v1.members_pb2 import RankProgress, SaveHold

LOOK_S: Final = 1.0
"""How often it looks who stands still."""
LATE_S: Final = 0.5
"""A look that came later than this tells of our own stall: nobody is blamed for that time."""
STACKS: Final = 16
"""At most so many stacks are asked for at a time, and told of: hundreds of slots may stand still."""
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
    blame: Callable[[], Awaitable[Collection[int] | None]]
    """Returns the ranks that hold up the others, of the whole world, if that shows; None: nobody answers."""


@dataclass(slots=True)
class _Watched:
    pace: RankPace = field(default_factory=RankPace)
    stall: Stall | None = None
    stack: str = ""
    trace: tuple[Path, int] | None = None
    since_s: float = 0.0
    """When the stall was found."""
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
            watched.stall, watched.stack, watched.trace = None, "", None
        if said.step_us > 0 and said.step != before:
            watched.own_us.append(said.step_us)
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
        pace, stall = watched.pace, watched.stall
        trace, trace_bytes = watched.trace or ("", 0)
        return RankProgress(
            rank=rank,
            step=pace.step,
            phase=pace.phase,
            age_ms=age_ms,
            step_us=watched.own_us[-1] if watched.own_us else _us(pace.last_step_s),
            median_step_us=round(median(watched.own_us)) if watched.own_us else _us(pace.usual_s()),
            stalled_ms=max(1, round(stall.still_s * 1000)) if stall is not None else 0,
            stack=watched.stack,
            trace_file=str(trace),
            trace_bytes=trace_bytes,
            save_hold=watched.save_hold,
        )

    # -- its life

    async def run(self) -> None:
        """Look once a second who stands still, until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due_s = loop.time() + LOOK_S
            await asyncio.sleep(LOOK_S)
            late_s = loop.time() - due_s
            if late_s > LATE_S:
                for watched in self._ranks.values():
                    watched.pace.forgive(late_s)
            await self._look(loop.time())
            await self._evict(loop.time())

    async def _look(self, now_s: float) -> None:
        """Report each rank that has come to stand still since the last look."""
        generation = self._generation
        found: dict[int, Stall] = {}
        for rank, watched in self._ranks.items():
            if watched.stall is None and (stall := watched.pace.stall(now_s, self._limits)) is not None:
                watched.stall, watched.since_s = stall, now_s
                found[rank] = stall
        if not found:
            return
        held = sum(1 for watched in self._ranks.values() if watched.stack)
        asked = sorted(found, key=lambda rank: (found[rank].step, rank))[: max(0, STACKS - held)]
        evidence = await asyncio.gather(*map(self._evidence, asked))
        if generation != self._generation:
            return
        for rank, (stack, trace) in zip(asked, evidence, strict=True):
            now = self._ranks.get(rank)
            if now is not None and now.stall is found[rank]:
                now.stack, now.trace = shortened(stack, STACK_CHARS), trace
        self._report(generation, found, asyncio.get_running_loop().time() - now_s)

    def _report(self, generation: int, found: dict[int, Stall], passed_s: float) -> None:
        told = []
        for rank, stall in found.items():
            watched = self._ranks.get(rank)
            if watched is None or watched.stall is not stall:
                continue  # it moved while it was asked
            self._actions.log.warning(
                "rank.stalled",
                rank=rank,
                generation=generation,
                step=stall.step,
                phase=stall.phase,
                reason=stall.reason,
                stack=watched.stack or None,
                trace=str(watched.trace[0]) if watched.trace else None,
            )
            told.append(self._message(rank, watched, age_ms=round(1000 * (stall.still_s + passed_s))))
        if told:
            self._actions.tell(generation, told)

    async def _evidence(self, rank: int) -> tuple[str, tuple[Path, int] | None]:
        stack, trace = await asyncio.gather(self._actions.stack(rank), self._actions.trace(rank))
        return stack or "", trace

    async def _evict(self, now_s: float) -> None:
        """Kill one of the ranks here that hold up the others, once all had time to come to stand still.

        Whom the coordinators blame, who know all ranks; if they blame nobody, whom those of this node point
        to. While none answers nobody is killed: ranks may stand still because they wait for them, and a new
        generation needs them, too.
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
        if blamed is None or generation != self._generation:
            return
        still = {rank: watched for rank, watched in still.items() if watched.stall is not None}
        if blamed and not still.keys() & blamed:
            return  # another node's rank: its supervisor sees to it
        named, how = suspects(
            [
                Standing(rank=rank, step=w.pace.step, phase=w.pace.phase, where=innermost(w.stack))
                for rank, w in still.items()
                if not blamed or rank in blamed
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
