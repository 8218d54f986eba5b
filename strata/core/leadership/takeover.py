"""Takeover: when a follower deposes a leader that has died, before the leader's lease expires (PROTOCOLS 4.7).

A follower keeps a link to the leader, with a handshake that checks the uuid in the leader key. A leader is deposed
only after the chain of facts below. In all other cases the follower waits for the lease to expire, because barriers
and saves need no leader:

    the link was up while it led ─▶ it was ended or reset ─▶ connects are refused, twice in a row
         └ else: wait                 └ silence, or by us: wait    └ answered, unclear: wait

A refused connect does not prove death: a firewall may refuse on the leader's behalf. So if a deposed leader later
completes a handshake, this follower deposes no leader for a minute. A wrong deposition does little harm: members do
not notice a change of leader, and the delete compares the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from strata.core.ids import InstanceId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Leader, PoisonRecord
from strata.core.kv.view import Entry, View
from strata.core.leadership.leader import leader_of

REFUSALS = 2
PROBE_EVERY_S = 0.02
MAX_PROBES = 10
"""A dying process may close its listening socket a little later than the link, so a follower tries to connect again."""
PEACE_S = 60.0


class Probe(Enum):
    """The result of a plain TCP connect to the leader's address."""

    REFUSED = "refused"
    ANSWERED = "answered"
    UNCLEAR = "unclear"
    """A timeout, a name that does not resolve, a host without a route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The instances that this follower has deposed, and the time until which it deposes none after a mistake."""

    deposed: frozenset[InstanceId] = frozenset()
    peace_until_s: float = float("-inf")

    def has_deposed(self, instance: InstanceId) -> Memory:
        """Record that this replica deleted, or may have deleted, the leader key of this instance."""
        return replace(self, deposed=self.deposed | {instance})

    def met(self, instance: InstanceId, now_s: float) -> Memory:
        """Record a handshake with this instance; if this follower had deposed the instance, that was a mistake."""
        if instance not in self.deposed:
            return self
        return Memory(deposed=self.deposed - {instance}, peace_until_s=now_s + PEACE_S)


class Act(Enum):
    """The next act of a follower towards a leader."""

    WAIT_FOR_LEASE = "wait for the lease"
    PROBE = "probe"
    """Connect once more, `PROBE_EVERY_S` after the last connect."""
    DEPOSE = "depose"
    """Delete the leader key, comparing the epoch, and campaign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The next act, with its reason in words."""

    act: Act
    reason: str


def suspect(
    instance: InstanceId, view: View, keys: ClusterKeys, memory: Memory, *, now_s: float
) -> Entry[Leader] | None:
    """Return the leader key if the established link to `instance`, which broke, was the leader's; else None.

    If the view shows that `instance` leads, the link was up during its epoch: the epoch began earlier, and the link
    broke only now. The result is also None while this replica deposes no leader after a mistake.
    """
    held = _leader(view, keys)
    if held is None or held.record.instance != instance or now_s < memory.peace_until_s:
        return None
    return held


def probed(
    case: Entry[Leader],
    probes: Sequence[Probe],
    view: View,
    keys: ClusterKeys,
    memory: Memory,
    *,
    linked: bool,
    now_s: float,
) -> Verdict:
    """Decide after the probes so far.

    `case`: the leader key when the link broke. `linked`: a new handshake followed.
    """
    epoch, address = case.create_revision, case.record.address
    held = _leader(view, keys)
    if held is None or held.create_revision != epoch:
        return _wait(f"epoch {epoch} has ended")
    if linked:
        return _wait("it completed another handshake")
    if now_s < memory.peace_until_s:
        return _wait("this replica deposed a live leader a short while ago and deposes no other now")
    if len(probes) >= REFUSALS and all(p is Probe.REFUSED for p in probes[-REFUSALS:]):
        reason = f"the link to the leader of epoch {epoch} broke, and {address} refuses"
        return Verdict(act=Act.DEPOSE, reason=reason)
    if len(probes) >= MAX_PROBES or probes[-1] is Probe.UNCLEAR:
        return _wait(f"a connect to {address} was {probes[-1].value}")
    return Verdict(act=Act.PROBE, reason=f"{address} is probed again")


def _leader(view: View, keys: ClusterKeys) -> Entry[Leader] | None:
    """Return the leader, or None; None also if the key's value does not decode: such a leader is not deposed."""
    try:
        return leader_of(view, keys)
    except PoisonRecord:
        return None


def _wait(reason: str) -> Verdict:
    return Verdict(act=Act.WAIT_FOR_LEASE, reason=reason)
