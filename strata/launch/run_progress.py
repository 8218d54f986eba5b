"""The status line of `strata run`: the progress of this node's ranks, in one line on a terminal.

All of its data passes through this agent anyway, so the agent queries no coordinator.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Protocol

from google.protobuf.message import Message
from rich.console import Console
from rich.text import Text

from strata.launch.bottom_line import BottomLine
from strata.observe.bars import bar
from strata.observe.words import age, figure, percent, printable, span
from strata.v1.checkpoints_pb2 import CHECKPOINT_STATE_COMMITTED, Checkpoint
from strata.v1.members_pb2 import RankProgress, TrainingReport

EVERY_S: Final = 1.0
RATE_S: Final = 30.0
"""The time over which the rate of steps is measured."""
MAX_VALUES: Final = 2
MAX_NAME: Final = 24


class Upstream(Protocol):
    """The receiver that `Listening` passes calls on to."""

    def progress(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        """Report the progress of ranks."""
        ...

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to `request`, which must be of a kind that a session carries."""
        ...


class RunProgress:
    """The progress known of the current generation's ranks on this node."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._generation = 0
        self._ranks: dict[int, RankProgress] = {}
        self._stuck_since_s: dict[int, float] = {}
        """When each stuck rank last moved, by the clock of the `now_s` that `record` and `line` get."""
        self._training: TrainingReport | None = None
        self._steps: deque[tuple[float, int]] = deque()
        self._saved: int | None = None

    def begin(self, generation: int) -> None:
        """Show the ranks of this generation from now on; 0 means there are none."""
        if generation != self._generation:
            self._generation = generation
            self._ranks.clear()
            self._stuck_since_s.clear()
            self._steps.clear()
            self._training = None

    def record(self, generation: int, ranks: Sequence[RankProgress], now_s: float) -> None:
        """Record the progress that ranks report."""
        if generation != self._generation:
            return
        for one in ranks:
            self._note_stuck(one, now_s)
            self._ranks[one.rank] = one
            if one.HasField("training"):
                self._training = one.training
        step = min(one.step for one in self._ranks.values())
        if self._steps and step < self._steps[-1][1]:
            self._steps.clear()  # the first report of a rank that is further behind
        if not self._steps or step != self._steps[-1][1]:
            self._steps.append((now_s, step))
        while len(self._steps) > 2 and now_s - self._steps[0][0] > RATE_S:
            self._steps.popleft()

    def _note_stuck(self, report: RankProgress, now_s: float) -> None:
        """Record since when a rank is stuck; its agent reports this only once, however long the rank stays stuck."""
        before, since_s = self._ranks.get(report.rank), self._stuck_since_s.pop(report.rank, now_s)
        if not report.stalled_ms:
            return
        moved = before is None or (before.step, before.phase) != (report.step, report.phase)
        moved_s = now_s - max(report.stalled_ms, report.age_ms) / 1000
        self._stuck_since_s[report.rank] = moved_s if moved else min(moved_s, since_s)

    def committed(self, checkpoint: Checkpoint) -> None:
        """Record the step of a checkpoint if it is committed."""
        if checkpoint.state == CHECKPOINT_STATE_COMMITTED:
            self._saved = max(checkpoint.step, self._saved or 0)

    def line(self, width: int, now_s: float) -> Text | None:
        """Return the line, at most `width` wide; None before a rank has made a step."""
        if not self._steps or self._steps[-1][1] == 0:
            return None
        step, rate = self._steps[-1][1], self._rate(now_s)
        training = self._training
        target = training.target_step if training is not None else 0
        ahead: list[str] = []
        behind: list[str] = []
        if target:
            ahead.append(percent(min(1.0, step / target)))
            if rate:
                ahead.append(f"ETA {span(1000 * max(0, target - step) / rate)}")
        if rate:
            behind.append(f"{figure(rate)} steps/s")
        behind += self._reported()
        if self._saved is not None:
            behind.append(f"saved {self._saved:,}")
        name = Text(printable(self._job))
        name.truncate(MAX_NAME, overflow="ellipsis")
        text = Text(no_wrap=True).append(name.plain, "bold")
        if self._stuck_since_s:
            rank, since_s = min(self._stuck_since_s.items(), key=lambda item: item[1])
            where = printable(self._ranks[rank].phase) or "a step"
            text.append(f"  rank {rank} stuck in {where} for {age(1000 * (now_s - since_s))}", "bold red")
        text.append(f"  step {step:,} of {target:,} " if target else f"  step {step:,}")
        after = "".join(f"  {words}" for words in (*ahead, *behind))[1 if target else 0 :]
        free = width - text.cell_len - len(after)
        if target and free >= 6:
            done, to_do = bar(step / target, min(free, 30))
            text.append(done, "green")
            text.append(to_do, "dim")
        text.append(after)
        text.truncate(max(0, width), overflow="ellipsis")
        return text

    def _rate(self, now_s: float) -> float | None:
        """Return steps a second over the last `RATE_S`, up to now, so that a stalled rank lowers the rate."""
        if len(self._steps) < 2:
            return None
        (begin_s, first), (last_s, last) = self._steps[0], self._steps[-1]
        usual_s = (last_s - begin_s) / max(1, last - first)
        until_s = last_s if now_s - last_s < 2 * max(usual_s, EVERY_S) else now_s
        return (last - first) / (until_s - begin_s) if until_s > begin_s and last > first else None

    def _reported(self) -> list[str]:
        values: Mapping[str, float] = self._training.reported if self._training is not None else {}
        names = sorted(values, key=lambda name: ("loss" not in name, name))
        return [f"{printable(name)} {figure(values[name])}" for name in names[:MAX_VALUES]]


class Listening:
    """Passes ranks' reports on to the coordinators, and records what the line shows."""

    def __init__(self, upstream: Upstream, progress: RunProgress) -> None:
        self._upstream, self._progress = upstream, progress

    def progress(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        self._progress.record(generation, ranks, asyncio.get_running_loop().time())
        self._upstream.progress(generation, ranks)

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        return await self._upstream.call(request, timeout_s=timeout_s)


@asynccontextmanager
async def shown(progress: RunProgress, stream: int, *, wanted: bool) -> AsyncIterator[None]:
    """Show the line on the terminal `stream` inside the block; nothing if not `wanted` or `stream` is no terminal."""
    bottom = BottomLine.of(stream, os.environ) if wanted else None
    if bottom is None:
        yield
        return
    loop = asyncio.get_running_loop()
    drawing = asyncio.create_task(_draw(progress, bottom), name="status line")

    def stop() -> None:
        """Suspend on Ctrl-Z without leaving the line on the terminal."""
        bottom.clear()
        loop.remove_signal_handler(signal.SIGTSTP)
        signal.raise_signal(signal.SIGTSTP)  # returns here after SIGCONT
        loop.add_signal_handler(signal.SIGTSTP, stop)

    loop.add_signal_handler(signal.SIGCONT, bottom.renew)
    loop.add_signal_handler(signal.SIGTSTP, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGCONT)
        loop.remove_signal_handler(signal.SIGTSTP)
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        bottom.close()


async def _draw(progress: RunProgress, bottom: BottomLine) -> None:
    console = Console(force_terminal=True, highlight=False, emoji=False, markup=False, width=1000)
    while True:
        line = progress.line(bottom.width, asyncio.get_running_loop().time())
        if line is None:
            bottom.clear()
        else:
            with console.capture() as drawn:
                console.print(line, end="", soft_wrap=True)
            bottom.show(drawn.get())
        await asyncio.sleep(EVERY_S)
