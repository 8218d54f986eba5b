"""Agreement on a last step: all ranks of a generation stop after the same step S, without a pause (PROTOCOLS 6.1).

A rank that runs a step needs the other ranks in its collectives. A rank that stopped one step before another would
leave the other hanging. So the ranks agree on S in rounds, in a background thread of each rank, while training
continues. Round a (0, 1, 2 …) has two meetings at one barrier, `STOP_BARRIER`:

    meeting    each rank sends                            result, the same on all ranks
    ---------  -----------------------------------------  ---------------------------------------------
    proposals  how many steps it has *begun*, its time    S = the largest `begun` + 2a, and whether S is
               left, the cost of a save, whether it can   saved (`Verdict`)
    answers    begun ≤ S: it holds at S and sends "ok"    every "ok": S is decided, once a generation
               else: it sends "past"                      one "past": all are released, the next round

To *hold* at S is a promise: the rank begins no step after S. The rank reads `begun` and makes the promise in one
atomic act. Only the outcome of the answers, a newer generation, or the exit of the process releases the rank from
the promise. The rank must not break the promise after a timeout of its own, because the other ranks may already
have decided to stop at S. S grows by two steps a round, because the fastest steps are shorter than a round. A
training loop that ends before S needs no common stop.

The leader reads S and the verdict from the same outcome (`read_decision`).
`tests/unit/core/stop/test_last_step.py` searches every interleaving of small models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Any, Final

from strata.errors import InvalidArgument, Refused

BEGIN_BARRIER: Final = "strata.begin"
"""Ranks that support graceful stop meet here before their first step; the outcome proves that support."""
STOP_BARRIER: Final = "strata.stop"
"""The ranks agree on the last step here."""
CLOSING_BARRIER: Final = "strata.closing"
"""The first rank that is about to finish arrives here alone; the others may still evaluate."""

MARGIN_STEPS: Final = 2
NO_LIMIT: Final = -1
"""The time left that a rank without a deadline proposes."""
_VERSION: Final = 2
_PROPOSAL, _ANSWER = "p", "a"


class NextStep(Enum):
    """What a rank does between a finished step and the next one."""

    GO = "go"
    WAIT = "wait"
    STOP = "stop"


class Verdict(IntEnum):
    """Whether all ranks save the common step; if not, why no rank does."""

    SAVE = 0
    NO_TIME = 1
    TOO_SLOW = 2
    NOTHING_NEW = 3
    CANNOT = 4

    @property
    def sentence(self) -> str:
        """The verdict as a sentence."""
        return _SENTENCES[self]


_SENTENCES: Final = {
    Verdict.SAVE: "it is saved",
    Verdict.NO_TIME: "no time is left to save",
    Verdict.TOO_SLOW: "a save takes longer than the time that is left",
    Verdict.NOTHING_NEW: "nothing was trained since the last checkpoint",
    Verdict.CANNOT: "a rank cannot save",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The step after which all ranks stop, and whether they save it."""

    step: int
    verdict: Verdict

    @property
    def save(self) -> bool:
        """Whether all ranks save the step; else none does."""
        return self.verdict is Verdict.SAVE


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """One rank's state in the agreement of one generation. Every method returns the next state.

    `start`: the step that the generation began from. `begun`: the newest step that has begun, and may still run.
    `round`: the number of this round, from 0. `offer`: the result of this round's proposals. `hold`: the step after
    which the rank waits. `decision`: the step after which all ranks stop.
    """

    start: int = 0
    begun: int = 0
    round: int = 0
    offer: Decision | None = None
    hold: int | None = None
    decision: Decision | None = None

    def begin(self, completed: int) -> tuple[Agreement, NextStep]:
        """Begin the step after `completed`, unless a hold or a decision forbids it."""
        if self.decision is not None and completed >= self.decision.step:
            return self, NextStep.STOP
        if self.hold is not None and completed >= self.hold:
            return self, NextStep.WAIT
        return replace(self, begun=max(self.begun, completed + 1)), NextStep.GO

    def propose(self, *, cost_ms: int = 0, left_ms: int = NO_LIMIT, can_save: bool = True) -> bytes:
        """Return this rank's payload for the proposals of this round.

        `cost_ms`: the measured time of a save until its commit, 0 if there was none. `left_ms`: time until the notice's
        deadline, 0 once it has passed.
        """
        return _encode(_PROPOSAL, self.round, self.begun, cost_ms, left_ms, int(can_save))

    def answer(self, brought: Mapping[int, bytes], *, ranks: int) -> tuple[Agreement, bytes]:
        """Hold at the proposed step S, unless this rank has begun a later one; return the payload for the answers."""
        proposals = _decoded(_PROPOSAL, brought, ranks=ranks, round_=self.round, fields=4)
        step = max(begun for begun, *_ in proposals.values()) + MARGIN_STEPS * self.round
        offer = Decision(step, _verdict(step, self.start, proposals))
        ok = self.begun <= step
        payload = _encode(_ANSWER, self.round, step, int(ok), offer.verdict)
        return replace(self, offer=offer, hold=step if ok else None), payload

    def conclude(self, brought: Mapping[int, bytes], *, ranks: int) -> Agreement:
        """Decide the step if every rank answered "ok", else go on to the next round, and `decision` stays None."""
        answers = _decoded(_ANSWER, brought, ranks=ranks, round_=self.round, fields=3)
        if len({(step, verdict) for step, _, verdict in answers.values()}) != 1:
            raise Refused(
                f"ranks answer for different steps in round {self.round}: {answers}", hint=_SAME_VERSION
            )
        if all(ok for _, ok, _ in answers.values()):
            return replace(self, hold=None, decision=self.offer)
        return replace(self, hold=None, offer=None, round=self.round + 1)

    def released(self) -> Agreement:
        """Release the hold after a broken round; every rank learns that the round broke. A decision stays."""
        return replace(self, hold=None, offer=None)


