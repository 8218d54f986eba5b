"""The meaning of a stop notice for one member, and merging two requests into one notice (PROTOCOLS 6.1).

A *notice* asks the ranks of one generation to stop at a common step. Each action includes the action above it:

    action   members that leave         what follows                       requested by
    -------  -------------------------  ---------------------------------  -------------------------------
    SCALE    none                       a world of another size            the leader
    DRAIN    the members that it names  a world of the others              any client
    PREEMPT  every member               a forming world, then newcomers    any client

A notice with `pause` pauses the job instead of forming a new world. A pause without DRAIN or PREEMPT is stored as a
SCALE.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from typing import Final

from strata.core.kv.records import StopAction, StopNotice
from strata.core.kv.view import Entry

MAX_NAMED: Final = 100
"""The maximum number of members in one DRAIN, because heads carry the members' names."""
MAX_REASON_CHARS: Final = 500
WIDTH: Final = {StopAction.SCALE: 0, StopAction.DRAIN: 1, StopAction.PREEMPT: 2}


class Meaning(Enum):
    """What one member does in response to a notice."""

    NOTHING = "nothing"
    STAY = "stay"
    """The member's ranks stop at the common step, save it, and wait there until their agent ends them."""
    LEAVE = "leave"
    """The ranks do the same, then exit with code 75, at the latest at the deadline; the member leaves the job."""


def meaning(notice: StopNotice | None, worker: str, *, came_before: bool = True) -> Meaning:
    """Return what `notice` means for `worker`; ranks, agents and the leader all use this function.

    `came_before`: the worker was a member when the notice was written. Later members are not affected.
    """
    if notice is None or not came_before:
        return Meaning.NOTHING
    named = notice.action is StopAction.DRAIN and worker in notice.workers
    leaves = named or notice.action is StopAction.PREEMPT
    return Meaning.LEAVE if leaves else Meaning.STAY


def is_wider(request: StopNotice, held: StopNotice) -> bool:
    """Return whether `request` asks a member to leave that `held` does not ask."""
    if request.action is held.action is StopAction.DRAIN:
        return not set(request.workers) <= set(held.workers)
    return WIDTH[request.action] > WIDTH[held.action]


def merged(held: Entry[StopNotice], request: StopNotice) -> StopNotice:
    """Return one notice that covers both requests; `held` itself if it already covers `request`.

    The result has the wider action, the shorter grace, and a pause if either has one. A DRAIN names the members of
    both, if these are not too many for one notice. If the action becomes wider, the notice applies to all members
    registered by now. Otherwise `since` keeps the set of members to which `held` applies: a member that returns
    under a drained name is a newcomer, whatever later requests add.
    """
    record = held.record
    pause = record.pause or request.pause
    graces = [one.grace_ms for one in (record, request) if one.has_deadline] or [record.grace_ms]
    if WIDTH[request.action] > WIDTH[record.action] or not record.has_deadline:
        widest = request if WIDTH[request.action] > WIDTH[record.action] or request.has_deadline else record
        return record if widest is record else replace(widest, grace_ms=min(graces), pause=pause)
    names, reason = record.workers, record.reason
    if is_wider(request, record):
        names = tuple(sorted({*names, *request.workers}))
        if len(names) > MAX_NAMED:
            return record
        reason = reason if request.reason in reason else cut(f"{reason}; {request.reason}")
    wider = replace(record, grace_ms=min(graces), workers=names, reason=reason, pause=pause)
    return record if wider == record else replace(wider, since=meant_before(held))


def meant_before(notice: Entry[StopNotice]) -> int:
    """Return the revision before which a member must have registered for this notice to apply to it."""
    return notice.record.since or notice.mod_revision


def cut(reason: str) -> str:
    """Return a reason, shortened if it is too long for a record."""
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"
