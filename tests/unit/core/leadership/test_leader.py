from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.ids import Epoch, InstanceId, ReplicaId
from strata.core.kv.records import Leader, encode
from strata.core.kv.txn import Put, Txn
from strata.core.leadership.leader import (
    REQUESTED_TTL_S,
    Act,
    LeaderState,
    Step,
    campaign_txn,
    leader_of,
    next_step,
    resign_txn,
)
from tests.not_none import not_none
from tests.unit.core.rig import KEYS, Store

ME, OTHER = InstanceId("i-me"), InstanceId("i-other")


def key_of(instance: InstanceId, lease: int = 0) -> Put:
    record = Leader(instance=instance, replica=ReplicaId("r"), address="")
    return Put(key=KEYS.leader, value=encode(record), lease=lease)


def store_led_by(instance: InstanceId | None, *, lease: int = 5) -> tuple[Store, int]:
    store = Store()
    store.state.leased = {5: set(), 6: set()}
    if instance is None:
        return store, 0
    return store, store.execute(Txn(success=(key_of(instance, lease),))).revision


def step(leader_state: LeaderState, store: Store, *, now_s: float = 0, turned_s: float = 0) -> Step:
    return next_step(leader_state, store.view(), KEYS, now_s=now_s, turned_s=turned_s)


def leading(epoch: int) -> LeaderState:
    return LeaderState(instance=ME).granted(5, 6, sent_s=0).took_lead(Epoch(epoch))


# -- without a term ---------------------------------------------------------------------------


def test_without_a_leader_a_replica_campaigns_with_a_fresh_lease() -> None:
    store, _ = store_led_by(None)
    me = LeaderState(instance=ME)
    assert step(me, store).act is Act.GRANT
    me = me.granted(5, REQUESTED_TTL_S, sent_s=10)
    assert step(me, store, now_s=13.9).act is Act.CAMPAIGN
    assert step(me, store, now_s=14).act is Act.GRANT, "4 of 6 seconds have passed"


def test_another_leader_is_waited_for() -> None:
    store, epoch = store_led_by(OTHER)
    found = step(LeaderState(instance=ME).granted(5, 6, sent_s=0), store)
    assert found.act is Act.WAIT
    assert f"epoch {epoch}" in found.reason


@pytest.mark.parametrize(
    ("me", "act"),
    [
        (LeaderState(instance=ME).granted(5, 6, sent_s=-3), Act.TAKE_LEAD),
        (LeaderState(instance=ME), Act.DELETE_OWN),
        (LeaderState(instance=ME).granted(6, 6, sent_s=0), Act.DELETE_OWN),
        (LeaderState(instance=ME).granted(5, 6, sent_s=-4), Act.DELETE_OWN),
    ],
    ids=["in time", "no lease", "another lease", "an old lease"],
)
def test_a_campaign_that_succeeded_late_takes_the_lead_or_deletes_its_key(me: LeaderState, act: Act) -> None:
    store, epoch = store_led_by(ME, lease=5)
    found = step(me, store)
    assert (found.act, found.epoch) == (act, epoch)


# -- in a term --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now_s", "turned_s", "act", "until_s"),
    [
        (0.5, 0.5, Act.WAIT, 1.0),
        (1.0, 1.0, Act.RENEW, None),
        (3.9, 3.9, Act.RENEW, None),
        (3.9, 1.0, Act.WAIT, 4.0),
        (3.0, 0.9, Act.WAIT, 3.25),
        (3.0, 1.0, Act.RENEW, None),
        (4.0, 4.0, Act.STOP, None),
        (1000.0, 1000.0, Act.STOP, None),
    ],
)
def test_the_lease_is_renewed_in_time_or_not_relied_on(
    now_s: float, turned_s: float, act: Act, until_s: float | None
) -> None:
    store, epoch = store_led_by(ME)
    found = step(leading(epoch), store, now_s=now_s, turned_s=turned_s)
    assert (found.act, found.until_s) == (act, until_s)


def test_one_keepalive_is_outstanding_at_a_time() -> None:
    store, epoch = store_led_by(ME)
    me = leading(epoch).sending(1.0)
    found = step(me, store, now_s=2.5, turned_s=2.5)
    assert (found.act, found.until_s) == (Act.WAIT, 4.0)
    again = me.answered(None)
    assert step(again, store, now_s=1.5, turned_s=1.5).until_s == 2.0
    assert step(again, store, now_s=2.0, turned_s=2.0).act is Act.RENEW


def test_a_keepalive_answer_extends_the_deadline_from_its_send_time() -> None:
    store, epoch = store_led_by(ME)
    me = leading(epoch).sending(1.0).answered(9)
    assert me.may_act(6.9)
    assert not me.may_act(7.0), "two thirds of nine seconds after the send"
    assert step(me, store, now_s=1.9, turned_s=1.9).until_s == 2.0


