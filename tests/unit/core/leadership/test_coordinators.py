"""The list of coordinators: written when one registers or departs; only an operator removes entries."""

from __future__ import annotations

import pytest

from strata.core.ids import InstanceId
from strata.core.kv.records import Replica
from strata.core.kv.txn import Put, Txn
from strata.core.leadership.coordinators import MAX_LISTED, Coordinator, decide_forget, plan_list, unreachable
from strata.errors import NotFound, Refused
from tests.unit.core.rig import KEYS, Observer, Store, lead, serve

NOW = 1_700_000_000_000


@pytest.fixture
def store() -> Store:
    made = Store()
    lead(made)
    for name in ("r1", "r2", "r3"):
        serve(made, name)
    return made


def epoch(store: Store) -> int:
    held = store.view().get(KEYS.leader)
    return held.create_revision if held is not None else 0


def listed(store: Store, *, now: int = NOW) -> int:
    """Let the leader update the list; return the number of transactions."""
    plan = plan_list(store.view(), KEYS, epoch=epoch(store), now_unix_ms=now)
    for txn in plan.txns:
        assert store.execute(txn).succeeded
    return len(plan.txns)


def forget(store: Store, name: str, *, known: bool = True) -> None:
    decision = decide_forget(store.view(), KEYS, name, known=known)
    if decision.refusal is not None:
        raise decision.refusal
    if decision.txn is not None:
        assert store.execute(decision.txn).succeeded


def wait_exit(store: Store) -> dict[str, int]:
    found = unreachable(store.view(), KEYS)
    return {name: record.unreachable_since_unix_ms for name, record in found.items()}


def test_a_coordinator_with_an_expired_lease_stays_listed_with_address_and_time(store: Store) -> None:
    assert listed(store) == 3
    store.delete(KEYS.replica("r2"))
    assert wait_exit(store) == {"r2": 0}, "before the leader has written, too"
    assert listed(store) == 1
    assert unreachable(store.view(), KEYS) == {
        "r2": Coordinator(address="r2:1", epoch=epoch(store), unreachable_since_unix_ms=NOW)
    }


def test_nothing_is_written_while_the_coordinators_stay_the_same(store: Store) -> None:
    listed(store)
    assert listed(store, now=NOW + 1) == 0
    store.delete(KEYS.replica("r2"))
    listed(store)
    assert listed(store, now=NOW + 60_000) == 0
    lead(store, "r3")
    assert listed(store, now=NOW + 60_000) == 0, "a new leader keeps the time that the one before wrote"
    assert wait_exit(store) == {"r2": NOW}


def test_a_coordinator_that_registers_again_is_reachable_and_may_change_its_address(store: Store) -> None:
    listed(store)
    store.delete(KEYS.replica("r2"))
    listed(store)
    store.put(KEYS.replica("r2"), Replica(instance=InstanceId("other"), address="new:1"))
    assert wait_exit(store) == {}, "whatever the list says"
    assert listed(store) == 1
    store.delete(KEYS.replica("r2"))
    assert unreachable(store.view(), KEYS)["r2"].address == "new:1"
    assert wait_exit(store) == {"r2": 0}


def test_a_plan_fails_if_the_coordinator_returned_or_the_leader_changed(store: Store) -> None:
    listed(store)
    store.delete(KEYS.replica("r2"))
    late = Observer(store)
    serve(store, "r2")
    (txn,) = plan_list(late.view, KEYS, epoch=epoch(store), now_unix_ms=NOW).txns
    assert not store.execute(txn).succeeded
    store.delete(KEYS.replica("r2"))
    old = epoch(store)
    lead(store, "r3")
    (txn,) = plan_list(store.view(), KEYS, epoch=old, now_unix_ms=NOW).txns
    assert not store.execute(txn).succeeded


def test_only_an_unreachable_coordinator_can_be_removed_from_the_list(store: Store) -> None:
    listed(store)
    with pytest.raises(Refused, match="coordinator r2 runs at r2:1"):
        forget(store, "r2")
    store.delete(KEYS.replica("r2"))
    forget(store, "r2")
    assert wait_exit(store) == {}
    assert listed(store) == 0, "it does not come back by itself"
    forget(store, "r2")  # a retry after a lost answer
    with pytest.raises(NotFound, match="no coordinator is called r2"):
        forget(store, "r2", known=False)


def test_a_forget_fails_if_the_coordinator_returned(store: Store) -> None:
    listed(store)
    store.delete(KEYS.replica("r2"))
    decision = decide_forget(store.view(), KEYS, "r2", known=True)
    serve(store, "r2")
    assert decision.txn is not None
    assert not store.execute(decision.txn).succeeded


def test_the_leader_lists_a_running_coordinator_that_the_list_lacks(
    store: Store,
) -> None:
    listed(store)
    store.delete(KEYS.replica("r2"))
    forget(store, "r2")
    serve(store, "r2")
    assert listed(store) == 1
    store.delete(KEYS.replica("r2"))
    assert wait_exit(store) == {"r2": 0}


def test_an_invalid_value_hides_no_coordinator_and_is_replaced(store: Store) -> None:
    listed(store)
    store.execute(Txn(success=(Put(key=KEYS.coordinator("r2"), value=b"{"),)))
    store.execute(Txn(success=(Put(key=f"{KEYS.coordinators}a b", value=b"{"),)))
    store.delete(KEYS.replica("r2"))
    assert wait_exit(store) == {"r2": 0}, "and no coordinator can be called `a b`"
    serve(store, "r2")
    assert listed(store) >= 1
    assert store.view().record(KEYS.coordinator("r2"), Coordinator) is not None


def test_the_number_of_listed_coordinators_is_bounded(store: Store) -> None:
    for number in range(MAX_LISTED + 5):
        serve(store, f"pod-{number}")
        listed(store)
        store.delete(KEYS.replica(f"pod-{number}"))
        listed(store)
    assert len(wait_exit(store)) == MAX_LISTED - 3, "the three that run were there first"
