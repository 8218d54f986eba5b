"""The leader election's state machine: a lease for liveness, a fence for safety (PROTOCOLS 4).

Safety comes from the fence alone: every controller write compares the leader key's create_revision, which is the
epoch. This module is about liveness: when to campaign, when to renew the lease, when to stop acting as leader.

    state         the leader key holds       next
    ------------  -------------------------  ---------------------------------------------------
    not leading   nothing                    gets a lease (if it has no fresh one), campaigns
                  another instance           waits
                  itself, by its lease       takes the lead (a late campaign counts like any other)
                  itself, by another lease   deletes the key, guarded
    leading       its own key, same epoch    renews; acts until 2/3 of the lease have passed
                  anything else              stops acting immediately

The lease counts from the moment at which its grant, or its last answered renewal, was *sent*. An answer moves the
deadline and proves nothing else. Times are seconds of one clock that runs through suspends (CLOCK_BOOTTIME). The
clock is read again before each act, and its times are never compared between processes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Leader, encode
from strata.core.kv.txn import Delete, Put, Txn, absent, created_at
from strata.core.kv.view import Entry, View

REQUESTED_TTL_S = 6
RENEW_S = 1.0
MAX_STILL_S = 2.0
"""A leader whose world controller has made no pass for this long lets its lease expire."""
_ACTS = 2 / 3


# -- transactions -----------------------------------------------------------------------------


def campaign_txn(
    keys: ClusterKeys, *, instance: InstanceId, replica: ReplicaId, address: str, lease_id: int
) -> Txn:
    """Create the leader key if it does not exist."""
    record = Leader(instance=instance, replica=replica, address=address)
    put = Put(key=keys.leader, value=encode(record), lease=lease_id)
    return Txn(compares=(absent(keys.leader),), success=(put,))


def resign_txn(keys: ClusterKeys, epoch: int) -> Txn:
    """Delete the leader key of `epoch`, and no other."""
    return Txn(compares=(created_at(keys.leader, epoch),), success=(Delete(key=keys.leader),))


# -- the lease --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseClock:
    """How long a lease may be relied on. `ttl_s` is the TTL that etcd granted, not the requested one."""

    lease_id: int
    ttl_s: float
    anchored_s: float
    tried_s: float
    """When the last keepalive was sent, answered or not."""
    outstanding: bool = False
    """Whether that keepalive has no answer yet; at most one is outstanding."""

    @property
    def act_until_s(self) -> float:
        return self.anchored_s + self.ttl_s * _ACTS

    @property
    def renew_at_s(self) -> float:
        """When the next keepalive is due, if none is outstanding."""
        return self.tried_s + min(RENEW_S, self.ttl_s / 6)

    def may_act(self, now_s: float) -> bool:
        return now_s < self.act_until_s


# -- the state machine ------------------------------------------------------------------------


class Act(Enum):
    """The next act of a replica."""

    WAIT = "wait"
    """Do nothing until `until_s`, or until the leader key changes."""
    GRANT = "grant"
    """Get a lease of `REQUESTED_TTL_S`, then call `granted`."""
    CAMPAIGN = "campaign"
    """Execute `campaign_txn`, bring the view to the transaction's revision, and call `next_step` again."""
    TAKE_LEAD = "take_lead"
    """Confirm the key by a linearizable read, bring the view to the read's revision, then call `took_lead`."""
    RENEW = "renew"
    """Call `sending`, send one keepalive, then call `answered`."""
    DELETE_OWN = "delete_own"
    """Execute `resign_txn` with the step's epoch: the key names this instance, but has another lease."""
    STOP = "stop"
    """Stop acting as leader immediately, then call `stopped`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next act, with its reason in words. `epoch` is set for TAKE_LEAD and DELETE_OWN."""

    act: Act
    reason: str
    until_s: float | None = None
    epoch: Epoch | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """The election state of one instance. Every change returns a new state."""

    instance: InstanceId
    lease: LeaseClock | None = None
    epoch: Epoch | None = None

    def may_act(self, now_s: float) -> bool:
        """Return whether the lease still lets this instance act as the leader of `epoch`."""
        return self.epoch is not None and self.lease is not None and self.lease.may_act(now_s)

    def granted(self, lease_id: int, ttl_s: float, *, sent_s: float) -> LeaderState:
        """Adopt a lease whose grant was sent at `sent_s`."""
        lease = LeaseClock(lease_id=lease_id, ttl_s=ttl_s, anchored_s=sent_s, tried_s=sent_s)
        return replace(self, lease=lease)

    def took_lead(self, epoch: Epoch) -> LeaderState:
        """Start to act as leader: a linearizable read confirmed the key, and the view is as new as that read."""
        return replace(self, epoch=epoch)

    def sending(self, now_s: float) -> LeaderState:
        """Record that a keepalive is being sent."""
        assert self.lease is not None
        return replace(self, lease=replace(self.lease, tried_s=now_s, outstanding=True))

    def answered(self, ttl_s: float | None) -> LeaderState:
        """Record a keepalive's answer: the lease counts from the moment at which the keepalive was sent.

        None: no answer came, and the keepalive is repeated. A TTL of 0 or less means that the lease has ended.
        """
        lease = self.lease
        if lease is None or (ttl_s is not None and ttl_s <= 0):
            return replace(self, lease=None)
        if ttl_s is not None:
            lease = replace(lease, ttl_s=ttl_s, anchored_s=lease.tried_s)
        return replace(self, lease=replace(lease, outstanding=False))

    def stopped(self) -> LeaderState:
        """Stop leading. The lease is left to expire; the next campaign gets a new one."""
        return LeaderState(instance=self.instance)


