"""When to save next: every so many steps, every so many seconds, or by what it costs and saves.

All ranks must save at the same step, and between saves nothing is exchanged: a training goes on
without any coordinator until a save is due. So the next save is planned as a *step*, from values
that all ranks have alike: those exchanged in the barrier of the save before, which are also kept in
the checkpoint. Rank 0 speaks of the job's failures; of the times, the slowest rank's count.

Without a rule, the interval is Young's and Daly's: with C what a save costs the training, and M the
mean time between failures, about sqrt(2 C M) loses the least time to saves and to repeated steps.
M is estimated as the time watched plus a day, by the failures plus one. It is never shorter than a
commit takes. The first save comes after a few steps: it measures, and trouble with the storage
shows at once. A plan is at most four times as long as the one before, since steps may grow slower.
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
"""One failure a day, until more is known."""
MAX_INTERVAL_S: Final = 3_600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What was asked for; with neither of the two, costs decide when.

    `full_every`: of so many saves one is whole, and the others hold what has changed; 0: all of them
    do that, as far as there is something to build on.
    """

    every_steps: int = 0
    every_s: float = 0.0
    full_every: int = 1

    def is_whole(self, saved: int) -> bool:
        """Tell whether the save after `saved` others of this generation is whole."""
        return self.full_every > 0 and saved % self.full_every == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What is known of the times; 0 is unknown.

    `step_s` is the mean of the steps since the save before, `save_s` what that save held the trainer
    up, `commit_s` how long it took to be committed.
    """

    step_s: float = 0.0
    save_s: float = 0.0
    commit_s: float = 0.0
    failure_s: float = PRIOR_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The step to save after, and why it is that one; `interval` is in steps."""

    step: int
    interval: int
    reason: str


def next_save(rule: Rule, *, step: int, before: int, pace: Pace | None) -> Plan:
    """Return the plan after `step`, at which this generation began or saved.

    `before` is the interval of the plan before, 0 at first.
    """
    if rule.every_steps:
        left = rule.every_steps - step % rule.every_steps
        return Plan(step=step + left, interval=rule.every_steps, reason=f"every {rule.every_steps} steps")
    if pace is None or pace.step_s <= 0:
        return Plan(
            step=step + FIRST_STEPS, interval=FIRST_STEPS, reason="steps and saves are measured first"
        )
    if rule.every_s:
        wanted_s, reason = rule.every_s, f"every {rule.every_s:g} s"
    else:
        wanted_s, reason = _cheapest_s(pace)
    interval = max(1, round(wanted_s / pace.step_s))
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
    """Return the expected time to the next failure, when there were so many since `began_s`."""
    return (max(0.0, now_s - began_s) + PRIOR_S) / (failures + 1)


def agreed(told: Mapping[int, bytes]) -> Pace:
    """Return the pace of all ranks, of what each brought to the barrier; the same on every rank."""
    paces = [_read(rank, payload) for rank, payload in sorted(told.items())]
    if not paces:
        return Pace()
    return Pace(
        step_s=max(pace.step_s for pace in paces),
        save_s=max(pace.save_s for pace in paces),
        commit_s=max(pace.commit_s for pace in paces),
        failure_s=paces[0].failure_s,
    )


def payload_of(pace: Pace, **more: Any) -> bytes:
    """Return what a rank brings to the barrier: its pace, and what else it tells; short, for large worlds."""
    told = {name: float(f"{value:.6g}") for name, value in asdict(pace).items()}
    return json.dumps({**told, **more}, allow_nan=False, separators=(",", ":")).encode()


def pace_of(saved: Mapping[str, Any]) -> Pace | None:
    """Return the pace that a checkpoint holds, if it holds one."""
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
            f"rank {rank} told no pace before a save: {payload[:80]!r}",
            hint="all ranks of a job must use the same version of strata",
        )
    return pace