def read_decision(brought: Mapping[int, bytes], *, ranks: int) -> Decision | None:
    """Return the decision in the outcome of the answers; None if a rank answered "past", or for proposals."""
    bodies = [_body(brought.get(rank, b"")) for rank in range(ranks)]
    answers = [body for body in bodies if body is not None and body[1] == _ANSWER and len(body) == 6]
    if len(answers) != ranks or not answers or not all(answer[4] for answer in answers):
        return None
    step, verdict = answers[0][3], answers[0][5]
    return Decision(step, Verdict(verdict)) if verdict in _SENTENCES else None


def _verdict(step: int, start: int, proposals: Mapping[int, list[int]]) -> Verdict:
    """Return whether the step is saved: the shortest time left at any rank must cover the highest cost at any rank."""
    if step <= start:
        return Verdict.NOTHING_NEW
    if not all(can for _, _, _, can in proposals.values()):
        return Verdict.CANNOT
    left_ms = min((left for _, _, left, _ in proposals.values() if left >= 0), default=None)
    if left_ms is None:
        return Verdict.SAVE
    if left_ms == 0:
        return Verdict.NO_TIME
    cost_ms = max(cost for _, cost, _, _ in proposals.values())
    return Verdict.SAVE if cost_ms <= left_ms else Verdict.TOO_SLOW


def _encode(kind: str, *numbers: int) -> bytes:
    """Return a payload that is compact enough for worlds of thousands of ranks."""
    return json.dumps([_VERSION, kind, *numbers], separators=(",", ":")).encode()


def _body(payload: bytes) -> list[Any] | None:
    """Return version, kind, round and numbers; None if the payload does not belong to this agreement."""
    try:
        body = json.loads(payload)
    except ValueError:
        return None
    if not isinstance(body, list) or len(body) < 3 or body[0] != _VERSION:
        return None
    return body


def _decoded(
    kind: str, brought: Mapping[int, bytes], *, ranks: int, round_: int, fields: int
) -> dict[int, list[int]]:
    """Return every rank's numbers; `Refused` unless all ranks sent a payload for this meeting."""
    missing = [rank for rank in range(ranks) if rank not in brought]
    if missing:
        raise Refused(f"ranks {missing[:8]} sent nothing to the agreement on a step", hint=_SAME_VERSION)
    return {rank: _numbers(kind, rank, payload, round_, fields) for rank, payload in brought.items()}


def _numbers(kind: str, rank: int, payload: bytes, round_: int, fields: int) -> list[int]:
    body = _body(payload)
    if body is None or body[1:3] != [kind, round_] or len(body) != 3 + fields:
        raise Refused(f"rank {rank} sent {payload[:80]!r} to round {round_} of the stop", hint=_SAME_VERSION)
    numbers: list[int] = body[3:]
    if not all(type(number) is int and number >= NO_LIMIT for number in numbers):
        raise InvalidArgument(f"rank {rank} sent {payload[:80]!r} to the stop", hint=_SAME_VERSION)
    return numbers


_SAME_VERSION: Final = "all ranks must run the same version of Strata"