def leader_of(view: View, keys: ClusterKeys) -> Entry[Leader] | None:
    """Return the leader, as of the view."""
    return view.entry(keys.leader, Leader)


def next_step(
    leader_state: LeaderState, view: View, keys: ClusterKeys, *, now_s: float, turned_s: float
) -> Step:
    """Return the next step of the instance.

    `turned_s`: when the world controller last completed a pass (or began to wait for etcd).
    """
    held = leader_of(view, keys)
    mine = held is not None and held.record.instance == leader_state.instance
    if leader_state.epoch is not None:
        return _in_term(leader_state, held if mine else None, now_s, turned_s)
    lease = leader_state.lease if leader_state.lease and leader_state.lease.may_act(now_s) else None
    if held is None:
        if lease is None:
            return Step(act=Act.GRANT, reason="no leader; a campaign needs a lease")
        return Step(act=Act.CAMPAIGN, reason="no leader")
    epoch = Epoch(held.create_revision)
    if not mine:
        return Step(act=Act.WAIT, reason=f"{held.record.replica} leads in epoch {epoch}")
    kv = view.get(keys.leader)
    if lease is not None and kv is not None and kv.lease == lease.lease_id:
        return Step(act=Act.TAKE_LEAD, reason=f"this instance won epoch {epoch}", epoch=epoch)
    return Step(
        act=Act.DELETE_OWN,
        reason=f"epoch {epoch} belongs to this instance, by a lease that it gave up",
        epoch=epoch,
    )


def _in_term(leader_state: LeaderState, held: Entry[Leader] | None, now_s: float, turned_s: float) -> Step:
    lease, epoch = leader_state.lease, leader_state.epoch
    if held is None or held.create_revision != epoch:
        return Step(act=Act.STOP, reason=f"the leader key of epoch {epoch} is deleted")
    if lease is None:
        return Step(act=Act.STOP, reason=f"the lease of epoch {epoch} is lost")
    if not lease.may_act(now_s):
        return Step(act=Act.STOP, reason=f"the lease of epoch {epoch} was not renewed in time")
    if lease.outstanding:
        return Step(act=Act.WAIT, reason="a keepalive is outstanding", until_s=lease.act_until_s)
    if now_s - turned_s > MAX_STILL_S:
        return Step(
            act=Act.WAIT,
            reason=f"the world controller has not run for {now_s - turned_s:.1f} s",
            until_s=min(lease.act_until_s, now_s + RENEW_S / 4),
        )
    if now_s < lease.renew_at_s:
        until_s = min(lease.renew_at_s, lease.act_until_s)
        return Step(act=Act.WAIT, reason=f"leads in epoch {epoch}", until_s=until_s)
    return Step(act=Act.RENEW, reason=f"leads in epoch {epoch}; the lease is due")
