"""Transactions as data: `Txn`, its compares and operations, and the decisions and plans that carry one.

A decision returns a `Txn`; one `Store` executes it. The shapes follow etcd's v3 `Txn`: if all
`compares` hold, the `success` operations are applied in one revision, otherwise the
`failure` operations are. A transaction may write a key at most once.

Keys are `str` here (Strata's are ASCII, see `core.kv.keys`), values are `bytes`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import ParamSpec

from strata.core.kv.codec import PoisonRecord
from strata.errors import StrataError

P = ParamSpec("P")

MAX_OPS = 128
"""etcd's default `--max-txn-ops`, a limit for each of the three lists: compares, success and failure operations."""

MAX_TXN_BYTES = 1 << 20
"""The upper bound for a transaction's size; etcd's own default limit is 1.5 MiB."""


class Target(Enum):
    """The property of a key that a `Compare` tests."""

    VERSION = "version"
    CREATE = "create_revision"
    MOD = "mod_revision"
    VALUE = "value"
    LEASE = "lease"


class Op(Enum):
    """The relation that must hold between the key's property and the operand."""

    EQUAL = "="
    NOT_EQUAL = "!="
    GREATER = ">"
    LESS = "<"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """A condition on one key, or on every existing key of `[key, range_end)`.

    An absent key has version, create revision, mod revision and lease 0. An empty range counts
    as one absent key: `VERSION = 0` and `MOD < 5` hold for it, `MOD > 5` does not. No compare of
    VALUE holds for an absent key or an empty range, not even NOT_EQUAL.
    """

    key: str
    target: Target
    op: Op
    operand: int | bytes
    range_end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Put:
    """Write `value` under `key`, attached to `lease` (0: none)."""

    key: str
    value: bytes
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete:
    """Remove `key`, or every key of `[key, range_end)`."""

    key: str
    range_end: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Read `key`, or every key of `[key, range_end)`, in key order.

    `revision` 0 means now; `limit` 0 means all. `serializable` reads may be stale and are for
    display only. `keys_only` leaves values empty. `min_mod_revision` excludes keys last written before that
    revision; excluded keys do not count against `limit`.
    """

    key: str
    range_end: str | None = None
    revision: int = 0
    limit: int = 0
    serializable: bool = False
    keys_only: bool = False
    min_mod_revision: int = 0


Operation = Put | Delete | Range


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyValue:
    """One key as the store holds it. `version` counts writes since creation."""

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeResult:
    """The keys read, the store's revision at that time, and whether `limit` cut the answer.

    `count` is the number of keys in the range, including those that the request excluded.
    """

    revision: int
    kvs: tuple[KeyValue, ...]
    more: bool = False
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Txn:
    """If all of `compares` hold, apply `success`, else `failure`, atomically."""

    compares: tuple[Compare, ...] = ()
    success: tuple[Operation, ...] = ()
    failure: tuple[Operation, ...] = ()

    def and_if(self, *compares: Compare) -> Txn:
        """Return this transaction with additional compares."""
        return Txn(compares=(*self.compares, *compares), success=self.success, failure=self.failure)

    def then(self, *operations: Operation) -> Txn:
        """Return this transaction with additional success operations."""
        return Txn(compares=self.compares, success=(*self.success, *operations), failure=self.failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """Whether the compares held, at which revision, and what the `Range` operations read.

    `reads` holds one `RangeResult` per `Range` of the executed branch, in order. If the transaction
    wrote a key, `revision` is the revision of that write.
    """

    succeeded: bool
    revision: int
    reads: tuple[RangeResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One key changed: `kv` is the new state; for a delete only its key and mod_revision are meaningful."""

    kv: KeyValue
    deleted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchBatch:
    """All watched changes of whole revisions, in order.

    After this batch the watcher has seen everything up to and including `revision`. A batch
    without events is a progress notice.
    """

    revision: int
    events: tuple[Event, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A lease as the store granted it; `ttl_s` may be longer than requested."""

    id: int
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to write next, and the reason in a sentence for people.

    If there is a `txn`, the caller executes it, brings the view to its revision, and decides again. Without a `txn`
    nothing is left to do: either the request is already fulfilled, or `refusal` says why it cannot be fulfilled. A
    decision must therefore recognise its own effect, so that repeating it is harmless.
    """

    reason: str
    txn: Txn | None = None
    refusal: StrataError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The leader's next writes, and the reason.

    The transactions are independent: if one fails, the leader plans again.
    """

    reason: str
    txns: tuple[Txn, ...] = ()


def refusable(decide: Callable[P, Decision]) -> Callable[P, Decision]:
    """Turn an error that `decide` raises into a refusal, so that the caller reports it only from a fresh view (2.2).

    `PoisonRecord` is no refusal: it is raised immediately.
    """

    @functools.wraps(decide)
    def decided(*args: P.args, **kwargs: P.kwargs) -> Decision:
        try:
            return decide(*args, **kwargs)
        except PoisonRecord:
            raise
        except StrataError as error:
            return Decision(reason=error.message, refusal=error)

    return decided


# -- compares, by the names that the protocols give them ---------------------------------------


def absent(key: str) -> Compare:
    """Hold when `key` does not exist."""
    return Compare(key=key, target=Target.VERSION, op=Op.EQUAL, operand=0)


def present(key: str) -> Compare:
    """Hold when `key` exists."""
    return Compare(key=key, target=Target.VERSION, op=Op.GREATER, operand=0)


def created_at(key: str, revision: int) -> Compare:
    """Hold when `key` exists and was created at `revision`.

    `revision` must be above 0: a compare with 0 would hold for an absent key.
    """
    if revision <= 0:
        raise ValueError(f"a create revision is above 0, not {revision}")
    return Compare(key=key, target=Target.CREATE, op=Op.EQUAL, operand=revision)


def unchanged(key: str, mod_revision: int) -> Compare:
    """Hold when `key` was last written at `mod_revision`; 0 means that it is absent."""
    return Compare(key=key, target=Target.MOD, op=Op.EQUAL, operand=mod_revision)


def none_in(prefix: str) -> Compare:
    """Hold when no key begins with `prefix`."""
    return Compare(
        key=prefix,
        range_end=prefix_end(prefix),
        target=Target.VERSION,
        op=Op.EQUAL,
        operand=0,
    )


def none_newer_in(prefix: str, revision: int) -> Compare:
    """Hold when no key below `prefix` was added or changed after `revision`.

    Range compares do not detect deletes.
    """
    return Compare(
        key=prefix,
        range_end=prefix_end(prefix),
        target=Target.MOD,
        op=Op.LESS,
        operand=revision + 1,
    )


def prefix_end(prefix: str) -> str:
    """Return the first key after every key that begins with `prefix`."""
    if not prefix:
        raise ValueError("an empty prefix has no end")
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def read_prefix(prefix: str, *, revision: int = 0, serializable: bool = False) -> Range:
    """Read every key that begins with `prefix`."""
    return Range(key=prefix, range_end=prefix_end(prefix), revision=revision, serializable=serializable)


def delete_prefix(prefix: str) -> Delete:
    """Remove every key that begins with `prefix`."""
    return Delete(key=prefix, range_end=prefix_end(prefix))
