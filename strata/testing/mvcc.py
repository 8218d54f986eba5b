"""etcd's MVCC data model without etcd: keys with versions, revisions, history, compaction.

Pure: no clock, no tasks. All writes of a transaction have the same revision; a transaction that changes nothing makes
no new revision. Behaviour that is not obvious was checked on etcd 3.5.30. `tests/contract` tests the same behaviour
on etcd and on this model.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from strata.core.kv.store import Compacted
from strata.core.kv.txn import (
    Compare,
    Delete,
    Event,
    KeyValue,
    Op,
    Operation,
    Put,
    Range,
    RangeResult,
    Target,
    Txn,
    TxnResult,
)
from strata.errors import InvalidArgument, NotFound

FROM_KEY_ON: Final = "\0"
"""This `range_end` selects every key from `key` on."""


@dataclass(frozen=True, slots=True)
class Revision:
    """The changes of one write, in the order of the write's operations."""

    number: int
    events: tuple[Event, ...]


def covers(key: str, range_end: str | None, candidate: str) -> bool:
    """Return whether a range in etcd's notation contains the key `candidate`."""
    if not range_end:
        return candidate == key
    return candidate >= key and (range_end == FROM_KEY_ON or candidate < range_end)


def _number(target: Target, kv: KeyValue) -> int:
    match target:
        case Target.VERSION:
            return kv.version
        case Target.CREATE:
            return kv.create_revision
        case Target.MOD:
            return kv.mod_revision
        case Target.LEASE:
            return kv.lease
        case Target.VALUE:
            raise AssertionError("a value is no number")


def _related(op: Op, left: int | bytes, right: int | bytes) -> bool:
    if op is Op.EQUAL:
        return left == right
    if op is Op.NOT_EQUAL:
        return left != right
    greater: bool = left > right  # type: ignore[operator] # both are of one type: checked before
    return greater if op is Op.GREATER else left != right and not greater


def _fulfils(compare: Compare, kv: KeyValue) -> bool:
    left = kv.value if compare.target is Target.VALUE else _number(compare.target, kv)
    return _related(compare.op, left, compare.operand)


