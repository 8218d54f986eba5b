"""A long run: campaigns take turns until the time is over, and the ledger keeps what they tried.

Two lanes run at once. In one, schedules, crash rounds and mixed chaos take turns. In the other, the simulation runs on
the processor time that they leave idle. Each turn is one child process; its span is written to the ledger as soon as
it has ended, so a run that is killed loses its last turns only.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from strata.launch.children import Child
from tests.sim import revisions
from tests.soak.campaigns import Campaign, Outcome, Turn
from tests.soak.ledger import Ledger, Open, Span

OVERTIME = 4.0
"""A turn is stopped after so many times what it takes on an idle machine."""
END_S = 60.0
"""What a turn gets to end in good order when the run is interrupted."""
LOOK_S = 0.2


class TurnFailedError(Exception):
    """A turn ended without a result that says anything."""


@dataclass(slots=True, kw_only=True)
class Soak:
    """One long run. `stop` may be set from anywhere, a signal handler included."""

    campaigns: Sequence[Campaign]
    commit: str
    """The revision that runs, as the ledger names it."""
    ledger: Path
    kept: Path
    """The folder for what failed."""
    until: float
    """On the monotonic clock."""
    say: Callable[[str], None]
    stop: threading.Event = field(default_factory=threading.Event)
    spans: list[Span] = field(default_factory=list)
    """What this run has tried."""
    troubles: list[str] = field(default_factory=list)
    """Turns that ended without a result."""
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
        broken: set[str] = set()
        for campaign in itertools.cycle(campaigns):
            left_s = self.until - time.monotonic()
            fit = [c for c in campaigns if c.name not in broken and c.turn_s <= left_s]
            if self.stop.is_set() or not fit:
                return
            if campaign not in fit:
                continue
            try:
                self._turn(campaign)
            except (TurnFailedError, OSError) as error:
                if not self.stop.is_set():
                    broken.add(campaign.name)
                    self._trouble(f"{campaign.name}: {error}; it gets no further turn")

    def _turn(self, campaign: Campaign) -> None:
        turn = self._begin(campaign)
        command = campaign.command(turn)
        log = turn.folder / "log"
        child = Child.start(command, name=f"{campaign.name} {turn.first}", env=_environment(), log=log)
        try:
            self._wait(child, time.monotonic() + OVERTIME * campaign.turn_s)
        finally:
            child.stop()
        if self.stop.is_set():
            shutil.rmtree(turn.folder, ignore_errors=True)
            return
        try:
            outcome = campaign.outcome(json.loads(turn.json.read_text()), turn)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise TurnFailedError(
                f"seed {turn.first} {child.describe()} and left no result ({error!r}); see {log}"
            ) from None
        self._end(campaign, turn, outcome)

    def _begin(self, campaign: Campaign) -> Turn:
        with self._lock:
            first = self._next.get(campaign.name) or Ledger.read(self.ledger).next_seed(
                campaign.name, campaign.first
            )
            self._next[campaign.name] = first + campaign.seeds
        folder = self.kept / f"{campaign.name}-{first}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return Turn(first=first, seeds=campaign.seeds, json=folder / "result.json", folder=folder)

    def _wait(self, child: Child, until: float) -> None:
        while not self.stop.is_set() and time.monotonic() < until:
            try:
                child.join(LOOK_S)
            except TimeoutError:
                continue
            return
        child.send_signal(signal.SIGINT)
        try:
            child.join(END_S)
        except TimeoutError:
            child.kill()

    def _end(self, campaign: Campaign, turn: Turn, outcome: Outcome) -> None:
        span = Span(
            campaign=campaign.name,
            first=turn.first,
            last=turn.first + turn.seeds - 1,
            commit=self.commit,
            effective=outcome.effective,
            hours=outcome.hours,
            failed=tuple(sorted(outcome.failed)),
        )
        failures = [
            Open(campaign=campaign.name, seed=seed, commit=self.commit, why=why)
            for seed, why in outcome.failed.items()
        ]
        with self._lock:
            self.spans.append(span)
            Ledger.read(self.ledger).with_span(span).with_open(failures).write(self.ledger)
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

    def _trouble(self, text: str) -> None:
        with self._lock:
            self.troubles.append(text)
        self.say(text)


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{revisions.ROOT}:{revisions.ROOT / 'chaos'}"}


def mended(ledger: Ledger, holds: Callable[[int], bool]) -> Ledger:
    """Return the ledger without the open seeds of the simulation that hold now: each repeats itself exactly."""
    for one in ledger.open:
        if one.campaign == "simulation" and holds(one.seed):
            ledger = ledger.without_open(one.campaign, one.seed)
    return ledger


def table(spans: Sequence[Span]) -> str:
    """Return what these spans sum up to, one line a campaign."""
    rows = [("campaign", "seeds", "effective faults", "hours", "failed")]
    for name in sorted({span.campaign for span in spans}):
        mine = [span for span in spans if span.campaign == name]
        rows.append(
            (
                name,
                str(sum(span.seeds for span in mine)),
                str(sum(span.effective for span in mine)),
                f"{sum(span.hours for span in mine):.1f}",
                str(sum(len(span.failed) for span in mine)),
            )
        )
    return "\n".join("{:12}{:>9}{:>18}{:>9}{:>8}".format(*row) for row in rows)
