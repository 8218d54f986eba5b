"""Requests that a store rejects. It then writes nothing, not even the other operations of the transaction."""

from __future__ import annotations

import pytest

from strata.core.kv.txn import Compare, Delete, Op, Operation, Put, Range, Target, Txn
from strata.errors import InvalidArgument, NotFound, QuotaExceeded, StrataError
from tests.contract.conftest import Subject


async def refused(subject: Subject, txn: Txn, error: type[StrataError]) -> str:
    before = await subject.head()
    with pytest.raises(error) as raised:
        await subject.store.execute(txn)
    assert await subject.head() == before
    return raised.value.message


def put(subject: Subject, name: str, lease: int = 0) -> Put:
    return Put(key=subject.key(name), value=b"", lease=lease)


def delete(subject: Subject, name: str, end: str | None = None) -> Delete:
    return Delete(key=subject.key(name), range_end=None if end is None else subject.key(end))


@pytest.mark.parametrize("branch", ["success", "failure"])
@pytest.mark.parametrize("case", ["put put", "put delete", "delete put", "put in range", "range around put"])
async def test_a_transaction_that_writes_a_key_twice_is_rejected(
    subject: Subject, branch: str, case: str
) -> None:
    a = put(subject, "a")
    cases: dict[str, tuple[Operation, ...]] = {
        "put put": (a, a),
        "put delete": (a, delete(subject, "a")),
        "delete put": (delete(subject, "a"), a),
        "put in range": (a, delete(subject, "a", "b")),
        "range around put": (delete(subject, "", "b"), a),
    }
    operations = cases[case]
    txn = Txn(success=operations) if branch == "success" else Txn(failure=operations)
    assert "duplicate key" in await refused(subject, txn, InvalidArgument)


async def test_operations_that_do_not_write_a_key_twice_are_accepted(subject: Subject) -> None:
    for operations in (
        (put(subject, "b"), delete(subject, "a", "b")),  # a range does not include its end
        (put(subject, "b"), delete(subject, "c", "a")),  # an inverted range is empty
        (delete(subject, "x"), delete(subject, "x")),
    ):
        await subject.store.execute(Txn(success=operations))
    both = put(subject, "a")
    await subject.store.execute(Txn(success=(both,), failure=(both,)))


@pytest.mark.parametrize(
    "operation", [Put(key="", value=b""), Delete(key=""), Range(key=""), Range(key="", range_end="x")]
)
async def test_an_operation_with_an_empty_key_is_rejected(subject: Subject, operation: Operation) -> None:
    assert "key is not provided" in await refused(subject, Txn(success=(operation,)), InvalidArgument)
    assert "key is not provided" in await refused(subject, Txn(failure=(operation,)), InvalidArgument)


async def test_a_compare_or_read_with_an_empty_key_is_rejected(subject: Subject) -> None:
    compare = Compare(key="", target=Target.VERSION, op=Op.EQUAL, operand=0)
    await refused(subject, Txn(compares=(compare,)), InvalidArgument)
    with pytest.raises(InvalidArgument):
        await subject.store.read(Range(key=""))


@pytest.mark.parametrize(("count", "fits"), [(128, True), (129, False)])
async def test_a_transaction_takes_at_most_128_operations_and_128_compares(
    subject: Subject, count: int, fits: bool
) -> None:
    puts = tuple(put(subject, f"k{number}") for number in range(count))
    compare = Compare(key=subject.key("a"), target=Target.VERSION, op=Op.EQUAL, operand=0)
    for txn in (Txn(success=puts), Txn(failure=puts), Txn(compares=(compare,) * count)):
        if fits:
            await subject.store.execute(txn)
        else:
            assert "too many operations" in await refused(subject, txn, InvalidArgument)


@pytest.mark.parametrize("size", [1_600_000, 3_000_000])
async def test_a_request_above_the_size_limit_is_rejected(subject: Subject, size: int) -> None:
    await subject.put("a", value=b"x" * 1_500_000)
    await refused(subject, Txn(success=(Put(key=subject.key("a"), value=b"x" * size),)), QuotaExceeded)
    kv = await subject.get("a")
    assert kv is not None
    assert len(kv.value) == 1_500_000


async def test_a_put_with_an_unknown_lease_is_rejected(subject: Subject) -> None:
    txn = Txn(success=(put(subject, "a"), put(subject, "b", lease=12345)))
    await refused(subject, txn, NotFound)
    await subject.store.execute(Txn(failure=txn.success))  # the branch that is not executed may be invalid


async def test_a_read_of_a_future_revision_is_rejected(subject: Subject) -> None:
    revision = await subject.put("a")
    with pytest.raises(InvalidArgument):
        await subject.store.read(Range(key=subject.key("a"), revision=revision + 1))
    # a read cannot name the revision that its own transaction creates
    reads = Range(key=subject.key("a"), revision=revision + 1)
    txn = Txn(success=(put(subject, "a"), reads))
    await refused(subject, txn, InvalidArgument)
    await subject.store.execute(Txn(failure=(reads,)))


@pytest.mark.parametrize(("target", "operand"), [(Target.VALUE, 1), (Target.VERSION, b"1")])
async def test_a_compare_whose_operand_has_the_wrong_type_is_rejected(
    subject: Subject, target: Target, operand: int | bytes
) -> None:
    compare = Compare(key=subject.key("a"), target=target, op=Op.EQUAL, operand=operand)
    await refused(subject, Txn(compares=(compare,)), InvalidArgument)


async def test_a_watch_from_revision_zero_is_rejected(subject: Subject) -> None:
    with pytest.raises(InvalidArgument):
        async with subject.store.watch(subject.prefix, None, start_revision=0):
            pass


async def test_a_lease_longer_than_285_years_is_rejected(subject: Subject) -> None:
    with pytest.raises(InvalidArgument):
        await subject.store.grant(9_000_000_001)
