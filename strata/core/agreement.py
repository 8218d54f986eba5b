"""All ranks stop after the same optimizer step, though none of them may wait for the others.

Whoever runs a step needs the other ranks in its collectives, so a rank that stopped one step
before another would leave that one hanging. Each attempt has two rounds of a barrier, in which
all ranks take part from a background thread while they train on:

    a round         each brings                        what follows for all alike
    --------------  ---------------------------------  -------------------------------------------
    proposals       how many steps it has *begun*      S = the largest + a margin (2, 4, 8…)
    confirmations   begun ≤ S: holds at S, and "ok"    every "ok": all stop after step S
                    else: "past"                       one "past": nobody holds, the next attempt

To hold is a promise: from then on this rank begins no step after S until the round has ended. It
is given in one act with the look at `begun`, and it blocks only a rank that has finished S, which
every other one that said "ok" will finish as well. A rank that is past S does not hold, so that
the rest, once they are let go, meet it in its step. The margin grows because the fastest steps are
shorter than a round; a loop that is longer than S needs no common stop, it ends by itself.

A rank that may train on without the others' word (another world was to follow, and no coordinator is
heard) gives up a hold after a while, and takes its promise back by that: others may be told that all
stop at S, and stop. So what was agreed counts once all have met at S (`choose_save`). A rank that has
gone on learns that when it concludes (`went_on`), and says so there: all train on then, and agree anew.

A barrier ends alike for all: when a participant dies or is done, the agreement is given up by all
who had not seen it made, and the next world, or the end of the training, is what stops them.

`tests/unit/core/test_agreement.py` searches every interleaving of small models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum

from strata.errors import InvalidArgument, Refused

MARGIN_STEPS = 2
_DOUBLINGS = 20
_VERSION = 1


class Gate(Enum):
    """What a rank does that has finished a step and would begin the next."""

    GO = "go"
    WAIT = "wait"
    STOP = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One rank's part in the agreement of one generation. Every act returns the next state.

    `begun`: how many steps it has begun; the newest may be under way. `attempt`: 0 while nobody
    asked. `hold`: the step after which it waits. `agreed`: the step after which all stop. `went_on`: it
    has begun a step after the one that all agreed on, having given up its hold: to be said where they meet.
    """

    begun: int = 0
    attempt: int = 0
    hold: int | None = None
    agreed: int | None = None
    went_on: bool = False

    def begin(self, completed: int) -> tuple[Agreement, Gate]:
        """Begin the step after `completed` if nothing is against it."""
        if self.agreed is not None and completed >= self.agreed:
            return self, Gate.STOP
        if self.hold is not None and completed >= self.hold:
            return self, Gate.WAIT
        return replace(self, begun=max(self.begun, completed + 1)), Gate.GO

    def propose(self) -> tuple[Agreement, bytes]:
        """Begin the next attempt: what to bring to the round of proposals."""
        attempt = self.attempt + 1
        state = replace(self, attempt=attempt, hold=None, went_on=False)
        return state, _encode(attempt=attempt, begun=self.begun)

    def confirm(self, brought: Mapping[int, bytes], *, ranks: int) -> tuple[Agreement, bytes]:
        """Hold at the step that the proposals give, if that can be: what to bring to the second round."""
        proposals = _decoded(brought, ranks=ranks, attempt=self.attempt)
        begun = [_whole(rank, body, "begun") for rank, body in sorted(proposals.items())]
        step = max(begun) + margin(self.attempt)
        ok = self.begun <= step
        state = replace(self, hold=step) if ok else self
        return state, _encode(attempt=self.attempt, step=step, ok=ok)

    def conclude(self, brought: Mapping[int, bytes], *, ranks: int) -> Agreement:
        """Stop at the step if all confirmed it, else go on: `agreed` says which."""
        answers = _decoded(brought, ranks=ranks, attempt=self.attempt)
        steps = {_whole(rank, body, "step") for rank, body in answers.items()}
        if len(steps) != 1:
            raise Refused(f"ranks confirm different steps in one attempt: {sorted(steps)}")
        if all(body.get("ok") is True for body in answers.values()):
            step = steps.pop()
            if self.begun > step:
                return replace(self, hold=None, went_on=True)
            return replace(self, agreed=step, hold=None)
        return replace(self, hold=None)

    def forget(self) -> Agreement:
        """Neither hold nor stop: what was promised or agreed is not waited for any longer."""
        return replace(self, hold=None, agreed=None)

    def give_up(self) -> Agreement:
        """Hold no longer: the round broke, or its word does not come. What was agreed stays."""
        return replace(self, hold=None)


