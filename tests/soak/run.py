"""A long run: campaigns take turns until the time is over, and the ledger records the tried seeds.

Two lanes run in parallel. In the first, schedules, crash rounds, rank kills and mixed chaos take turns. The second
runs the simulation on the processor time that the first leaves idle. Each turn is one child process. As soon as a
turn has ended, its span is written to the ledger, so a killed run loses only the turns in progress.

A turn that ends without a result has failed too: its first seed becomes open, and the next turn begins after that
seed.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import tempfile
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strata.processes.children import Child
from tests.sim.seeds import revisions
from tests.soak.campaigns import Campaign, Outcome, Turn
from tests.soak.ledger import Ledger, Open, Span, change

OVERTIME_S = 1800.0
"""A turn counts as hung after this time, however busy the machine is. The longest takes six minutes on an idle
machine."""
END_S = 60.0
"""How long a turn may take to shut down cleanly when the run is interrupted."""
POLL_S = 0.2
NO_RESULT = "no result"
"""The start of the reason of a turn that ended without a result: its first seed proves nothing by itself."""
GIVE_UP = 3
"""A campaign gets no further turn after this many in a row without a result."""


@dataclass(slots=True, kw_only=True)
class Soak:
    """One long run. `stop` may be set from anywhere, a signal handler included."""

    campaigns: Sequence[Campaign]
    commit: str
    """The revision under test, as the ledger names it."""
    ledger: Path
    kept: Path
    """The folder for the files of failed turns."""
    left_s: Callable[[], float]
    """Returns how much time is left; a turn begins only if it fits."""
    say: Callable[[str], None]
    overtime_s: float = OVERTIME_S
    stop: threading.Event = field(default_factory=threading.Event)
    spans: list[Span] = field(default_factory=list)
    """The spans that this run has tried."""
    broken: list[str] = field(default_factory=list)
    """The reasons why a lane or a campaign ended before the time was over."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _next: dict[str, int] = field(default_factory=dict)

    def run(self) -> None:
        """Return when the time is over, `stop` is set, or no turn fits in the time that is left."""
        lanes = [
            threading.Thread(target=self._lane, args=(lane,))
            for lane in (
                [c for c in self.campaigns if not c.beside],
                [c for c in self.campaigns if c.beside],
            )
            if lane
        ]
        for lane in lanes:
            lane.start()
        for lane in lanes:
            lane.join()

    def _lane(self, campaigns: Sequence[Campaign]) -> None:
        without_result = dict.fromkeys((campaign.name for campaign in campaigns), 0)
        try:
            for campaign in itertools.cycle(campaigns):
                left_s = self.left_s()
                fit = [c for c in campaigns if without_result[c.name] < GIVE_UP and c.turn_s <= left_s]
                if self.stop.is_set() or not fit:
                    return
                if campaign in fit:
                    had_result = self._turn(campaign)
                    without_result[campaign.name] = 0 if had_result else without_result[campaign.name] + 1
                    if without_result[campaign.name] == GIVE_UP:
                        self._break(f"{campaign.name} gets no further turn: {GIVE_UP} left no result")
        except Exception:  # noqa: BLE001  # the other lane goes on, and the run ends with what this one says
            self._break(f"a lane broke down: {traceback.format_exc()}")

    def _turn(self, campaign: Campaign) -> bool:
        """Run a turn and record it; return True if it had a result."""
        turn = self._begin(campaign)
        log = turn.folder / "log"
        child = Child.start(
            campaign.command(turn), name=f"{campaign.name} {turn.first}", env=_environment(), log=log
        )
        try:
            hung = not self._ended(child)
        finally:
            child.stop()
        try:
            outcome = campaign.outcome(json.loads(turn.json.read_text()), turn)
        except (OSError, ValueError, KeyError, TypeError) as error:
            if self.stop.is_set():
                self.say(f"{campaign.name} {turn.first}: interrupted; its log is {log}")
                return False
            how = f"was ended after {self.overtime_s:g} s" if hung else child.describe()
            last = turn.first + turn.seeds - 1
            why = f"{NO_RESULT} of {turn.first} to {last}: the turn {how} ({error!r})"
            self._end(campaign, turn, Outcome(0, 0.0, {turn.first: why}))
            return False
        self._end(campaign, turn, outcome)
        return True

    def _begin(self, campaign: Campaign) -> Turn:
        with self._lock:
            known = Ledger.read(self.ledger).next_seed(campaign.name, campaign.first)
            first = max(self._next.get(campaign.name, known), known)
            self._next[campaign.name] = first + campaign.seeds
        self.kept.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{campaign.name}-{first}-", dir=self.kept))
        return Turn(first=first, seeds=campaign.seeds, json=folder / "result.json", folder=folder)

    def _ended(self, child: Child) -> bool:
        """Return True once the turn has ended by itself.

        If the turn is hung or interrupted, end it and return False.
        """
        looks = int(self.overtime_s / POLL_S)
        for _ in range(looks):
            try:
                child.join(POLL_S)
            except TimeoutError:
                if self.stop.is_set():
                    break
            else:
                return True
        child.send_signal(signal.SIGINT)
        try:
            child.join(END_S)
        except TimeoutError:
            child.kill()
        return False

    def _end(self, campaign: Campaign, turn: Turn, outcome: Outcome) -> None:
        span = Span(
            campaign=campaign.name,
            first=turn.first,
            last=turn.first + turn.seeds - 1,
            commit=self.commit,
            effective=outcome.effective,
            seconds=round(outcome.seconds),
            failed=tuple(sorted(outcome.failed)),
        )
        failures = [
            Open(campaign=campaign.name, seed=seed, commit=self.commit, why=why)
            for seed, why in outcome.failed.items()
        ]
        with self._lock:
            self.spans.append(span)
            change(lambda ledger: ledger.with_span(span).with_open(failures), self.ledger)
        seeds = str(turn.first) if turn.seeds == 1 else f"{span.first} to {span.last}"
        verdict = f"{len(failures)} FAILED" if failures else "held"
        self.say(f"{campaign.name} {seeds}: {verdict}, {outcome.effective} effective faults")
        if not failures:
            shutil.rmtree(turn.folder, ignore_errors=True)
            return
        again = [f"# on {self.commit}\n{campaign.again.format(seed=one.seed)}\n" for one in failures]
        (turn.folder / "again").write_text("".join(again))
        for one in failures:
            self.say(f"  seed {one.seed}: {one.why}")
            self.say(f"  again: {campaign.again.format(seed=one.seed)}; kept: {turn.folder}")

    def _break(self, text: str) -> None:
        with self._lock:
            self.broken.append(text)
        self.say(text)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{revisions.ROOT}:{revisions.ROOT / 'chaos'}"}


def table(spans: Sequence[Span]) -> str:
    """Return the sums of these spans, one line a campaign."""
    rows = [("campaign", "seeds", "effective faults", "hours*", "failed")]
    for name in sorted({span.campaign for span in spans}):
        mine = [span for span in spans if span.campaign == name]
        rows.append(
            (
                name,
                str(sum(span.seeds for span in mine)),
                str(sum(span.effective for span in mine)),
                f"{sum(span.seconds for span in mine) / 3600:.1f}",
                str(sum(len(span.failed) for span in mine)),
            )
        )
    lines = ["{:12}{:>9}{:>18}{:>9}{:>8}".format(*row) for row in rows]
    return "\n".join([*lines, "* virtual ones for the simulation, of this machine for the others"])
