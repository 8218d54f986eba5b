"""Unsent answers are bounded by caller, by age and in total."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.access.unsent_answers import DebtLimits, Debts
from strata.errors import QuotaExceeded

LIMITS = DebtLimits(each_bytes=100, all_bytes=250, longest_s=60.0, least_s=1.0)


def test_a_caller_with_too_many_unsent_bytes_is_refused_until_it_reads() -> None:
    debts = Debts(limits=LIMITS)
    debts.check("ann")
    first, second = (debts.owe("ann", connection, 50, 0.0) for connection in ("a1", "a2"))
    with pytest.raises(QuotaExceeded, match="100 bytes of answers are waiting for ann"):
        debts.check("ann")
    debts.check("bob")
    debts.paid(second)
    debts.paid(second)
    debts.check("ann")
    debts.paid(first)
    assert debts == Debts(limits=LIMITS), "nothing is remembered of who is owed nothing"


def test_a_connection_with_an_answer_unsent_for_a_minute_is_overdue() -> None:
    debts = Debts(limits=LIMITS)
    debts.owe("ann", "a1", 1, 0.0)
    debts.owe("ann", "a1", 0, 1.0)
    debts.owe("ann", "a2", 0, 30.0)
    assert list(debts.overdue(59.9)) == []
    assert list(debts.overdue(61.0)) == ["a1"]
    assert list(debts.overdue(90.0)) == ["a1", "a2"]
    debts.written_off("a1")
    assert list(debts.overdue(90.0)) == ["a2"]


def test_above_the_total_limit_the_caller_with_most_unsent_bytes_is_closed() -> None:
    """Above the total limit, the caller with most unsent bytes over all connections loses its largest ones."""
    debts = Debts(limits=LIMITS)
    for number in range(8):
        debts.owe(f"slow{number}", f"s{number}", 20, 0.0)
    for number in range(5):
        debts.owe("greedy", f"g{number}", 10 + number, 1.0)
    debts.owe("large", "l", 55, 1.0)
    debts.owe("nothing", "n", 0, 0.0)
    assert list(debts.overdue(1.5)) == ["s0", "s1"], "the others are too young"
    assert list(debts.overdue(2.5)) == ["g4", "g3"], "its connections have less each, and it has more"
    debts.owe("large", "l", 50, 2.5)
    assert list(debts.overdue(2.5)) == ["l"], "all of a connection goes with it, also what is young"
    assert list(debts.overdue(0.5)) == [], "all are too young"


@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 90), st.floats(0.0, 30.0)), max_size=40),
    st.integers(0, 40),
)
def test_the_total_is_the_sum_of_unpaid_debts(made: list[tuple[int, int, float]], paid: int) -> None:
    debts, clock = Debts(limits=LIMITS), 0.0
    owed = []
    for caller, size, later_s in made:
        clock += later_s
        owed.append(debts.owe(f"d{caller}", f"c{caller}", size, clock))
    for debt in owed[:paid]:
        debts.paid(debt)
    assert debts.total_bytes == sum(debt.size_bytes for debt in owed[paid:])
    for connection in list(debts.overdue(clock)):
        debts.written_off(connection)
    assert (
        all(clock - debt.since_s < LIMITS.least_s for debt in owed)
        or debts.total_bytes <= LIMITS.all_bytes
        or any(clock - debt.since_s < LIMITS.least_s for debt in owed[paid:])
    )
    for debt in owed:
        debts.paid(debt)
    assert debts.total_bytes == 0
