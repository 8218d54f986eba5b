"""Compares whose result is not intuitive: absent keys, values, ranges.

`EXPECTED` has the answers of etcd 3.5.30. PROTOCOLS 2.1 depends on the rows of the empty range.
"""

from __future__ import annotations

import pytest

from strata.core.kv.txn import (
    Compare,
    Op,
    Target,
    Txn,
    absent,
    created_at,
    none_in,
    none_newer_in,
    present,
    unchanged,
)
from tests.contract.conftest import Subject

NUMBERS = [Target.VERSION, Target.CREATE, Target.MOD, Target.LEASE]


async def holds(subject: Subject, *compares: Compare) -> bool:
    return (await subject.store.execute(Txn(compares=compares))).succeeded


@pytest.mark.parametrize("target", NUMBERS)
@pytest.mark.parametrize("ranged", [False, True], ids=["key", "empty range"])
async def test_an_absent_key_counts_as_zero_and_so_does_an_empty_range(
    subject: Subject, target: Target, ranged: bool
) -> None:
    truths = {
        (op, operand): await holds(
            subject,
            Compare(
                key=subject.key("a"),
                range_end=subject.key("b") if ranged else None,
                target=target,
                op=op,
                operand=operand,
            ),
        )
        for op in Op
        for operand in (-1, 0, 1)
    }
    assert truths == {
        (op, operand): {
            Op.EQUAL: operand == 0,
            Op.NOT_EQUAL: operand != 0,
            Op.GREATER: operand < 0,
            Op.LESS: operand > 0,
        }[op]
        for op, operand in truths
    }


@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("operand", [b"", b"x"])
@pytest.mark.parametrize("ranged", [False, True], ids=["key", "empty range"])
async def test_a_value_compare_of_an_absent_key_never_holds(
    subject: Subject, op: Op, operand: bytes, ranged: bool
) -> None:
    end = subject.key("b") if ranged else None
    compare = Compare(key=subject.key("a"), range_end=end, target=Target.VALUE, op=op, operand=operand)
    assert not await holds(subject, compare)


@pytest.mark.parametrize(
    ("op", "true_for"),
    [(Op.EQUAL, b"b"), (Op.NOT_EQUAL, b"ac"), (Op.GREATER, b"a"), (Op.LESS, b"c")],
)
async def test_values_compare_as_bytes(subject: Subject, op: Op, true_for: bytes) -> None:
    await subject.put("k", value=b"b")
    for operand in (b"a", b"b", b"c"):
        compare = Compare(key=subject.key("k"), target=Target.VALUE, op=op, operand=operand)
        assert await holds(subject, compare) is (operand in true_for)


async def test_a_range_condition_must_hold_of_every_key(subject: Subject) -> None:
    old = await subject.put("a/1", "a/2")
    new = await subject.put("a/2")

    def compare(op: Op, operand: int) -> Compare:
        return Compare(
            key=subject.key("a/"), range_end=subject.key("a0"), target=Target.MOD, op=op, operand=operand
        )

    assert await holds(subject, compare(Op.LESS, new + 1))
    assert not await holds(subject, compare(Op.LESS, new))
    assert not await holds(subject, compare(Op.EQUAL, new))
    assert await holds(subject, compare(Op.GREATER, old - 1))
    assert not await holds(subject, compare(Op.GREATER, old))
    assert not await holds(subject, compare(Op.NOT_EQUAL, new))


async def test_an_inverted_range_is_an_empty_one(subject: Subject) -> None:
    await subject.put("a", "b", "c")
    inverted = Compare(
        key=subject.key("c"), range_end=subject.key("a"), target=Target.VERSION, op=Op.EQUAL, operand=0
    )
    assert await holds(subject, inverted)


async def test_the_named_conditions_match_the_state_of_the_key(subject: Subject) -> None:
    a = subject.key("a")
    assert await holds(subject, absent(a), unchanged(a, 0), none_in(a), none_newer_in(a, 0))
    assert not await holds(subject, present(a))
    created = await subject.put("a")
    assert await holds(subject, present(a), created_at(a, created), unchanged(a, created))
    assert not await holds(subject, absent(a))
    changed = await subject.put("a")
    assert await holds(subject, created_at(a, created), unchanged(a, changed))
    assert not await holds(subject, unchanged(a, created))
    assert not await holds(subject, created_at(a, changed))
    assert await holds(subject, none_newer_in(subject.prefix, changed))
    assert not await holds(subject, none_newer_in(subject.prefix, created))
    assert not await holds(subject, none_in(subject.prefix))


async def test_a_compare_of_the_lease_holds_until_the_lease_changes(subject: Subject) -> None:
    lease = await subject.store.grant(60)
    await subject.put("a", lease=lease.id)
    compare = Compare(key=subject.key("a"), target=Target.LEASE, op=Op.EQUAL, operand=lease.id)
    assert await holds(subject, compare)
    await subject.put("a")
    assert not await holds(subject, compare)
    await subject.store.revoke(lease.id)


async def test_compares_evaluate_the_state_before_the_transaction(subject: Subject) -> None:
    a = subject.key("a")
    txn = Txn(compares=(absent(a),)).then()
    assert (await subject.store.execute(txn)).succeeded
    revision = await subject.put("a")
    await subject.store.execute(Txn(compares=(unchanged(a, revision),)).then())
    assert await holds(subject, unchanged(a, revision))
