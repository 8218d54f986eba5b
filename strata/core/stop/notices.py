"""What a notice means to one member, and how two requests become one notice (PROTOCOLS 6.1).

A *notice* asks the ranks of one generation to stop at a common step. Each action means more than the one before:

    action   who leaves                 what follows                       who asks
    -------  -------------------------  ---------------------------------  -------------------------------
    SCALE    nobody                     a world of another size            the leader
    DRAIN    the members that it names  a world of the others              anybody
    PREEMPT  every member               a forming world, then newcomers    anybody

With `pause`, which beside none of them is a SCALE, the job is paused instead.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final

from strata.core.kv.records import StopAction, StopNotice
from strata.core.kv.view import Entry

MAX_NAMED: Final = 100
"""How many members one notice may drain: heads carry their names."""
MAX_REASON_CHARS: Final = 500
WIDTH: Final = {StopAction.SCALE: 0, StopAction.DRAIN: 1, StopAction.PREEMPT: 2}


class Meaning(Enum):
    """What one member does about a notice."""

    NOTHING = "nothing"
    STAY = "stay"
    """Its ranks stop at the common step, save it, and wait there until their agent ends them."""
    LEAVE = "leave"
    """Its ranks do the same, then end with code 75, at the latest at the deadline; the member leaves the job."""


def meaning(notice: StopNotice | None, worker: str, *, came_before: bool = True) -> Meaning:
    """Return what `notice` means to `worker`; rank, agent and leader alike ask this function.

    `came_before`: whether it was a member when the notice was written. Later ones are not meant.
    """
    if notice is None or not came_before:
        return Meaning.NOTHING
    named = notice.action is StopAction.DRAIN and worker in notice.workers
    leaves = named or notice.action is StopAction.PREEMPT
    return Meaning.LEAVE if leaves else Meaning.STAY


def is_wider(asked: StopNotice, held: StopNotice) -> bool:
    """Tell whether `asked` has members leave whom `held` does not."""
    if asked.action is held.action is StopAction.DRAIN:
        return not set(asked.workers) <= set(held.workers)
    return WIDTH[asked.action] > WIDTH[held.action]


def merged(held: Entry[StopNotice], asked: StopNotice) -> StopNotice:
    """Return the one notice that says what both ask for; the held one when that covers it.

    The wider action holds, a DRAIN of both's members if those are not too many for one, the shorter grace, and a
    pause. `since` keeps whom the held one means: who comes back under a name that was drained is a newcomer, whatever is
    added after that. What becomes wider than it was means all who are here by now.
    """
    record = held.record
    pause = record.pause or asked.pause
    graces = [one.grace_ms for one in (record, asked) if one.has_deadline] or [record.grace_ms]
    if WIDTH[asked.action] > WIDTH[record.action] or not record.has_deadline:
        widest = asked if WIDTH[asked.action] > WIDTH[record.action] or asked.has_deadline else record
        return record if widest is record else replace(widest, grace_ms=min(graces), pause=pause)
    names, reason = record.workers, record.reason
    if is_wider(asked, record):
        names = tuple(sorted({*names, *asked.workers}))
        if len(names) > MAX_NAMED:
            return record
        reason = reason if asked.reason in reason else cut(f"{reason}; {asked.reason}")
    wider = replace(record, grace_ms=min(graces), workers=names, reason=reason, pause=pause)
    return record if wider == record else replace(wider, since=meant_before(held))


def meant_before(notice: Entry[StopNotice]) -> int:
    """Return the revision before which a member must have come to be meant by this notice."""
    return notice.record.since or notice.mod_revision


def cut(reason: str) -> str:
    """Return a reason, shortened if it is too long for a record."""
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"
