"""Stall detection: rules on the progress that ranks report of themselves.

A process that lives and answers pings may still do nothing: a deadlock, a lost collective, a loader
that waits for a dead disk. Only the rank's own reports show this. A rank reports (step, phase), and a *movement* is a
change of either. A rank stands still if it has not moved for longer than the limit of its phase:

- the limit that is configured for this phase, else
- `factor` times the median of the phase's usual duration (of a step, or of a whole stay in another
  phase), but at least `least_s`, once there are enough samples for a median, else
- a generous first limit: the first step and a compilation have nothing to be compared with.

In synchronous training one rank that stands still makes all the others wait at the same step, so by this rule all
ranks stand still. `core.health.attribution` determines which rank is to blame, as far as is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from strata.core.words import span

STEP: Final = "step"
"""The phase in which a rank runs only training steps; "train" is a synonym."""
_STEP_WORDS: Final = frozenset({"step", "train", "training", ""})

FIRST_S: Final[Mapping[str, float]] = {STEP: 600.0}
"""By phase: how long it may take before there is a median. All other phases have `FIRST_OTHER_S`."""
FIRST_OTHER_S: Final = 1800.0
MIN_SAMPLES: Final = 3
"""The samples needed for a median: the first step of a generation takes longer than all others."""
KEPT: Final = 64

LATE_S: Final = 2.0
LATE_FACTOR: Final = 3.0
"""A rank is late if it has not moved for this many times the usual duration of its phase, and at least `LATE_S`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """How long ranks may go without a movement."""

    least_s: float
    """The shortest limit derived from a median."""
    factor: float = 10.0
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    """By phase: configured limits."""

    @classmethod
    def derive(
        cls, detect_s: float, *, factor: float = 10.0, fixed_s: Mapping[str, float] | None = None
    ) -> StallLimits:
        """Return the limits derived from `detect_s`: the shortest limit is twice that."""
        return cls(least_s=2 * detect_s, factor=factor, fixed_s=dict(fixed_s or {}))

    def limit_s(self, kind: str, usual_s: float | None) -> tuple[float, str]:
        """Return the limit of a phase that usually takes `usual_s`, and its origin in words."""
        fixed_s = self.fixed_s.get(kind)
        if fixed_s is not None:
            return fixed_s, "as configured"
        if usual_s is None:
            first_s = FIRST_S.get(kind, FIRST_OTHER_S)
            return max(first_s, self.least_s), "nothing is known yet of how long it takes"
        limit_s = self.factor * usual_s
        if limit_s < self.least_s:
            return self.least_s, f"the minimum; it usually takes {span(usual_s)}"
        return limit_s, f"{self.factor:g} times the usual {span(usual_s)}"


def late_after_s(usual_s: float) -> float:
    """Return the time without movement after which a rank is late, if its phase usually takes `usual_s`."""
    return max(LATE_S, LATE_FACTOR * usual_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A rank that has stood still for longer than its phase may take."""

    step: int
    phase: str
    still_s: float
    reason: str


def kind_of(phase: str) -> str:
    """Return the kind of a reported phase: `eval 3/10` is `eval`."""
    word = phase.replace(":", " ").split(" ", 1)[0].strip().lower()
    return STEP if word in _STEP_WORDS else word


class RankPace:
    """The reports of one rank in one generation, and its usual durations. All times are arguments."""

    __slots__ = ("_durations", "_entered_s", "_moved_s", "_has_report", "last_step_s", "phase", "step")

    def __init__(self) -> None:
        self.step = 0
        self.phase = ""
        self._has_report = False
        self._moved_s = 0.0
        self._entered_s = 0.0
        self.last_step_s: float | None = None
        """The duration of the last step, as far as the duration could be measured."""
        self._durations: dict[str, deque[float]] = {}

    def observe(self, step: int, phase: str, now_s: float) -> bool:
        """Record the rank's step and phase as of `now_s`; return whether the rank moved."""
        if self._has_report and (step, phase) == (self.step, self.phase):
            return False
        before, now = kind_of(self.phase), kind_of(phase)
        if self._has_report:
            if before == now == STEP and step > self.step:
                self.last_step_s = max(0.0, now_s - self._moved_s) / (step - self.step)
                self._note(STEP, self.last_step_s)
            elif before not in {STEP, now}:
                self._note(before, max(0.0, now_s - self._entered_s))
        if before != now or not self._has_report:
            self._entered_s = now_s
        self.step, self.phase, self._moved_s, self._has_report = step, phase, now_s, True
        return True

    def forgive(self, seconds: float) -> None:
        """Exclude `seconds` from all durations: the process that receives the reports did not run in that time."""
        self._moved_s += seconds
        self._entered_s += seconds

    def usual_s(self, kind: str = STEP) -> float | None:
        """Return the median duration of a step, or of a stay in another phase; None while unknown."""
        known = self._durations.get(kind, ())
        return median(known) if len(known) >= (MIN_SAMPLES if kind == STEP else 1) else None

    def still_s(self, now_s: float) -> float:
        """Return for how many seconds the rank has not moved."""
        return max(0.0, now_s - self._moved_s)

    def late_s(self, now_s: float) -> float | None:
        """Return for how many seconds the rank has not moved, if clearly longer than usual; else None.

        Lateness is no stall yet, and no fault: others may hold the rank up. Without a usual duration no rank is late.
        """
        usual_s = self.usual_s(kind_of(self.phase)) if self._has_report else None
        still_s = now_s - self._moved_s
        return still_s if usual_s is not None and still_s > late_after_s(usual_s) else None

    def stall(self, now_s: float, limits: StallLimits) -> Stall | None:
        """Return the rank's stall at `now_s`, or None while it may still be working."""
        if not self._has_report:
            return None
        kind = kind_of(self.phase)
        limit_s, why = limits.limit_s(kind, self.usual_s(kind))
        still_s = now_s - self._moved_s
        if still_s <= limit_s:
            return None
        where = f"step {self.step}" + (f" ({self.phase})" if self.phase else "")
        reason = f"no progress at {where} for {span(still_s)}; its limit is {span(limit_s)}: {why}"
        return Stall(step=self.step, phase=self.phase, still_s=still_s, reason=reason)

    def _note(self, kind: str, seconds: float) -> None:
        self._durations.setdefault(kind, deque(maxlen=KEPT)).append(seconds)
