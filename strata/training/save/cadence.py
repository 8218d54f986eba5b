"""Save cadence: plans the next save every N steps, every N seconds, or at the cheapest interval (Young and Daly).

All ranks must save at the same step, and between saves they exchange nothing: training continues without coordinators
until a save is due. So the next save is planned as a *step*, from values that are equal on all ranks. The ranks
exchange these values in the barrier of the previous save, and the checkpoint stores them. The time between failures
is rank 0's; for the other times the slowest rank counts.

Without a rule, the interval follows Young and Daly. Let C be the time that a save costs the training, and M the mean
time between failures. Then an interval of about sqrt(2 C M) loses the least time to saves and to repeated steps. M is
estimated as (observed time + one day) / (failures + 1). The interval is never shorter than a commit takes. The first
save comes after a few steps, to measure its cost, and to show a storage error early. An interval is at most four
times the previous one, since steps may become slower.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from strata.errors import Refused

FIRST_STEPS: Final = 10
GROWTH: Final = 4
ASSUMED_SAVE_S: Final = 1.0
PRIOR_S: Final = 86_400.0
"""The time between failures assumed at first: one failure a day."""
MAX_INTERVAL_S: Final = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """The configured cadence; if `every_steps` and `every_s` are both 0, the cost of saves determines the interval.

    One in `full_every` saves is full, the others are incremental. With 0 all saves are incremental, if there is a
    checkpoint to build on.
    """

    every_steps: int = 0
    every_s: float = 0.0
    full_every: int = 1

    def is_whole(self, saved: int) -> bool:
        """Return whether the save after `saved` others of this generation is full."""
        return self.full_every > 0 and saved % self.full_every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The measured times in seconds; 0 is unknown.

    `step_s` is the mean step time since the previous save, `save_s` how long that save blocked the trainer's thread,
    `commit_s` how long its commit took, `failure_s` the mean time between failures.
    """

    step_s: float = 0.0
    save_s: float = 0.0
    commit_s: float = 0.0
    failure_s: float = PRIOR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The step to save after, and the reason for it; `interval` is in steps."""

    step: int
    interval: int
    reason: str


def next_save(rule: Rule, *, step: int, before: int, pace: Pace | None) -> Plan:
    """Return the next plan after `step`, at which this generation began or saved.

    `before` is the interval of the previous plan, 0 at first.
    """
    if rule.every_steps:
        left = rule.every_steps - step % rule.every_steps
        return Plan(step=step + left, interval=rule.every_steps, reason=f"every {rule.every_steps} steps")
    if pace is None or pace.step_s <= 0:
        return Plan(
            step=step + FIRST_STEPS, interval=FIRST_STEPS, reason="steps and saves are measured first"
        )
    if rule.every_s:
        interval_s, reason = rule.every_s, f"every {rule.every_s:g} s"
    else:
        interval_s, reason = _cheapest_s(pace)
    interval = max(1, round(interval_s / pace.step_s))
    if before and interval > GROWTH * before:
        interval, reason = GROWTH * before, f"{reason}, approached by {GROWTH} times the interval before"
    return Plan(step=step + interval, interval=interval, reason=reason)


def _cheapest_s(pace: Pace) -> tuple[float, str]:
    cost, between = pace.save_s or ASSUMED_SAVE_S, pace.failure_s
    if cost < 2 * between:
        ratio = math.sqrt(cost / (2 * between))
        best_s = math.sqrt(2 * cost * between) * (1 + ratio / 3 + ratio * ratio / 9) - cost
    else:
        best_s = between
    bounded_s = min(max(best_s, pace.commit_s, cost), MAX_INTERVAL_S)
    return bounded_s, f"a save costs {cost:.3g} s, and the job fails every {between / 3600:.3g} h"


def time_between_failures(*, failures: int, began_s: float, now_s: float) -> float:
    """Return the expected time to the next failure, after `failures` failures since `began_s`."""
    return (max(0.0, now_s - began_s) + PRIOR_S) / (failures + 1)


def agreed(payloads: Mapping[int, bytes]) -> Pace:
    """Merge the ranks' barrier payloads into one pace, the same on every rank."""
    paces = [_read(rank, payload) for rank, payload in sorted(payloads.items())]
    if not paces:
        return Pace()
    return Pace(
        step_s=max(pace.step_s for pace in paces),
        save_s=max(pace.save_s for pace in paces),
        commit_s=max(pace.commit_s for pace in paces),
        failure_s=paces[0].failure_s,
    )


def payload_of(pace: Pace, **more: Any) -> bytes:
    """Return a rank's barrier payload: its pace, and the entries of `more`; short, for large worlds."""
    payloads = {name: float(f"{value:.6g}") for name, value in asdict(pace).items()}
    return json.dumps({**payloads, **more}, allow_nan=False, separators=(",", ":")).encode()


def pace_of(saved: Mapping[str, Any]) -> Pace | None:
    """Return the pace stored in a checkpoint, or None."""
    if not all(isinstance(saved.get(name), int | float) for name in Pace.__slots__):
        return None
    return Pace(**{name: float(saved[name]) for name in Pace.__slots__})


def _read(rank: int, payload: bytes) -> Pace:
    try:
        pace = pace_of(json.loads(payload))
    except (ValueError, AttributeError):
        pace = None
    if pace is None:
        raise Refused(
            f"rank {rank} sent no pace before a save: {payload[:80]!r}",
            hint="all ranks of a job must use the same version of strata",
        )
    return pace
