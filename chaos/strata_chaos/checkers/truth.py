"""etcd's side of a run: the transactions in order, the state before each, and the commit times.

A run may have several *lives* of etcd. A life begins with empty disks or with a snapshot, and ends with the loss of
all members. Revisions, epochs and incarnations are comparable only within one life. `Lives.of` maps a cluster's uid to
its life.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from strata_chaos.checkers.keyspace import Key, parse_key, parse_value
from strata_chaos.history import Record, Where


class Held(NamedTuple):
    """The state of a key at one revision."""

    create_revision: int
    mod_revision: int
    value: dict[str, Any] | None


class Event(NamedTuple):
    """One put or delete of a key. `before` is the previous state of the key; `raw` is the value as text."""

    key: Key
    name: str
    deleted: bool
    value: dict[str, Any] | None
    raw: str | None
    create_revision: int
    before: Held | None
    where: Where


LIFE: Final = 10**12
"""A number above every revision of a life."""


class Change(NamedTuple):
    """All events of one revision, which is one transaction; `t` is when the observer saw it.

    `restoring`: a restore was in progress; a restore may write keys that replicas must not write. `unserved`: etcd
    had been lost, and no restore had ended yet. In this time a transaction that was in flight at the loss may take
    effect in the etcd that was restored from an older snapshot. No client gets its result.
    """

    revision: int
    t: float
    events: tuple[Event, ...]
    life: int = 1
    restoring: bool = False
    unserved: bool = False

    @property
    def at(self) -> int:
        """A number for the revision that is unique across lives; in the first life the revision itself."""
        return at(self.life, self.revision)

    def of(self, kind: str, *, deleted: bool = False) -> Iterator[Event]:
        """Yield the events of one kind of key."""
        return (e for e in self.events if e.key.kind == kind and e.deleted is deleted)


def at(life: int, revision: int) -> int:
    """Return a number for the revision that is unique across lives."""
    return (life - 1) * LIFE + revision


class Lives:
    """Maps each uid to the life of etcd in which it first occurred; a snapshot may repeat it in a later life."""

    def __init__(self) -> None:
        self._of: dict[str, int] = {}

    def change(self, change: Change) -> None:
        for event in change.of("uid"):
            self._of.setdefault(str((event.value or {}).get("uid")), change.life)

    def of(self, uid: object) -> int:
        """Return the life of a uid; the first life for a client that records no uid."""
        return self._of.get(str(uid), 1)


class State:
    """The keyspace after the last applied change, by parsed key."""

    def __init__(self) -> None:
        self.held: dict[Key, Held] = {}

    def get(self, kind: str, job: str = "", *ids: Any) -> Held | None:
        return self.held.get(Key(kind, job, ids))

    def value(self, kind: str, job: str = "", *ids: Any) -> dict[str, Any] | None:
        found = self.held.get(Key(kind, job, ids))
        return found.value if found is not None else None

    def all(self, kind: str, job: str | None = None) -> Iterator[tuple[Key, Held]]:
        """Yield every key of a kind. This is slow, because it walks over all keys."""
        return (
            (key, held)
            for key, held in self.held.items()
            if key.kind == kind and (job is None or key.job == job)
        )

    def apply(self, change: Change) -> None:
        for event in change.events:
            if event.deleted:
                self.held.pop(event.key, None)
            else:
                self.held[event.key] = Held(event.create_revision, change.revision, event.value)


@dataclass(slots=True)
class Clock:
    """Bounds for the commit times of revisions, from the observer's samples."""

    _revisions: list[int] = field(default_factory=list)
    _begun: list[float] = field(default_factory=list)
    life: int = 1

    def sample(self, revision: int, t0: float) -> None:
        """Record that a linearizable read in this life, begun at `t0`, returned `revision`."""
        revision = at(self.life, revision)
        if not self._revisions or revision > self._revisions[-1]:
            self._revisions.append(revision)
            self._begun.append(t0)
        elif revision == self._revisions[-1]:
            self._begun[-1] = max(self._begun[-1], t0)

    def not_before(self, revision: int) -> float:
        """Return a lower bound for the commit time of `revision`, which is a `Change.at`."""
        index = bisect_left(self._revisions, revision) - 1
        return self._begun[index] if index >= 0 else float("-inf")


def changes(records: Iterable[Record], state: State, life: int = 1) -> Iterator[Change | Record]:
    """Yield one life's transactions, and the observer's other records unchanged.

    The caller must apply each change to `state` before it takes the next one.
    """
    pending: list[Record] = []
    make = _Changes(life)
    for record in records:
        if record.op == "etcd.event":
            if pending and pending[0].result["revision"] != record.result["revision"]:
                yield make.of(pending, state)
                pending = []
            pending.append(record)
        else:
            if pending and record.op in {"observer.gap", "observer.listed", "etcd.listed"}:
                yield make.of(pending, state)
                pending = []
            yield record
    if pending:
        yield make.of(pending, state)


class _Changes:
    """Builds the changes of one life, and tracks whether a restore has ended in it."""

    def __init__(self, life: int) -> None:
        self._life = life
        self._served = life == 1

    def of(self, records: list[Record], state: State) -> Change:
        events = _events(records, state)
        restoring = Key("restoring", "", ()) in state.held or any(e.key.kind == "restoring" for e in events)
        revision, seen_t = records[0].result["revision"], records[0].t0
        change = Change(revision, seen_t, events, self._life, restoring, not self._served)
        if restoring and any(change.of("restoring", deleted=True)) and any(change.of("uid")):
            self._served = True
        return change


def _events(records: list[Record], state: State) -> tuple[Event, ...]:
    events = []
    for record in records:
        result = record.result
        name = result["key"]
        key = parse_key(name)
        deleted = result["type"] == "delete"
        raw = None if deleted else result["value"]
        events.append(
            Event(
                key=key,
                name=name,
                deleted=deleted,
                value=parse_value(raw),
                raw=raw,
                create_revision=0 if deleted else result["create_revision"],
                before=state.held.get(key),
                where=record.where,
            )
        )
    return tuple(events)


def listed(record: Record) -> tuple[Key, Held]:
    """Return the key in an `etcd.listed` record."""
    result = record.result
    return parse_key(result["key"]), Held(
        result["create_revision"], result["revision"], parse_value(result["value"])
    )
