"""Which transaction a revision is the work of, and which one can take no effect any more."""

from __future__ import annotations

from strata.core.kv.txn import Delete, Event, KeyValue, Op, Operation, Put, Target, Txn
from strata.testing.mvcc import Revision


def writes(txn: Txn, written: Revision) -> bool:
    """Tell whether a revision may be the work of a transaction: it changes nothing else."""
    operations = (*txn.success, *txn.failure)
    return all(any(_makes(operation, event) for operation in operations) for event in written.events)


def _makes(operation: Operation, event: Event) -> bool:
    key = event.kv.key
    if event.deleted and isinstance(operation, Delete) and operation.range_end is not None:
        return operation.key <= key < operation.range_end
    return isinstance(operation, Delete if event.deleted else Put) and operation.key == key


def is_of_the_past(txn: Txn, kv: KeyValue | None) -> bool:
    """Tell whether a transaction can take no effect, now or later: it compares a revision that `kv` has left.

    Revisions of a key only grow. So one that is sent again, because its outcome is unknown, is aimed
    at whoever held the key when it was decided, not at who holds it now.
    """
    return kv is not None and any(
        compare.key == kv.key
        and compare.range_end is None
        and compare.op is Op.EQUAL
        and isinstance(compare.operand, int)
        and (
            (compare.target is Target.CREATE and 0 < compare.operand < kv.create_revision)
            or (compare.target is Target.MOD and 0 < compare.operand < kv.mod_revision)
        )
        for compare in txn.compares
    )
