"""Parser of keys and values as `docs/keyspace.md` describes them, without Strata's own code.

A checker that used the parser it judges would share the parser's mistakes. This module implements the page a second
time, and smaller: a key becomes its kind, its job and its numbers; a value becomes a dict.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

ROOT: Final = "/strata/v1/"


class Key(NamedTuple):
    """A parsed key. `kind` is from the tables below; `ids` are the key's variable parts, numbers as integers."""

    kind: str
    job: str
    ids: tuple[Any, ...]


UNKNOWN: Final = "unknown"

_JOB_SINGLES: Final = frozenset(
    {"spec", "standbys", "phase", "run", "world", "latest", "anew", "import", "retention", "rewind"}
)
_CLUSTER_SINGLES: Final = frozenset({"uid", "leader", "ops-floor", "backup", "restoring"})


def parse_key(text: str) -> Key:
    """Return the parsed key; its kind is "unknown" if `docs/keyspace.md` has no such key."""
    parts = text.split("/")
    if not text.startswith(ROOT) or len(parts) < 5:
        return Key(UNKNOWN, "", (text,))
    try:
        return _cluster(parts[4:])
    except (ValueError, IndexError):
        return Key(UNKNOWN, "", (text,))


def _cluster(parts: list[str]) -> Key:
    match parts:
        case [single] if single in _CLUSTER_SINGLES:
            return Key(single, "", ())
        case ["replicas", name]:
            return Key("replica", "", (name,))
        case ["coordinators", name]:
            return Key("coordinator", "", (name,))
        case ["ops", name]:
            return Key("op", "", (name,))
        case ["jobs", job, *rest]:
            kind, ids = _job(rest)
            return Key(kind, job, ids)
    raise ValueError(parts)


def _job(parts: list[str]) -> tuple[str, tuple[Any, ...]]:
    match parts:
        case [single] if single in _JOB_SINGLES:
            return single, ()
        case ["workers", name]:
            return "worker", (name,)
        case ["worlds", generation, *rest]:
            return _world(int(generation), rest)
        case ["history", generation]:
            return "history", (int(generation),)
        case ["barriers", name, generation, "floor"]:
            return "floor", (name, int(generation))
        case ["barriers", name, generation, round_, ("outcome" | "arrived") as what]:
            return what, (name, int(generation), int(round_))
        case ["barriers", name, generation, round_, "payloads", index]:
            return "payloads", (name, int(generation), int(round_), int(index))
        case ["datasets", name, ("spec" | "assignment") as what]:
            return f"dataset-{what}", (name,)
        case ["datasets", name, "cursors", generation, shard]:
            return "cursor", (name, int(generation), int(shard))
        case ["pins", step, attempt]:
            return "pin", (int(step), attempt)
        case [("tags" | "discarded") as what, name]:
            return {"tags": "tag"}.get(what, what), (name,)
        case ["checkpoints", step, generation, *rest]:
            return _checkpoint(int(step), int(generation), rest)
    raise ValueError(parts)


def _world(generation: int, rest: list[str]) -> tuple[str, tuple[Any, ...]]:
    match rest:
        case [("restored" | "held" | "notice" | "reshape") as what]:
            return what, (generation,)
        case [("failed" | "done" | "stopped") as how, rank]:
            return how, (generation, int(rank))
        case [epoch, "members", index]:
            return "chunk", (generation, int(epoch), int(index))
    raise ValueError(rest)


def _checkpoint(step: int, generation: int, rest: list[str]) -> tuple[str, tuple[Any, ...]]:
    match rest:
        case []:
            return "record", (step, generation)
        case [attempt, "acks", "seal"]:
            return "seal", (step, generation, attempt)
        case [attempt, "acks", rank]:
            return "ack", (step, generation, attempt, int(rank))
        case [attempt, "refs", other]:
            return "ref", (step, generation, attempt, other)
        case [attempt, "readers", reader]:
            return "reader", (step, generation, attempt, reader)
        case [attempt, "copies", tier, rank]:
            return "copy", (step, generation, attempt, tier, rank if rank == "seal" else int(rank))
        case [attempt, ("suspects" | "removed") as what, tier, host]:
            return what, (step, generation, attempt, tier, host)
        case [attempt, "tags", tag]:
            return "tagged", (step, generation, attempt, tag)
    raise ValueError(rest)


def parse_value(text: str | None) -> dict[str, Any] | None:
    """Return the record in a value; None if it is not of schema 1."""
    if text is None:
        return None
    try:
        body = json.loads(text)
    except ValueError:
        return None
    return body if isinstance(body, dict) and body.get("v") == 1 else None
