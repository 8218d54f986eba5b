"""Choice of the etcd member that a backup of the control plane is taken from. Pure.

A snapshot costs its member disk reads and a long read transaction, so a follower is preferred.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

MAX_BEHIND: Final = 5_000
"""The most raft entries that a member may lag behind the leader: more than a busy cluster writes in a second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One etcd endpoint and its status. `error`: why it did not answer; the other fields are then meaningless."""

    endpoint: str
    member: str = ""
    """The member's name, or its id if no member reported the name."""
    leads: bool = False
    knows_leader: bool = False
    learner: bool = False
    corrupt: bool = False
    """Whether the alarm CORRUPT is on for this member."""
    raft_index: int = 0
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """The endpoint to take the snapshot from, or None; `reason` covers every endpoint."""

    endpoint: str | None
    reason: str


def choose_member(candidates: Sequence[Candidate]) -> Choice:
    """Choose a healthy follower, else the leader if it is healthy. Ties: the newest raft index, then name order."""
    newest = _newest_index(candidates)
    faults = {each.endpoint: _fault(each, newest) for each in candidates}
    fit = [each for each in candidates if not faults[each.endpoint]]
    why = "; ".join(f"{name}: {fault}" for name, fault in sorted(faults.items()) if fault)
    if not fit:
        return Choice(endpoint=None, reason=why or "no etcd endpoint is known")
    chosen = min(fit, key=lambda each: (each.leads, -each.raft_index, each.endpoint))
    if not chosen.leads:
        return Choice(endpoint=chosen.endpoint, reason=f"{chosen.member} is a healthy follower")
    others = f"no follower is healthy ({why})" if why else "no other member was named"
    return Choice(endpoint=chosen.endpoint, reason=f"{chosen.member} leads, and {others}")


def _newest_index(candidates: Sequence[Candidate]) -> int:
    """Return the leader's raft index; the highest one if the leader is not among the candidates."""
    leaders = [each.raft_index for each in candidates if each.leads and not each.error]
    return max(leaders or [each.raft_index for each in candidates if not each.error], default=0)


def _fault(each: Candidate, newest: int) -> str:
    """Return why this member may not provide the snapshot; "" if it may."""
    if each.error:
        return each.error
    if not each.knows_leader:
        return "it knows no leader"
    if each.corrupt:
        return "the alarm CORRUPT is on for it"
    if each.learner:
        return "it is a learner"
    if newest - each.raft_index > MAX_BEHIND:
        return f"it is {newest - each.raft_index} raft entries behind the leader"
    return ""