class State:
    """The keys, their history since the last compaction, and the keys of each lease."""

    def __init__(self) -> None:
        self.head = 1
        """The revision of the last write; etcd begins at 1."""
        self.compacted = 0
        self.leased: dict[int, set[str]] = {}
        """The keys of every lease that exists."""
        self._live: dict[str, KeyValue] = {}
        self._order: list[str] = []
        self._versions: dict[str, list[KeyValue]] = {}
        self._history: list[Revision] = []

    # -- reading -------------------------------------------------------------------------------

    def read(self, request: Range) -> RangeResult:
        """Return the keys of the range at `request.revision`, or at the newest revision."""
        if not request.key:
            raise InvalidArgument("key is not provided")
        self.check_revision(request.revision)
        return self._range(request)

    def check_revision(self, revision: int) -> None:
        """Raise `InvalidArgument` for a future revision, `Compacted` for a compacted one."""
        if revision > self.head:
            raise InvalidArgument(f"revision {revision} is in the future, {self.head} is the newest")
        if 0 < revision < self.compacted:
            raise Compacted(f"revision {revision} was compacted, {self.compacted} is the oldest left")

    def _range(self, request: Range) -> RangeResult:
        if request.revision > 0:
            found = self._at(request.key, request.range_end, request.revision)
        else:
            found = self._now(request.key, request.range_end)
        count = len(found)
        found = [kv for kv in found if kv.mod_revision >= request.min_mod_revision]
        more = 0 < request.limit < len(found)
        if more:
            found = found[: request.limit]
        if request.keys_only:
            found = [replace(kv, value=b"") for kv in found]
        return RangeResult(revision=self.head, kvs=tuple(found), more=more, count=count)

    def _now(self, key: str, range_end: str | None) -> list[KeyValue]:
        if not range_end:
            kv = self._live.get(key)
            return [] if kv is None else [kv]
        first = bisect.bisect_left(self._order, key)
        last = len(self._order) if range_end == FROM_KEY_ON else bisect.bisect_left(self._order, range_end)
        return [self._live[name] for name in self._order[first:last]]

    def _at(self, key: str, range_end: str | None, revision: int) -> list[KeyValue]:
        found = []
        for name in sorted(name for name in self._versions if covers(key, range_end, name)):
            past = [kv for kv in self._versions[name] if kv.mod_revision <= revision]
            if past and past[-1].version:
                found.append(past[-1])
        return found

    def holds(self, compare: Compare) -> bool:
        """Return whether a condition is true now.

        For a range, the condition must be true for every key in the range. An empty range counts as one absent key,
        so `VERSION = 0` is true and `MOD > 5` is false. Every condition on the value of an absent key is false, even
        "is not equal".
        """
        kvs = self._now(compare.key, compare.range_end)
        if kvs:
            return all(_fulfils(compare, kv) for kv in kvs)
        return compare.target is not Target.VALUE and _fulfils(compare, _tombstone(compare.key, 0))

    def history(self, start_revision: int) -> Sequence[Revision]:
        """Return all writes from a revision on; raise `Compacted` if the revision is compacted."""
        if start_revision < self.compacted:
            raise Compacted(f"revision {start_revision} was compacted, {self.compacted} is the oldest left")
        return self._history[self._first(start_revision) :]

    def _first(self, revision: int) -> int:
        return bisect.bisect_left(self._history, revision, key=lambda written: written.number)

    # -- writing -------------------------------------------------------------------------------

    def apply(self, txn: Txn) -> tuple[TxnResult, Revision | None]:
        """Execute a transaction that passed `txn_limits.check`; return its result and its changes.

        If an operation names a lease that does not exist, or reads a revision that is not available, the transaction
        is refused before anything is written. Only the branch that is taken is checked for this.
        """
        succeeded = all(self.holds(compare) for compare in txn.compares)
        operations = txn.success if succeeded else txn.failure
        for operation in operations:
            if isinstance(operation, Put) and operation.lease and operation.lease not in self.leased:
                raise NotFound(f"there is no lease {operation.lease:x}")
        for operation in operations:
            if isinstance(operation, Range):
                try:
                    self.check_revision(operation.revision)
                except Compacted as error:
                    raise InvalidArgument(error.message) from error
        revision = self.head + 1
        events: list[Event] = []
        reads: list[RangeResult] = []
        for operation in operations:
            if isinstance(operation, Range):
                reads.append(self._range(operation))
            else:
                events.extend(self._change(operation, revision))
        written = self._commit(events)
        result = TxnResult(
            succeeded=succeeded,
            revision=self.head,
            reads=tuple(replace(read, revision=self.head) for read in reads),
        )
        return result, written

    def _change(self, operation: Operation, revision: int) -> Iterator[Event]:
        if isinstance(operation, Put):
            yield self._put(operation, revision)
        elif isinstance(operation, Delete):
            for kv in self._now(operation.key, operation.range_end):
                yield self._delete(kv, revision)

    def _put(self, put: Put, revision: int) -> Event:
        old = self._live.get(put.key)
        kv = KeyValue(
            key=put.key,
            value=put.value,
            create_revision=revision if old is None else old.create_revision,
            mod_revision=revision,
            version=1 if old is None else old.version + 1,
            lease=put.lease,
        )
        if old is None:
            bisect.insort(self._order, put.key)
        elif old.lease:
            self.leased[old.lease].discard(put.key)
        if put.lease:
            self.leased[put.lease].add(put.key)
        self._live[put.key] = kv
        return Event(kv=kv)

    def _delete(self, kv: KeyValue, revision: int) -> Event:
        del self._live[kv.key]
        del self._order[bisect.bisect_left(self._order, kv.key)]
        if kv.lease:
            self.leased[kv.lease].discard(kv.key)
        return Event(kv=_tombstone(kv.key, revision), deleted=True)

    def _commit(self, events: Iterable[Event]) -> Revision | None:
        written = tuple(events)
        if not written:
            return None
        self.head += 1
        for event in written:
            self._versions.setdefault(event.kv.key, []).append(event.kv)
        revision = Revision(self.head, written)
        self._history.append(revision)
        return revision

    def drop_lease(self, lease_id: int) -> Revision | None:
        """End an existing lease; its keys are deleted in one revision, in key order."""
        keys = sorted(self.leased[lease_id])
        revision = self.head + 1
        events = [self._delete(self._live[key], revision) for key in keys]
        del self.leased[lease_id]
        return self._commit(events)

    def compact(self, revision: int) -> None:
        """Forget values that were overwritten before `revision`; `revision` itself stays readable."""
        if revision > self.head:
            raise InvalidArgument(f"revision {revision} is in the future, {self.head} is the newest")
        if revision <= self.compacted:
            return
        self.compacted = revision
        del self._history[: self._first(revision)]
        for key, versions in list(self._versions.items()):
            older = _count(versions, lambda kv: kv.mod_revision <= revision)
            if older and not versions[older - 1].version:
                del versions[:older]
            else:
                del versions[: max(0, older - 1)]
            if not versions:
                del self._versions[key]


def _count(versions: Sequence[KeyValue], condition: Callable[[KeyValue], bool]) -> int:
    return sum(1 for kv in versions if condition(kv))


def _tombstone(key: str, revision: int) -> KeyValue:
    return KeyValue(key=key, value=b"", create_revision=0, mod_revision=revision, version=0)
