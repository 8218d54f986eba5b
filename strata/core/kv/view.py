"""The view: the keyspace as of one revision, in memory.

Every replica has one view, fed by a list and then by a watch. Decisions read the view and nothing else.
Only `reset` and `apply` change the view, and only between decisions.

Keys form a tree at their slashes, so that listing a folder does not touch other keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from strata.core.kv.records import PoisonRecord, decode
from strata.core.kv.txn import Event, KeyValue

R = TypeVar("R")


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict)
    kv: KeyValue | None = None
    entry: Entry[Any] | None = None
    """The decoded record: cached by the first read, until the key is written again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Generic[R]):
    """A decoded record with its key and the key's revisions."""

    key: str
    record: R
    create_revision: int
    mod_revision: int

    @property
    def name(self) -> str:
        """The last component of the key."""
        return self.key.rpartition("/")[2]


class View:
    """All keys below one prefix as of `revision`. Not safe for use by several threads."""

    def __init__(self) -> None:
        self.revision = 0
        self.state = 0
        """A counter that each change of the view raises: `reset` may change the keys but not `revision`."""
        self._root = _Node()
        self._keys: dict[str, _Node] = {}
        """The nodes of existing keys, for lookups by the whole key: every message makes several."""
        self._derived: dict[str, tuple[int, Any]] = {}

    @property
    def size(self) -> int:
        """The number of keys."""
        return len(self._keys)

    # -- updates

    def reset(self, revision: int, kvs: Iterable[KeyValue]) -> tuple[Event, ...]:
        """Replace all keys by those listed at `revision`; return the differences as events, deletes included.

        The events of changed keys come first, in key order, with the listed revisions. The deletes follow, in key
        order, with `revision`.
        """
        fresh = {kv.key: kv for kv in kvs}
        old = {kv.key: kv for kv in self.walk("")}
        events = [
            Event(kv=kv)
            for key, kv in sorted(fresh.items())
            if key not in old or old[key].mod_revision != kv.mod_revision
        ]
        events += [
            Event(
                kv=KeyValue(key=key, value=b"", create_revision=0, mod_revision=revision, version=0),
                deleted=True,
            )
            for key in sorted(old.keys() - fresh.keys())
        ]
        self._root = _Node()
        self._keys.clear()
        self._derived.clear()
        for kv in fresh.values():
            self._put(kv)
        self.revision = revision
        self.state += 1
        return tuple(events)

    def apply(self, revision: int, events: Iterable[Event]) -> None:
        """Apply the changes of whole revisions up to `revision`."""
        if revision < self.revision:
            raise ValueError(f"revision {revision} after {self.revision}")
        for event in events:
            if event.deleted:
                self._delete(event.kv.key)
            else:
                self._put(event.kv)
        self.revision = revision
        self.state += 1

    # -- reading

    def get(self, key: str) -> KeyValue | None:
        """Return the key and value at `key`, or None."""
        node = self._keys.get(key)
        return node.kv if node is not None else None

    def entry(self, key: str, cls: type[R]) -> Entry[R] | None:
        """Return the record under `key` with its revisions, or None; `PoisonRecord` if it is not a `cls`."""
        node = self._keys.get(key)
        return self._entry(node, cls) if node is not None else None

    def record(self, key: str, cls: type[R]) -> R | None:
        """Return the record under `key`, or None; `PoisonRecord` if it is not a `cls`."""
        entry = self.entry(key, cls)
        return entry.record if entry is not None else None

    def mod_revision(self, key: str) -> int:
        """Return the mod_revision of `key`, which `unchanged` compares; 0 if the key is absent."""
        kv = self.get(key)
        return kv.mod_revision if kv is not None else 0

    def derived(self, key: str, make: Callable[[], R]) -> R:
        """Return the result of `make`, cached until `key` changes.

        `make` may depend only on `key`, and on facts that do not change while `key` stays unchanged.
        """
        revision = self.mod_revision(key)
        held = self._derived.get(key)
        if held is None or held[0] != revision:
            held = self._derived[key] = (revision, make())
        found: R = held[1]
        return found

    def entries(self, folder: str, cls: type[R]) -> Iterator[Entry[R]]:
        """Yield, in key order, the records directly in `folder`, whose name ends in `/`."""
        node = self._find(folder.rstrip("/"))
        if node is None:
            return
        for name in sorted(node.children):
            entry = self._entry(node.children[name], cls)
            if entry is not None:
                yield entry

    def entries_below(self, folder: str, cls: type[R]) -> Iterator[Entry[R]]:
        """Yield, in key order, the records directly in the subfolders of `folder`."""
        node = self._find(folder.rstrip("/"))
        if node is None:
            return
        for inner in _in_order(node):
            for child in _in_order(inner):
                entry = self._entry(child, cls)
                if entry is not None:
                    yield entry

    def names(self, folder: str) -> list[str]:
        """Return, in order, the names directly in `folder`, subfolders included."""
        node = self._find(folder.rstrip("/"))
        return sorted(node.children) if node is not None else []

    def count(self, folder: str) -> int:
        """Return the number of `names` in constant time."""
        node = self._find(folder.rstrip("/"))
        return len(node.children) if node is not None else 0

    def walk(self, folder: str) -> Iterator[KeyValue]:
        """Yield every key below `folder`, and `folder` itself, depth first, each level in key order."""
        node = self._root if not folder else self._find(folder.rstrip("/"))
        stack = [node] if node is not None else []
        while stack:
            top = stack.pop()
            if top.kv is not None:
                yield top.kv
            stack.extend(top.children[name] for name in sorted(top.children, reverse=True))

    # -- the tree

    def _find(self, key: str) -> _Node | None:
        node = self._root
        for part in key.split("/"):
            child = node.children.get(part)
            if child is None:
                return None
            node = child
        return node

    @staticmethod
    def _entry(node: _Node, cls: type[R]) -> Entry[R] | None:
        kv = node.kv
        if kv is None:
            return None
        if node.entry is None:
            node.entry = Entry(
                key=kv.key,
                record=decode(cls, kv.value),
                create_revision=kv.create_revision,
                mod_revision=kv.mod_revision,
            )
        elif not isinstance(node.entry.record, cls):
            raise PoisonRecord(f"{kv.key} is read as two kinds of record")
        return node.entry

    def _put(self, kv: KeyValue) -> None:
        node = self._keys.get(kv.key)
        if node is None:
            node = self._root
            for part in kv.key.split("/"):
                node = node.children.setdefault(part, _Node())
            self._keys[kv.key] = node
        node.kv, node.entry = kv, None

    def _delete(self, key: str) -> None:
        self._derived.pop(key, None)
        if self._keys.pop(key, None) is None:
            return
        parts = key.split("/")
        path = [self._root]
        for part in parts:
            path.append(path[-1].children[part])
        path[-1].kv = path[-1].entry = None
        for parent, part in zip(reversed(path[:-1]), reversed(parts), strict=True):
            node = parent.children[part]
            if node.kv is not None or node.children:
                return
            del parent.children[part]


def _in_order(node: _Node) -> list[_Node]:
    children = node.children
    return [children[name] for name in sorted(children)]
