"""Whether a follower takes the lead from a leader that has died (PROTOCOLS 4.7).

A follower keeps a link to the leader, handshaken with the uuid in the leader key. Only one chain
of facts deposes; whatever else happens waits for the lease, since barriers and saves need no leader:

    the link was up while it led ─▶ it was ended or reset ─▶ connects are refused, twice in a row
         └ else: wait                 └ silence, ours: wait     └ answered, unclear: wait

A refusal is no proof of death: a firewall may refuse on its behalf. So a leader that shakes hands
after it was deposed buys peace: this follower deposes nobody for a minute. No member notices a
change of leader, and the delete compares the epoch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from strata.core.ids import Epoch, InstanceId
from strata.core.keys import ClusterKeys
from strata.core.leadership import leader_of
from strata.core.records import Leader, PoisonRecord
from strata.core.view import Entry, View

REFUSALS = 2
PROBE_EVERY_S = 0.02
MAX_PROBES = 10
"""A dying process may close what it listened on a little after the link: it is asked a few times."""
PEACE_S = 60.0


class LinkEnd(Enum):
    """How a link to a peer ended."""

    BROKEN = "broken"
    """Ended or reset from the other side."""
    SILENT = "silent"
    """Nothing came for too long, or an error that says nothing of the other process."""
    OURS = "ours"
    """This side closed it."""


class Probe(Enum):
    """What a plain TCP connect to the leader's address met."""

    REFUSED = "refused"
    ANSWERED = "answered"
    UNCLEAR = "unclear"
    """A timeout, a name that does not resolve, a host without a route."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A leader that may have died, and where it served."""

    instance: InstanceId
    epoch: Epoch
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Whom this follower has deposed, and until when it keeps the peace for having been wrong."""

    deposed: frozenset[InstanceId] = frozenset()
    peace_until_s: float = float("-inf")

    def has_deposed(self, instance: InstanceId) -> Memory:
        """Note that the key of this instance was, or may have been, deleted by us."""
        return replace(self, deposed=self.deposed | {instance})

    def met(self, instance: InstanceId, now_s: float) -> Memory:
        """Note a handshake with this instance: if it was deposed, that was a mistake."""
        if instance not in self.deposed:
            return self
        return Memory(deposed=self.deposed - {instance}, peace_until_s=now_s + PEACE_S)


class Act(Enum):
    """What a follower does next about a leader."""

    WAIT_FOR_LEASE = "wait for the lease"
    PROBE = "probe"
    """Connect once more, `PROBE_EVERY_S` after the last time."""
    DEPOSE = "depose"
    """Delete the leader key, comparing the epoch, and campaign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The next act, in words too. `case` for PROBE and DEPOSE."""

    act: Act
    reason: str
    case: Case | None = None


def link_ended(
    instance: InstanceId, end: LinkEnd, view: View, keys: ClusterKeys, memory: Memory, *, now_s: float
) -> Verdict:
    """Decide at the end of an established link to `instance`.

    If the view shows that it leads, the link was up in its epoch: it stood until now, and the
    epoch began before.
    """
    held = _leader(view, keys)
    if held is None or held.record.instance != instance:
        return _wait("it does not lead")
    if end is not LinkEnd.BROKEN:
        return _wait(f"the link is {end.value}, which says nothing of the process")
    if now_s < memory.peace_until_s:
        return _wait("this replica was wrong a short while ago and deposes nobody")
    case = Case(instance=instance, epoch=Epoch(held.create_revision), address=held.record.address)
    return Verdict(act=Act.PROBE, reason=f"the link to the leader of epoch {case.epoch} broke", case=case)


def probed(
    case: Case,
    probes: Sequence[Probe],
    view: View,
    keys: ClusterKeys,
    memory: Memory,
    *,
    linked: bool,
    now_s: float,
) -> Verdict:
    """Decide after the probes so far. `linked`: that instance has shaken hands since."""
    held = _leader(view, keys)
    if held is None or held.create_revision != case.epoch:
        return _wait(f"epoch {case.epoch} has ended")
    if linked:
        return _wait("it shook hands again")
    if now_s < memory.peace_until_s:
        return _wait("this replica was wrong a short while ago and deposes nobody")
    if len(probes) >= REFUSALS and all(p is Probe.REFUSED for p in probes[-REFUSALS:]):
        reason = f"the link to the leader of epoch {case.epoch} broke, and {case.address} refuses"
        return Verdict(act=Act.DEPOSE, reason=reason, case=case)
    if len(probes) >= MAX_PROBES or (probes and probes[-1] is Probe.UNCLEAR):
        return _wait(f"a connect to {case.address} was {probes[-1].value}")
    return Verdict(act=Act.PROBE, reason=f"{case.address} is asked again", case=case)


def _leader(view: View, keys: ClusterKeys) -> Entry[Leader] | None:
    """Return who leads; nobody that could be deposed, if somebody wrote the key by hand."""
    try:
        return leader_of(view, keys)
    except PoisonRecord:
        return None


def _wait(reason: str) -> Verdict:
    return Verdict(act=Act.WAIT_FOR_LEASE, reason=reason)
