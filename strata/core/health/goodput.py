"""Goodput: the share of a training's time spent on steps that were not lost, and an account of the rest.

Rank 0 books time under its phase, and every checkpoint carries rank 0's account. A generation that begins from a
checkpoint continues the checkpoint's account. The time between the checkpoint and the beginning of the generation
is booked as `lost`, and the time after that beginning as `start`.

    step        training: the time that counts
    save        trainers held up by a save: waiting for each other, and copying
    lost        trained, but not in the checkpoint that was restored
    start       from the beginning of a generation to its first step, except `restore`
    restore     reading the checkpoint
    between     from the end of an epoch to the first step of the next
    down        no rank 0 keeps the account: the job is between generations, paused or over
    eval …      any other phase that the program names
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from strata.documents.parsing import NOTE, json_object

GOODPUT_KEY: Final = "strata.goodput"
"""The key of the account in a checkpoint's metadata."""
STEP: Final = "step"
LOST: Final = "lost"
START: Final = "start"
DOWN: Final = "down"
MAX_PARTS: Final = 12
MAX_NAME: Final = 16
OTHER: Final = "other"


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """Seconds by phase, over all generations."""

    spent_s: Mapping[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.spent_s.values())

    @property
    def ratio(self) -> float:
        """The share of the time that counts, from 0 to 1."""
        return self.spent_s.get(STEP, 0.0) / self.total_s if self.total_s > 0 else 0.0

    def after(self, seconds: float, phase: str) -> Goodput:
        """Return the account after `seconds` more in `phase`."""
        return Goodput(spent_s={**self.spent_s, phase: self.spent_s.get(phase, 0.0) + max(0.0, seconds)})

    def __str__(self) -> str:
        rest = sorted(((s, what) for what, s in self.spent_s.items() if what != STEP), reverse=True)
        parts = ", ".join(f"{what} {seconds:.1f}" for seconds, what in rest if seconds >= 0.05)
        return f"{self.ratio:.1%} of {self.total_s:.1f} s" + (f"; else {parts}" if parts else "")


@dataclass(slots=True)
class Ledger:
    """One rank's account. Times are monotonic seconds, except those whose names end in `unix_s`."""

    since_s: float
    phase: str = START
    spent_s: dict[str, float] = field(default_factory=dict)
    carried_s: dict[str, float] = field(default_factory=dict)
    """The amounts that the last call of `go_on` added."""

    def enter(self, phase: str, now_s: float) -> None:
        """Book the time since the last call under the phase of that time."""
        spent = max(0.0, now_s - self.since_s)
        name = self.phase[:MAX_NAME]
        if name not in self.spent_s and len(self.spent_s) >= MAX_PARTS:
            name = OTHER  # a program that makes up names must not fill the checkpoint's metadata
        self.spent_s[name] = self.spent_s.get(name, 0.0) + spent
        self.since_s, self.phase = now_s, phase

    def so_far(self) -> Goodput:
        """Return the account as of the last call of `enter`."""
        return Goodput(spent_s=self.spent_s)

    def goodput(self, now_s: float) -> Goodput:
        """Return the account as of now."""
        self.enter(self.phase, now_s)
        return Goodput(spent_s=dict(self.spent_s))

    def go_on(
        self, text: str, *, lost_since_unix_s: float, began_unix_s: float, now_s: float, now_unix_s: float
    ) -> None:
        """Continue the account of a checkpoint; without one, all time since `lost_since_unix_s` is lost.

        `began_unix_s`: when this generation began. Time before that, except the program's own start, counts as
        lost. `now_s` and `now_unix_s` are the same instant, on this ledger's clock and on the wall
        clock.
        """
        self.enter(self.phase, now_s)
        for what, seconds in self.carried_s.items():  # from a world that ended before its first step
            self.spent_s[what] -= seconds
        spent, until = read_account(text) or ({}, min(lost_since_unix_s, began_unix_s))
        own_s = sum(self.spent_s.values())
        gap = max(0.0, now_unix_s - until)
        began = min(max(began_unix_s, until), now_unix_s)
        lost = max(0.0, min(began - until, gap - own_s))
        missing = max(0.0, gap - lost - own_s)  # in this generation, before this program first read a clock
        early = min(
            self.spent_s.get(START, 0.0), max(0.0, own_s - gap)
        )  # the program waited for a world that began later
        self.carried_s = dict(spent)
        for what, seconds in ((LOST, lost), (START, missing - early)):
            self.carried_s[what] = self.carried_s.get(what, 0.0) + seconds
        for what, seconds in self.carried_s.items():
            self.spent_s[what] = self.spent_s.get(what, 0.0) + seconds

    def saved(self, now_s: float, now_unix_s: float) -> str:
        """Return the account for a checkpoint's metadata."""
        self.enter(self.phase, now_s)
        spent = {what: round(seconds, 6) for what, seconds in self.spent_s.items()}
        return json.dumps({"spent_s": spent, "unix_s": round(now_unix_s, 6)}, separators=(",", ":"))


def read_account(text: str) -> tuple[dict[str, float], float] | None:
    """Return the seconds by phase, and the account's end as Unix time; None if `text` is no account."""
    try:
        saved = json_object(text, NOTE)
        spent_s, unix_s = {str(k): float(v) for k, v in saved["spent_s"].items()}, float(saved["unix_s"])
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
        return None
    return (spent_s, unix_s) if all(map(math.isfinite, (*spent_s.values(), unix_s))) else None


def goodput_text(text: str) -> str:
    """Return the goodput in a checkpoint's metadata as a sentence; "" if there is none."""
    saved = read_account(text)
    return "" if saved is None else str(Goodput(spent_s=saved[0]))
