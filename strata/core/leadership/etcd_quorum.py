"""etcd's quorum: which voters are healthy, and which member may stall or be removed.

    healthy voter  it answers, knows a leader, is in the newest raft term, reports no error of its own, and
                   its data is not corrupt; a learner has no vote
    quorum         more than half of all voters, healthy or not
    may stall      the healthy voters without this one are still a quorum (defragmentation stalls a member)
    may remove     the healthy voters without it are a quorum of today's voters, and of the remaining voters

The alarm NOSPACE makes no voter unhealthy: a member with this alarm still votes and replicates. A member for which
the operator gave no endpoint does not count as healthy, because its status is unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

DISARM_BELOW: Final = 0.9
"""The alarm NOSPACE is switched off only if every member's database is smaller than this share of the quota."""

Role = Literal["leader", "follower", "learner", "silent", "unknown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A member's status response; `leader_id` 0 means that it knows no leader."""

    leader_id: int
    raft_term: int
    errors: tuple[str, ...] = ()
    """The member's own errors, without alarms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One member: the cluster's data about it, and its own status response."""

    id: int
    name: str
    """The member's name; `name` and `address` are empty until the member has started once."""
    learner: bool = False
    address: str = ""
    """The `host:port` that the member advertises to clients."""
    endpoint: str = ""
    """This member's endpoint, if the command line names it; else empty."""
    answer: Answer | None = None
    silence: str = ""
    """Why the member did not answer."""
    corrupt: bool = False
    """Whether the member raised the alarm CORRUPT."""

    @property
    def label(self) -> str:
        """The member's name, or its id until it has started once."""
        return self.name or f"{self.id:x}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Whether an operation on a member is allowed, and why not."""

    allowed: bool
    reason: str = ""


_ALLOWED = Judgement(allowed=True)


def quorum(voters: int) -> int:
    """Return the number of voters that must agree, of `voters` in all."""
    return voters // 2 + 1


def voters(peers: Sequence[Peer]) -> list[Peer]:
    """Return the members that have a vote."""
    return [peer for peer in peers if not peer.learner]


def leader_id(peers: Sequence[Peer]) -> int:
    """Return the id of the leader that the members of the newest raft term report; 0 if they report none."""
    term = _newest_term(peers)
    named = [p.answer.leader_id for p in peers if p.answer is not None and p.answer.raft_term == term]
    return max(named, default=0)


def electing(peers: Sequence[Peer]) -> bool:
    """Return whether the answering voters do not all follow the same leader yet.

    The caller waits then, since an election takes a second or two.
    """
    answers = [peer.answer for peer in voters(peers) if peer.answer is not None]
    return any(not answer.leader_id or answer.raft_term < _newest_term(peers) for answer in answers)


def role(peer: Peer, peers: Sequence[Peer]) -> Role:
    """Return a member's role in the cluster."""
    if peer.answer is None:
        return "silent" if peer.endpoint or not peer.address else "unknown"
    if peer.learner:
        return "learner"
    return "leader" if peer.id == leader_id(peers) else "follower"


def unhealthy_reason(peer: Peer, peers: Sequence[Peer]) -> str:
    """Return why a member is not healthy; "" if it is."""
    answer, term = peer.answer, _newest_term(peers)
    if answer is None:
        if peer.endpoint:
            return f"does not answer at {peer.endpoint}"
        if not peer.address:
            return "has not started yet"
        return f"is unknown: add its endpoint {peer.address} to --etcd"
    if peer.corrupt:
        return "raises the alarm CORRUPT: its data differs from the others'"
    if not answer.leader_id:
        return "knows no leader"
    if answer.raft_term < term:
        return f"is in raft term {answer.raft_term}, others are in {term}"
    return "; ".join(answer.errors)


def healthy_voters(peers: Sequence[Peer]) -> list[Peer]:
    """Return the voters that are healthy."""
    return [peer for peer in voters(peers) if not unhealthy_reason(peer, peers)]


def quorum_sentence(peers: Sequence[Peer]) -> str:
    """Return how many voters are healthy, how many are needed, and how many may still be lost."""
    total, healthy = len(voters(peers)), len(healthy_voters(peers))
    needed = quorum(total)
    spare = healthy - needed
    if spare < 0:
        rest = f"no write succeeds until {-spare} more {'is' if spare == -1 else 'are'} healthy"
    elif spare:
        rest = f"{spare} more may be lost"
    else:
        rest = f"{'its' if healthy == total == 1 else 'one more'} loss stops all writes"
    return f"{healthy} of {total} voters healthy; {needed} {'is' if needed == 1 else 'are'} needed: {rest}"


def findings(peers: Sequence[Peer]) -> list[str]:
    """Return a sentence for each unhealthy voter, and one if there is no leader."""
    reasons = [(peer.label, unhealthy_reason(peer, peers)) for peer in voters(peers)]
    found = [f"{label} {reason}" for label, reason in reasons if reason]
    if not leader_id(peers):
        found.insert(0, "etcd has no leader: nothing can be written")
    return found


def may_stall(peer: Peer, peers: Sequence[Peer], *, stall_all: bool = False) -> Judgement:
    """Return whether a member may be unresponsive for a while, as during its defragmentation.

    A cluster of one voter stalls with that voter, which is allowed only with `stall_all`.
    """
    if peer.learner:
        return _ALLOWED
    everyone = voters(peers)
    if len(everyone) == 1:
        if stall_all:
            return _ALLOWED
        return Judgement(
            allowed=False,
            reason=f"{peer.label} is the only voter: all of etcd stalls while it is defragmented",
        )
    return _without(peer, peers, f"while {peer.label} stalls")


def may_remove(peer: Peer, peers: Sequence[Peer], *, even_if_healthy: bool = False) -> Judgement:
    """Return whether a member may be removed for good; a possibly healthy one only with `even_if_healthy`."""
    reason = unhealthy_reason(peer, peers)
    if not even_if_healthy and role(peer, peers) == "unknown":
        return Judgement(allowed=False, reason=f"{peer.label} {reason}, to see whether it is healthy")
    if not even_if_healthy and not reason:
        what = "learner" if peer.learner else "voter"
        return Judgement(
            allowed=False, reason=f"{peer.label} is a healthy {what}: nothing has to be replaced"
        )
    if peer.learner:
        return _ALLOWED
    # a quorum of today's voters is always a quorum of the remaining ones, which are one fewer
    return _without(peer, peers, f"without {peer.label}")


def may_add(name: str, peers: Sequence[Peer]) -> Judgement:
    """Return whether `name`, which is no member, may be added, that is, whether a voter was removed before.

    A replacement first removes one voter of an odd number. So this function requires that the remaining voters are
    healthy, and that their number is even.
    """
    members = ", ".join(peer.label for peer in peers)
    if sick := findings(peers):
        return Judgement(
            allowed=False, reason=f"no member is named {name}; the members are {members}; {sick[0]}"
        )
    if len(voters(peers)) % 2:
        return Judgement(
            allowed=False, reason=f"no member is named {name}, and none is missing; the members are {members}"
        )
    return _ALLOWED


def may_disarm_no_space(used_bytes: Mapping[str, int | None], quota_bytes: int) -> Judgement:
    """Return whether the alarm NOSPACE may be switched off: each member's database has free space again.

    `used_bytes`: by the member's label; None if the member did not answer.
    """
    silent = [label for label, used in used_bytes.items() if used is None]
    if silent:
        return Judgement(
            allowed=False, reason=f"the size of the database of {', '.join(silent)} is unknown: no answer"
        )
    full = [
        f"{label} {100 * used / quota_bytes:.0f} %"
        for label, used in used_bytes.items()
        if used is not None and used >= DISARM_BELOW * quota_bytes
    ]
    if full:
        return Judgement(
            allowed=False,
            reason=f"databases still take {100 * DISARM_BELOW:.0f} % of the quota or more: {', '.join(full)}",
        )
    return _ALLOWED


def defragmentation_order(peers: Sequence[Peer]) -> list[Peer]:
    """Return the voters that answer, followers first and the leader last.

    Learners are left out: etcd does not defragment them.
    """
    able = [peer for peer in voters(peers) if peer.answer is not None]
    leader = leader_id(peers)
    return sorted(able, key=lambda peer: (peer.id == leader, peer.label))


def next_to_defragment(peers: Sequence[Peer], done: Collection[int]) -> Peer | None:
    """Return the next member to defragment, after those in `done` (ids)."""
    return next((peer for peer in defragmentation_order(peers) if peer.id not in done), None)


def _without(peer: Peer, peers: Sequence[Peer], when: str) -> Judgement:
    total, healthy = len(voters(peers)), healthy_voters(peers)
    others, needed = [other for other in healthy if other.id != peer.id], quorum(total)
    if len(others) >= needed:
        return _ALLOWED
    sick = [
        f"{other.label} {unhealthy_reason(other, peers)}"
        for other in voters(peers)
        if other.id != peer.id and other not in healthy
    ]
    why = f": {'; '.join(sick)}" if sick else ""
    return Judgement(
        allowed=False,
        reason=f"{when}, {len(others)} of {total} voters would be healthy, and {needed} are needed{why}",
    )


def _newest_term(peers: Sequence[Peer]) -> int:
    return max((peer.answer.raft_term for peer in peers if peer.answer is not None), default=0)
