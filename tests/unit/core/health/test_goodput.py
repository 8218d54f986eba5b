"""Goodput: every second of all generations must be counted once."""

from __future__ import annotations

import pytest

from strata.core.health.goodput import LOST, MAX_PARTS, OTHER, START, STEP, Goodput, Ledger, goodput_text


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(since_s=0.0)


def test_time_is_booked_under_its_phase() -> None:
    ledger = Ledger(since_s=100.0)
    ledger.enter("restore", 101.0)
    ledger.enter(STEP, 103.0)
    ledger.enter("save", 110.0)
    ledger.enter(STEP, 111.0)
    found = ledger.goodput(114.0)
    assert found.spent_s == {START: 1.0, "restore": 2.0, STEP: 10.0, "save": 1.0}
    assert (found.spent_s["step"], found.total_s) == (10.0, 14.0)
    assert str(found) == "71.4% of 14.0 s; else restore 2.0, start 1.0, save 1.0"


def test_training_time_after_the_last_checkpoint_counts_as_lost() -> None:
    first = Ledger(since_s=0.0)
    first.enter(STEP, 1.0)
    text = first.saved(11.0, 1011.0)  # saved at 1011; the rank trains on and dies at 1015
    second = Ledger(since_s=500.0)  # on another host, whose clock began at 1018
    second.enter("restore", 501.0)
    second.go_on(text, lost_since_unix_s=0.0, began_unix_s=1016.0, now_s=501.0, now_unix_s=1019.0)
    found = second.goodput(502.0)
    assert found.spent_s == pytest.approx({START: 1.0 + 1.0 + 2.0, STEP: 10.0, LOST: 5.0, "restore": 1.0})
    assert found.total_s == pytest.approx(1020.0 - 1000.0), "every second since the beginning, once"


def test_time_spent_fetching_the_history_is_booked_once(ledger: Ledger) -> None:
    ledger.enter(START, 2.0)
    ledger.go_on("", lost_since_unix_s=1000.0, began_unix_s=1000.0, now_s=3.5, now_unix_s=1003.5)
    assert ledger.goodput(4.0).spent_s == {START: 4.0, LOST: 0.0}


def test_clock_skew_neither_loses_nor_adds_goodput_seconds() -> None:
    first = Ledger(since_s=0.0)
    text = first.saved(10.0, 1010.0)
    for began, now in ((900.0, 1012.0), (2000.0, 1012.0), (0.0, 1012.0)):
        second = Ledger(since_s=0.0)
        second.go_on(text, lost_since_unix_s=0.0, began_unix_s=began, now_s=0.0, now_unix_s=now)
        assert second.goodput(0.0).total_s == pytest.approx(12.0)
    back = Ledger(since_s=0.0)
    back.go_on(text, lost_since_unix_s=0.0, began_unix_s=900.0, now_s=0.0, now_unix_s=950.0)
    assert back.goodput(0.0).total_s == pytest.approx(10.0)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"spent_s": 1, "unix_s": 2}', '{"spent_s": {"a": "x"}}'])
def test_without_a_saved_account_the_time_before_this_generation_is_lost(ledger: Ledger, text: str) -> None:
    ledger.enter("restore", 2.0)
    ledger.go_on(text, lost_since_unix_s=1000.0, began_unix_s=1040.0, now_s=2.0, now_unix_s=1045.0)
    assert ledger.goodput(3.0).spent_s == {LOST: 40.0, START: 5.0, "restore": 1.0}
    assert ledger.goodput(3.0).total_s == 46.0


def test_the_wait_for_a_world_is_not_booked_to_its_generation(ledger: Ledger) -> None:
    ledger.enter("restore", 95.0)  # a standalone process that waited 90 s for others
    ledger.go_on("", lost_since_unix_s=1090.0, began_unix_s=1090.0, now_s=95.0, now_unix_s=1095.0)
    assert ledger.goodput(96.0).total_s == pytest.approx(6.0)


def test_a_world_that_is_given_up_before_its_first_step_is_booked_once() -> None:
    first = Ledger(since_s=0.0)
    first.enter(STEP, 0.0)
    text = first.saved(1000.0, 2000.0)
    second = Ledger(since_s=0.0)
    second.go_on(text, lost_since_unix_s=0.0, began_unix_s=2001.0, now_s=0.0, now_unix_s=2002.0)
    second.enter("join", 3.0)
    second.go_on(text, lost_since_unix_s=0.0, began_unix_s=2008.0, now_s=3.0, now_unix_s=2009.0)
    assert second.goodput(3.0).total_s == pytest.approx(1009.0)
    assert second.goodput(3.0).spent_s[STEP] == pytest.approx(1000.0)


def test_made_up_phases_do_not_grow_without_end(ledger: Ledger) -> None:
    for i in range(100):
        ledger.enter(f"phase {i}", float(i))
    found = ledger.goodput(100.0)
    assert len(found.spent_s) == MAX_PARTS + 1
    assert found.total_s == 100.0
    assert found.spent_s[OTHER] > 50
    assert len(ledger.saved(100.0, 1.7e9)) < 450, "it goes with a barrier of a thousand ranks"


def test_goodput_without_spent_time_is_zero() -> None:
    assert Goodput(spent_s={}).ratio == 0.0


def test_goodput_is_formatted_as_text() -> None:
    ledger = Ledger(since_s=0.0, phase=STEP)
    ledger.enter("save", 3.0)
    assert goodput_text(ledger.saved(4.0, 9.0)) == "75.0% of 4.0 s; else save 1.0"
    assert goodput_text("") == goodput_text("[1]") == ""
