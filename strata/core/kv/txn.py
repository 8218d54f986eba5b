"""A transaction is data.

A decision answers with a `Txn`; one `Store` executes it. The shapes follow etcd's v3 `Txn`: all
`compares` must hold, then the `success` operations are applied in one revision, else the
`failure` operations are. A key may be written at most once in a transaction.

Keys are `str` here (ours are ASCII, see `core.kv.keys`), values are `bytes`.
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
"""etcd's default `--max-txn-ops`: compares, success and failure operations are each bounded."""

MAX_TXN_BYTES = 1 << 20
"""The size we keep a transaction below; etcd's own default limit is 1.5 MiB."""


class Target(Enum):
    """The property of a key that a `Compare` looks at."""

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

    An absent key has version, create revision, mod revision and lease 0, and an empty range counts
    as one absent key: of it `VERSION = 0` and `MOD < 5` hold, `MOD > 5` does not. Nothing holds of
    the VALUE of an absent key or an empty range, not even NOT_EQUAL.
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
    display only. `keys_only` leaves values empty. `min_mod_revision` leaves out, and does not count
    in `limit`, what was last written before.
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

    `count` is how many keys the range has, those included that the request left out.
    """

    revision: int
    kvs: tuple[KeyValue, ...]
    more: bool = False
    count: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Txn:
    """If all of `compares` hold apply `success`, else `failure`, atomically."""

    compares: tuple[Compare, ...] = ()
    success: tuple[Operation, ...] = ()
    failure: tuple[Operation, ...] = ()

    def and_if(self, *compares: Compare) -> Txn:
        """Return this transaction with further conditions."""
        return Txn(compares=(*self.compares, *compares), success=self.success, failure=self.failure)

    def then(self, *operations: Operation) -> Txn:
        """Return this transaction with further success operations."""
        return Txn(compares=self.compares, success=(*self.success, *operations), failure=self.failure)


@dataclass(frozen=True, slots=True, kw_only=True)
class TxnResult:
    """Whether the compares held, at which revision, and what the `Range` operations read.

    `reads` holds one `RangeResult` per `Range` of the executed branch, in order. When something
    was written, `revision` is the revision of that write.
    """

    succeeded: bool
    revision: int
    reads: tuple[RangeResult, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One key changed: `kv` is the new state; for a delete only key and mod_revision count."""

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
    """A lease as the store granted it; `ttl_s` may be longer than what was asked."""

    id: int
    ttl_s: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do, and why, in words a person reads.

    With a `txn`: execute it, bring the view to its revision, and decide again. Without one,
    nothing is left to do: either things are as asked, or `refusal` says why they cannot be.
    A decision therefore recognises its own effect, and repeating one is harmless.
    """

    reason: str
    txn: Txn | None = None
    refusal: StrataError | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a leader writes, and why: each transaction for itself, so that one that fails is planned anew."""

    reason: str
    txns: tuple[Txn, ...] = ()


def refusable(decide: Callable[P, Decision]) -> Callable[P, Decision]:
    """Make an error that `decide` raises its refusal, so that the caller gives it from a fresh view only (2.2).

    A poison record refuses nothing: it is raised at once.
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


# -- conditions by the names the protocols use them -------------------------------------------


def absent(key: str) -> Compare:
    """Hold when `key` does not exist."""
    return Compare(key=key, target=Target.VERSION, op=Op.EQUAL, operand=0)


def present(key: str) -> Compare:
    """Hold when `key` exists."""
    return Compare(key=key, target=Target.VERSION, op=Op.GREATER, operand=0)


def created_at(key: str, revision: int) -> Compare:
    """Hold when `key` is the incarnation created at `revision`, which must be above 0.

    A fence on 0 would hold on an absent key.
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
    """Hold when nothing below `prefix` was added or changed after `revision`.

    Range compares do not see deletes.
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
