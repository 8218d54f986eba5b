"""Active deposition, fact by fact: only one chain of facts deposes the leader (PROTOCOLS 4.7)."""

from __future__ import annotations

import pytest

from strata.core.ids import InstanceId, ReplicaId
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Leader, encode
from strata.core.kv.txn import KeyValue
from strata.core.kv.view import View
from strata.core.leadership.takeover import (
    MAX_PROBES,
    PEACE_S,
    Act,
    Memory,
    Probe,
    probed,
    suspect,
)
from tests.not_none import not_none

KEYS = ClusterKeys("c")
OLD, OTHER = InstanceId("old"), InstanceId("other")
R, A, U = Probe.REFUSED, Probe.ANSWERED, Probe.UNCLEAR


def led_by(instance: InstanceId | None, epoch: int = 7) -> View:
    view = View()
    kvs = []
    if instance is not None:
        record = Leader(instance=instance, replica=ReplicaId("r1"), address="h:1")
        kvs = [
            KeyValue(
                key=KEYS.leader, value=encode(record), create_revision=epoch, mod_revision=epoch, version=1
            )
        ]
    view.reset(10, tuple(kvs))
    return view


CASE = not_none(suspect(OLD, led_by(OLD), KEYS, Memory(), now_s=0.0))


@pytest.mark.parametrize(
    ("leader", "memory", "opened"),
    [
        (OLD, Memory(), True),
        (OTHER, Memory(), False),
        (None, Memory(), False),
        (OLD, Memory(peace_until_s=100.5), False),
        (OLD, Memory(peace_until_s=100.0), True),
    ],
)
def test_only_the_broken_link_to_the_leader_opens_a_case(
    leader: InstanceId | None, memory: Memory, opened: bool
) -> None:
    assert suspect(OLD, led_by(leader), KEYS, memory, now_s=100.0) == (CASE if opened else None)


@pytest.mark.parametrize(
    ("probes", "act"),
    [
        ([R], Act.PROBE),
        ([R, R], Act.DEPOSE),
        ([A], Act.PROBE),
        ([A, R], Act.PROBE),
        ([R, A, R], Act.PROBE),
        ([A, R, R], Act.DEPOSE),
        ([U], Act.WAIT_FOR_LEASE),
        ([R, U], Act.WAIT_FOR_LEASE),
        ([A] * MAX_PROBES, Act.WAIT_FOR_LEASE),
        ([A] * (MAX_PROBES - 2) + [R, R], Act.DEPOSE),
    ],
)
def test_two_refusals_in_a_row_depose(probes: list[Probe], act: Act) -> None:
    verdict = probed(CASE, probes, led_by(OLD), KEYS, Memory(), linked=False, now_s=100.0)
    assert verdict.act is act


@pytest.mark.parametrize(
    ("view", "linked", "memory"),
    [
        (led_by(None), False, Memory()),
        (led_by(OTHER, epoch=9), False, Memory()),
        (led_by(OLD, epoch=9), False, Memory()),
        (led_by(OLD), True, Memory()),
        (led_by(OLD), False, Memory(peace_until_s=101.0)),
    ],
    ids=["resigned", "succeeded", "won again", "another handshake", "at peace"],
)
def test_a_change_during_the_probe_ends_the_deposition(view: View, linked: bool, memory: Memory) -> None:
    verdict = probed(CASE, [R, R], view, KEYS, memory, linked=linked, now_s=100.0)
    assert verdict.act is Act.WAIT_FOR_LEASE


def test_a_handshake_of_a_deposed_leader_suspends_depositions_for_a_minute() -> None:
    memory = Memory().has_deposed(OLD)
    assert memory.met(OTHER, 100.0) is memory
    met = memory.met(OLD, 100.0)
    assert met.peace_until_s == 100.0 + PEACE_S
    assert met.met(OLD, 130.0) is met, "the minute counts from the first handshake"


def test_an_unreadable_leader_key_deposes_no_leader_and_raises_no_error() -> None:
    view = View()
    spoilt = KeyValue(key=KEYS.leader, value=b"{", create_revision=7, mod_revision=7, version=1)
    view.reset(10, (spoilt,))
    assert suspect(OLD, view, KEYS, Memory(), now_s=100.0) is None
    after = probed(CASE, [R, R], view, KEYS, Memory(), linked=False, now_s=100.0)
    assert after.act is Act.WAIT_FOR_LEASE
