"""Two predicates on transactions: whether one may have made a revision, and whether it can still take effect."""

from __future__ import annotations

from strata.core.kv.txn import Delete, Event, KeyValue, Op, Operation, Put, Target, Txn
from strata.testing.mvcc import Revision


def writes(txn: Txn, written: Revision) -> bool:
    """Return whether a transaction may have made a revision: it writes every key that the revision changes."""
    operations = (*txn.success, *txn.failure)
    return all(any(_makes(operation, event) for operation in operations) for event in written.events)


def _makes(operation: Operation, event: Event) -> bool:
    key = event.kv.key
    if event.deleted and isinstance(operation, Delete) and operation.range_end is not None:
        return operation.key <= key < operation.range_end
    return isinstance(operation, Delete if event.deleted else Put) and operation.key == key


def is_of_the_past(txn: Txn, kv: KeyValue | None) -> bool:
    """Return whether a transaction can never take effect, because it compares an older revision than that of `kv`.

    Revisions of a key only grow. So a transaction that is resent after an unknown outcome concerns the key's holder
    at the time of the decision, not the present holder.
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
