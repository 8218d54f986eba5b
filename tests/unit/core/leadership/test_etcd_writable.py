"""Whether etcd takes writes: faults that count at once or after an election, and the write that ends an outage."""

from __future__ import annotations

from strata.core.leadership.etcd_writable import DRY_RUN_S, ELECTION_S, Writability


def test_at_rest_one_dry_run_a_minute_is_due() -> None:
    state = Writability(proven_s=100.0)
    assert not state.is_due(100.0 + DRY_RUN_S - 1)
    assert state.is_due(100.0 + DRY_RUN_S)
    state.proved(200.0)
    assert not state.is_due(200.0 + DRY_RUN_S - 1)


def test_a_full_etcd_counts_at_once_and_a_write_ends_it() -> None:
    state = Writability(proven_s=0.0)
    state.full()
    assert "quota is used up" in state.outage(1.0)
    assert "strata doctor" in state.outage(1.0)
    assert state.is_due(1.0)
    state.proved(2.0)
    assert state.outage(2.0) == ""


def test_an_election_is_no_outage_and_a_longer_failure_is() -> None:
    state = Writability(proven_s=0.0)
    state.failed(10.0, "no answer")
    assert state.is_due(10.5)
    assert state.outage(10.0 + ELECTION_S - 0.1) == ""
    state.failed(12.0, "it has no leader: 1 of 3 members answers")
    assert state.outage(15.0) == (
        "nothing can be written: etcd has taken no write for 5 s (it has no leader: 1 of 3 members answers)"
    )
    state.proved(16.0)
    assert state.outage(100.0) == ""


def test_a_suspected_etcd_fault_makes_a_dry_run_due_and_no_outage() -> None:
    state = Writability(proven_s=0.0)
    state.suspect()
    assert state.is_due(0.1)
    assert state.outage(0.1) == ""
