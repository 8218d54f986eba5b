"""Key kinds: the record class of each key of a job, and whether the key outlives the processes that wrote it.

A key that this release does not know (`UNKNOWN`) belongs to another release and is kept unchanged.
"""

from __future__ import annotations

from typing import Any, Final

from strata.core.checkpoints import references as c
from strata.core.kv import records as r

UNKNOWN: Final = object()
"""A key for which this release has no record class."""
PROCESSES: Final = object()
"""A key that does not outlive the processes: members, their world, barriers, readers, standbys, rewinds."""

_PLAIN: Final[dict[str, Any]] = {
    "spec": r.JobSpec,
    "phase": r.JobPhase,
    "run": r.JobRun,
    "anew": r.Anew,
    "latest": r.Latest,
    "retention": c.Retention,
    "standbys": PROCESSES,
    "rewind": PROCESSES,
    "world": PROCESSES,
}
_FOLDERS: Final[dict[str, Any]] = {
    "workers": PROCESSES,
    "barriers": PROCESSES,
    "history": r.GenerationRecord,
    "tags": c.Tag,
    "discarded": c.Discarded,
    "pins": r.Pin,
}
_OF_ATTEMPT: Final[dict[str, Any]] = {
    "acks": r.Ack,
    "refs": c.Reference,
    "readers": PROCESSES,
    "copies": c.Copy,
    "removed": r.Tier,
    "suspects": c.CorruptionReport,
    "tags": c.Tag,
}
_NUMBERED: Final = frozenset({"history", "pins"})
_DEPTHS: Final = {"workers": 2, "history": 2, "tags": 2, "discarded": 2, "pins": 3}
_ATTEMPT_DEPTHS: Final = {"acks": 6, "refs": 6, "tags": 6, "copies": 7, "removed": 7, "suspects": 7}


def kind_of(key: str, root: str) -> Any:
    """Return the record class of `key` of the job at `root`; `PROCESSES` or `UNKNOWN`: do not decode its value."""
    parts = key.removeprefix(root).split("/")
    first = parts[0]
    if len(parts) == 1:
        return _PLAIN.get(first, UNKNOWN)
    if first == "worlds":
        restored = len(parts) == 3 and parts[2] == "restored" and _is_number(parts[1])
        return r.Restored if restored else PROCESSES
    if first == "datasets" and len(parts) == 3:
        return {"spec": r.DatasetSpec, "assignment": r.Assignment}.get(parts[2], UNKNOWN)
    if first == "checkpoints":
        return _of_checkpoint(parts)
    kind = _FOLDERS.get(first, UNKNOWN)
    if kind is PROCESSES:
        return kind
    known = _DEPTHS.get(first) == len(parts) and (first not in _NUMBERED or _is_number(parts[1]))
    return kind if known else UNKNOWN


def _of_checkpoint(parts: list[str]) -> Any:
    if not all(map(_is_number, parts[1:3])) or len(parts) < 3:
        return UNKNOWN
    if len(parts) == 3:
        return r.CheckpointRecord
    below = parts[4] if len(parts) > 4 else ""
    if below == "readers":
        return PROCESSES
    if _ATTEMPT_DEPTHS.get(below) != len(parts):
        return UNKNOWN
    return r.Seal if parts[5:] == ["seal"] and below == "acks" else _OF_ATTEMPT[below]


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()