@pytest.mark.parametrize("ttl_s", [0, -1])
def test_an_expired_lease_ends_the_leader_term(ttl_s: int) -> None:
    store, epoch = store_led_by(ME)
    me = leading(epoch).sending(1.0).answered(ttl_s)
    assert not me.may_act(1.0)
    assert step(me, store, now_s=1.0, turned_s=1.0).act is Act.STOP


def test_the_loss_of_its_own_key_ends_the_leader_term() -> None:
    store, epoch = store_led_by(ME)
    me = leading(epoch)
    store.delete(KEYS.leader)
    assert step(me, store).act is Act.STOP
    store.execute(Txn(success=(key_of(OTHER),)))
    assert step(me, store).act is Act.STOP
    store.delete(KEYS.leader)
    store.execute(Txn(success=(key_of(ME, 5),)))
    assert step(me, store).act is Act.STOP, "another epoch, though the same instance"


def test_a_stopped_leader_starts_from_scratch() -> None:
    store, epoch = store_led_by(ME)
    me = leading(epoch).stopped()
    assert (me.lease, me.epoch, me.may_act(0)) == (None, None, False)
    assert step(me, store).act is Act.DELETE_OWN


@pytest.mark.parametrize(("ttl_s", "renew_at_s"), [(60, 6), (3, 5.5)])
def test_a_longer_lease_is_still_renewed_every_second_and_a_short_one_more_often(
    ttl_s: float, renew_at_s: float
) -> None:
    lease = LeaderState(instance=ME).granted(1, ttl_s, sent_s=5).lease
    assert not_none(lease).renew_at_s == renew_at_s


# -- transactions -----------------------------------------------------------------------------


def test_one_of_two_campaigns_wins() -> None:
    store, _ = store_led_by(None)
    mine, others = (
        campaign_txn(KEYS, instance=instance, replica=ReplicaId("r"), address="a:1", lease_id=lease)
        for instance, lease in ((ME, 5), (OTHER, 6))
    )
    written = [store.execute(txn).succeeded for txn in (mine, others, mine)]
    assert written == [True, False, False], "nor a second time after a lost answer"
    held = not_none(leader_of(store.view(), KEYS))
    assert (held.record.instance, held.record.address) == (ME, "a:1")
    assert not_none(store.view().get(KEYS.leader)).lease == 5


def test_a_resigning_leader_deletes_only_the_key_of_its_own_epoch() -> None:
    store, epoch = store_led_by(ME)
    assert not store.execute(resign_txn(KEYS, epoch + 1)).succeeded
    assert store.execute(resign_txn(KEYS, epoch)).succeeded
    assert leader_of(store.view(), KEYS) is None


# -- invariants over time ---------------------------------------------------------------------


@dataclass
class Etcd:
    """The lease at etcd: it never expires before its TTL, counted from etcd's receipt of the keepalive."""

    expires_s: float
    ttl_s: float


event = st.tuples(
    st.floats(0.05, 1.5),  # seconds until the next event
    st.floats(0, 1.2),  # the delay of a keepalive on its way to etcd
    st.sampled_from(["answered", "lost", "lost at etcd"]),
    st.booleans(),  # whether the controller runs a turn
)


@given(st.sampled_from([3.0, 6.0, 9.0]), st.lists(event, max_size=40))
def test_no_leader_acts_after_etcd_expired_its_lease(
    ttl_s: float, events: list[tuple[float, float, str, bool]]
) -> None:
    store, epoch = store_led_by(ME)
    etcd = Etcd(expires_s=0.1 + ttl_s, ttl_s=ttl_s)
    me = LeaderState(instance=ME).granted(5, ttl_s, sent_s=0.0).took_lead(Epoch(epoch))
    now_s = turned_s = 0.2
    for wait_s, delay_s, fate, turns in events:
        now_s += wait_s
        if turns:
            turned_s = now_s
        found = step(me, store, now_s=now_s, turned_s=turned_s)
        if found.act is Act.STOP:
            break
        assert me.may_act(now_s)
        assert now_s < etcd.expires_s - ttl_s / 6, "it acts close to the end of its lease"
        if found.act is not Act.RENEW:
            assert found.until_s is not None
            assert found.until_s > now_s
            continue
        me = me.sending(now_s)
        if fate != "lost at etcd" and now_s + delay_s < etcd.expires_s:
            etcd.expires_s = now_s + delay_s + etcd.ttl_s
        now_s += delay_s
        me = me.answered(ttl_s if fate == "answered" else None)
