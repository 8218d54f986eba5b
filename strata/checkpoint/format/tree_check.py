"""Validation of a state's tree, which another program may have written, before anything is built from it.

`unflatten` and the other functions that walk a tree rely on this validation: every node is of a known kind and has
the parts of that kind, and containers are nested no deeper than a save allows.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Final

from strata.checkpoint.format import inline
from strata.checkpoint.format.digest import Bytes
from strata.checkpoint.snapshot.state import CLASSES, MAX_DEPTH, Json
from strata.documents.parsing import PLAIN, json_value, shown, text

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_NODES: Final = frozenset({dict, list})
_FLOATS: Final = frozenset({"nan", "inf", "-inf"})
_DTYPE: Final = re.compile(r"[a-z]{1,10}[0-9]{0,3}\Z")
_LONGEST_SCALAR: Final = 64
"""The most hexadecimal digits of a NumPy scalar: a complex of long doubles has 32 bytes."""


def check_tree(tree: Json) -> None:
    """Raise `ValueError` unless a state can have this tree."""
    for _level in _levels(tree):
        pass  # `_levels` checks each level


def names_in(tree: Json) -> Iterator[str]:
    """Yield the names of the tensors and of the opaque bytes to which a tree refers."""
    for level in _levels(tree):
        for node in level:
            for kind in ("t", "b"):
                if kind in node and len(node) == 1:
                    yield node[kind]


def check_names(tree: Json, known: Collection[str]) -> None:
    """Raise `ValueError` if a tree refers to a tensor that is not in `known`."""
    for name in names_in(tree):
        if name not in known:
            raise ValueError(f"it refers to {shown(name)}, which it does not hold")


def with_json(tree: Json, texts: Mapping[str, Bytes]) -> Json:
    """Return the tree with opaque values decoded, if their bytes are JSON; `texts` has the bytes, by name."""
    if isinstance(tree, dict) and tree.get("b") in texts:
        with contextlib.suppress(ValueError):  # a value that torch's own planner pickled stays opaque bytes
            return _plain_tree(bytes(texts[tree["b"]]))
        return tree
    if isinstance(tree, dict):
        if "d" in tree:
            return {**tree, "d": [[key, with_json(part, texts)] for key, part in tree["d"]]}
        for kind in ("l", "u"):
            if kind in tree:
                return {kind: [with_json(part, texts) for part in tree[kind]]}
    return tree


def _plain_tree(data: bytes) -> Json:
    """Return the tree of a plain DCP value in JSON; `ValueError` if `data` is no such value or refers to tensors."""
    tree = json_value(data, PLAIN)
    try:
        check_tree(tree)
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error
    check_names(tree, ())
    return tree


def _levels(tree: Json) -> Iterator[list[Any]]:
    """Yield the containers of each depth, from the outermost on, without plain values; `ValueError` for bad nodes."""
    level = [tree] if type(tree) in _NODES else []
    depth = 0
    while level:
        yield level
        level = [part for node in level for part in _parts(node) if type(part) in _NODES]
        depth += 1
        if depth > MAX_DEPTH + 2:  # 2 more: a leaf is a node, too, and so is a scalar's part
            raise ValueError(f"a tree lies more than {MAX_DEPTH} containers deep")


def _parts(node: Any) -> Sequence[Json]:
    """Return the trees within a node; `ValueError` if it is not a valid node."""
    if type(node) is list:
        raise ValueError("a list stands where a value is due")
    if "d" in node:
        return _items(node)
    if len(node) != 1:
        raise ValueError(f"a value has {len(node)} kinds")
    ((kind, body),) = node.items()
    if kind in {"t", "b"}:
        text(body)
        return ()
    if kind in {"l", "u", "e", "g"}:
        if type(body) is not list:
            raise ValueError(f"a value of kind {kind!r} has no members")
        return body
    if kind == "f" and body in _FLOATS:
        return ()
    if kind == "s" and _is_scalar(body):
        return ()
    if kind in inline.KINDS:
        return ()  # `inline.value_of` validates it
    raise ValueError(f"a value of kind {shown(kind)} is none")


def _items(node: dict[str, Any]) -> list[Json]:
    known = CLASSES.get(node["c"]) if isinstance(node.get("c"), str) else None
    # only an ordered mapping has metadata: torch's modules store their versions there
    if known is None or node.keys() - {"d", "c"} - ({"m"} if known is not dict else set()):
        raise ValueError(f"a mapping is no {shown(node.get('c'))}")
    parts = [node["m"]] if "m" in node else []
    for item in node["d"]:
        key, part = item
        if type(key) not in _PLAIN:
            _check_key(key)
        parts.append(part)
    return parts


def _check_key(key: Any) -> None:
    """Raise `ValueError` unless a non-plain key of a mapping is a number that JSON lacks, or a tuple of valid keys."""
    if type(key) is dict and len(key) == 1:
        if type(key.get("u")) is list:
            for part in key["u"]:
                if type(part) not in _PLAIN:
                    _check_key(part)
            return
        if key.get("f") in _FLOATS or _is_scalar(key.get("s")):
            return
    raise ValueError("a key of a mapping is none")


def _is_scalar(body: Any) -> bool:
    return (
        type(body) is list
        and len(body) == 2
        and all(type(part) is str for part in body)
        and _DTYPE.match(body[0]) is not None
        and 0 < len(body[1]) <= _LONGEST_SCALAR
    )
