"""The checks that etcd makes on a transaction before it reads any data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from strata.core.kv.txn import MAX_OPS, Compare, Delete, Operation, Put, Target, Txn
from strata.errors import InvalidArgument, QuotaExceeded
from strata.testing.mvcc import covers

MAX_REQUEST_BYTES: Final = 1_572_864
"""etcd's default `--max-request-bytes`. `check` counts keys and values only; etcd's count is a little higher (some 10
bytes an operation)."""


def check(txn: Txn) -> None:
    """Raise `InvalidArgument` or `QuotaExceeded` if etcd would refuse the transaction in any state."""
    if max(len(txn.compares), len(txn.success), len(txn.failure)) > MAX_OPS:
        raise InvalidArgument("too many operations in txn request")
    for compare in txn.compares:
        _check_compare(compare)
    for branch in (txn.success, txn.failure):
        _check_branch(branch)
    size = sum(_size(operation) for branch in (txn.success, txn.failure) for operation in branch)
    if size > MAX_REQUEST_BYTES:
        raise QuotaExceeded(f"request is too large: {size} bytes")


def _check_compare(compare: Compare) -> None:
    if not compare.key:
        raise InvalidArgument("key is not provided")
    if isinstance(compare.operand, bytes) is not (compare.target is Target.VALUE):
        raise InvalidArgument("a value is compared with bytes, everything else with a number")


def _check_branch(operations: Sequence[Operation]) -> None:
    """Raise `InvalidArgument` if a key is put twice, or put and deleted, in any order; deletes may overlap."""
    if not all(operation.key for operation in operations):
        raise InvalidArgument("key is not provided")
    deletes = [operation for operation in operations if isinstance(operation, Delete)]
    put_keys: set[str] = set()
    for put in operations:
        if isinstance(put, Put):
            if put.key in put_keys or any(covers(d.key, d.range_end, put.key) for d in deletes):
                raise InvalidArgument("duplicate key given in txn request")
            put_keys.add(put.key)


def _size(operation: Operation) -> int:
    value = len(operation.value) if isinstance(operation, Put) else 0
    return len(operation.key) + value
