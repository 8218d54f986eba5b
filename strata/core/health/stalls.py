"""Which ranks stand still, which are slow, and whose fault it is: rules on what ranks say of themselves.

A process that lives and answers pings may still do nothing: a deadlock, a lost collective, a loader
that waits for a dead disk. Only its own words tell: a rank says (step, phase), and a *movement* is a
change of either. It stands still when it has not moved for longer than the limit of its phase:

- the limit that somebody set for this phase, else
- `factor` times the median of what the phase usually takes (a step, or a whole stay in another
  phase), but never less than `least_s`, once it was seen often enough to have a median, else
- a generous first limit: the first step and a compilation have nothing to be compared with.

In synchronous training one rank that stands still holds up all the others at the same step, so all
of them stand still by this rule. `core.health.attribution` says who is to blame, as far as it shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Final

from strata.core.words import span

STEP: Final = "step"
"""The phase in which a rank does nothing but training steps; "train" is understood as the same."""
_STEP_WORDS: Final = frozenset({"step", "train", "training", ""})

FIRST_S: Final[Mapping[str, float]] = {STEP: 600.0}
"""How long a phase may take while nothing is known of it; `FIRST_OTHER_S` for all others."""
FIRST_OTHER_S: Final = 1800.0
MIN_SAMPLES: Final = 3
"""So many durations make a median: the first step of a generation is longer than all others."""
KEPT: Final = 64

LATE_S: Final = 2.0
LATE_FACTOR: Final = 3.0
"""A rank is late once it has not moved for so many times what its phase usually takes, and for `LATE_S` at least."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StallLimits:
    """How long ranks may stay where they are."""

    least_s: float
    """The shortest limit that follows from a median."""
    factor: float = 10.0
    fixed_s: Mapping[str, float] = field(default_factory=dict)
    """By phase: limits that somebody set."""

    @classmethod
    def derive(
        cls, detect_s: float, *, factor: float = 10.0, fixed_s: Mapping[str, float] | None = None
    ) -> StallLimits:
        """Return the limits that follow from the one knob: at least twice `detect_s`."""
        return cls(least_s=2 * detect_s, factor=factor, fixed_s=dict(fixed_s or {}))

    def limit_s(self, kind: str, usual_s: float | None) -> tuple[float, str]:
        """Return the limit of a phase that usually takes `usual_s`, and where it comes from."""
        fixed_s = self.fixed_s.get(kind)
        if fixed_s is not None:
            return fixed_s, "as it was set"
        if usual_s is None:
            first_s = FIRST_S.get(kind, FIRST_OTHER_S)
            return max(first_s, self.least_s), "nothing is known yet of how long it takes"
        limit_s = self.factor * usual_s
        if limit_s < self.least_s:
            return self.least_s, f"the least; it usually takes {span(usual_s)}"
        return limit_s, f"{self.factor:g} times the usual {span(usual_s)}"


def late_after_s(usual_s: float) -> float:
    """Return after how long a rank is late whose phase usually takes `usual_s`."""
    return max(LATE_S, LATE_FACTOR * usual_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """A rank that has stood still for longer than its phase may take."""

    step: int
    phase: str
    still_s: float
    reason: str


def kind_of(phase: str) -> str:
    """Return which phase is meant by what a rank says: `eval 3/10` is `eval`."""
    word = phase.replace(":", " ").split(" ", 1)[0].strip().lower()
    return STEP if word in _STEP_WORDS else word


class RankPace:
    """What one rank of one generation said, and how long it usually takes. All times are arguments."""

    __slots__ = ("_durations", "_entered_s", "_moved_s", "_said", "last_step_s", "phase", "step")

    def __init__(self) -> None:
        self.step = 0
        self.phase = ""
        self._said = False
        self._moved_s = 0.0
        self._entered_s = 0.0
        self.last_step_s: float | None = None
        """How long the last step took, as far as it could be told."""
        self._durations: dict[str, deque[float]] = {}

    def hear(self, step: int, phase: str, now_s: float) -> bool:
        """Take note of where the rank said it was at `now_s`; tell whether it moved."""
        if self._said and (step, phase) == (self.step, self.phase):
            return False
        before, now = kind_of(self.phase), kind_of(phase)
        if self._said:
            if before == now == STEP and step > self.step:
                self.last_step_s = max(0.0, now_s - self._moved_s) / (step - self.step)
                self._note(STEP, self.last_step_s)
            elif before not in {STEP, now}:
                self._note(before, max(0.0, now_s - self._entered_s))
        if before != now or not self._said:
            self._entered_s = now_s
        self.step, self.phase, self._moved_s, self._said = step, phase, now_s, True
        return True

    def forgive(self, seconds: float) -> None:
        """Count `seconds` less: whoever listens did not run meanwhile."""
        self._moved_s += seconds
        self._entered_s += seconds

    def usual_s(self, kind: str = STEP) -> float | None:
        """Return the median of what a step, or a stay in another phase, took; None before it is known."""
        known = self._durations.get(kind, ())
        return median(known) if len(known) >= (MIN_SAMPLES if kind == STEP else 1) else None

    def still_s(self, now_s: float) -> float:
        """Return for how long the rank has not moved."""
        return max(0.0, now_s - self._moved_s)

    def late_s(self, now_s: float) -> float | None:
        """Return for how long the rank has not moved, if that is clearly longer than usual; else None.

        It is no stall yet, and no fault: others may hold it up. While nothing is usual, nobody is late.
        """
        usual_s = self.usual_s(kind_of(self.phase)) if self._said else None
        still_s = now_s - self._moved_s
        return still_s if usual_s is not None and still_s > late_after_s(usual_s) else None

    def stall(self, now_s: float, limits: StallLimits) -> Stall | None:
        """Return how the rank stands still at `now_s`, or None while it may still be at work."""
        if not self._said:
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
