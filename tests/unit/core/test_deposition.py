"""Active deposition, fact by fact: only one chain of them takes the lead away (PROTOCOLS 4.7)."""

from __future__ import annotations

import pytest

from strata.core.deposition import (
    MAX_PROBES,
    PEACE_S,
    Act,
    Probe,
    probed,
    suspect,
)
from strata.core.ids import InstanceId, ReplicaId
from strata.core.keys import ClusterKeys
from strata.core.records import Leader, encode
from strata.core.txn import KeyValue
from strata.core.view import View
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


NEVER = float("-inf")
CASE = not_none(suspect(OLD, led_by(OLD), KEYS, deposed_s=NEVER, now_s=0.0))


@pytest.mark.parametrize(
    ("leader", "deposed_s", "opened"),
    [
        (OLD, NEVER, True),
        (OTHER, NEVER, False),
        (None, NEVER, False),
        (OLD, 100.1 - PEACE_S, False),
        (OLD, 100.0 - PEACE_S, True),
    ],
)
def test_only_the_broken_link_to_the_leader_opens_a_case_and_once_a_minute(
    leader: InstanceId | None, deposed_s: float, opened: bool
) -> None:
    found = suspect(OLD, led_by(leader), KEYS, deposed_s=deposed_s, now_s=100.0)
    assert found == (CASE if opened else None)


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
    verdict = probed(CASE, probes, led_by(OLD), KEYS, linked=False)
    assert verdict.act is act


@pytest.mark.parametrize(
    ("view", "linked"),
    [
        (led_by(None), False),
        (led_by(OTHER, epoch=9), False),
        (led_by(OLD, epoch=9), False),
        (led_by(OLD), True),
    ],
    ids=["resigned", "succeeded", "won again", "shook hands"],
)
def test_what_ends_a_case_meanwhile(view: View, linked: bool) -> None:
    assert probed(CASE, [R, R], view, KEYS, linked=linked).act is Act.WAIT_FOR_LEASE


def test_a_leader_key_written_by_hand_deposes_nobody_and_breaks_nothing() -> None:
    view = View()
    spoilt = KeyValue(key=KEYS.leader, value=b"{", create_revision=7, mod_revision=7, version=1)
    view.reset(10, (spoilt,))
    assert suspect(OLD, view, KEYS, deposed_s=NEVER, now_s=100.0) is None
    assert probed(CASE, [R, R], view, KEYS, linked=False).act is Act.WAIT_FOR_LEASE