def margin(attempt: int) -> int:
    """Return how many steps beyond the furthest rank the given attempt (from 1) aims."""
    return MARGIN_STEPS << min(attempt - 1, _DOUBLINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLeft:
    """What one rank knows, at the common step, of the save that is due there.

    `left_ms`: of its grace. `cost_ms`: what a save has cost it so far until it was committed; 0
    when it has saved nothing yet. `went_on`: it is not there, and is not coming.
    """

    left_ms: int = 0
    cost_ms: int = 0
    went_on: bool = False

    def encode(self) -> bytes:
        """Return what to bring to the barrier before the save."""
        on = {"went_on": True} if self.went_on else {}
        return _encode(attempt=0, left_ms=max(0, self.left_ms), cost_ms=max(0, self.cost_ms), **on)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveChoice:
    """Whether all ranks save at the common step, and why; `stop`: whether they stop there at all."""

    save: bool
    left_ms: int
    reason: str
    stop: bool = True


def choose_save(brought: Mapping[int, bytes], *, ranks: int) -> SaveChoice:
    """Decide for all alike whether the save can be done in the time that is left.

    The shortest time of any rank counts, against the largest cost of any. Where one has gone on, none stops.
    """
    bodies = _decoded(brought, ranks=ranks, attempt=0)
    gone = [rank for rank, body in sorted(bodies.items()) if body.get("went_on") is True]
    if gone:
        why = f"ranks {gone[:8]} have trained on, who had no word of it in time"
        return SaveChoice(save=False, left_ms=0, reason=why, stop=False)
    left_ms = min(_whole(rank, body, "left_ms") for rank, body in bodies.items())
    cost_ms = max(_whole(rank, body, "cost_ms") for rank, body in bodies.items())
    left = f"{left_ms / 1000:.1f} s are left"
    if left_ms <= 0:
        return SaveChoice(save=False, left_ms=0, reason="no time is left to save")
    if cost_ms > left_ms:
        why = f"a save takes about {cost_ms / 1000:.1f} s, and {left}"
        return SaveChoice(save=False, left_ms=left_ms, reason=why)
    about = f"a save takes about {cost_ms / 1000:.1f} s" if cost_ms else "no save was measured yet"
    return SaveChoice(save=True, left_ms=left_ms, reason=f"{left}; {about}")


def _encode(**body: int | bool) -> bytes:
    return json.dumps({"v": _VERSION, **body}, separators=(",", ":")).encode()


def _decoded(brought: Mapping[int, bytes], *, ranks: int, attempt: int) -> dict[int, dict[str, object]]:
    """Return what every rank brought; `Refused` unless all speak of this attempt."""
    missing = [rank for rank in range(ranks) if rank not in brought]
    if missing:
        raise Refused(f"ranks {missing[:8]} brought nothing to the agreement on a step", hint=_ALIKE)
    return {rank: _body(rank, payload, attempt) for rank, payload in brought.items()}


def _body(rank: int, payload: bytes, attempt: int) -> dict[str, object]:
    try:
        body = json.loads(payload)
    except ValueError:
        body = None
    if not isinstance(body, dict) or body.get("v") != _VERSION or body.get("attempt") != attempt:
        raise Refused(
            f"rank {rank} brought {payload[:80]!r} to attempt {attempt} of the agreement on a step",
            hint=_ALIKE,
        )
    return body


def _whole(rank: int, body: Mapping[str, object], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidArgument(f"rank {rank} says {name} = {value!r}", hint=_ALIKE)
    return value


_ALIKE = "all ranks must run the same version of Strata"
