"""Pins and tags of a root without coordinators: small objects beside the checkpoints.

    pins/<attempt>  who pinned it, and why        tags/<name>  the attempt that has this name

A checkpoint with a pin or a tag is not deleted. A tag that names a removed attempt has no effect. A tag contains its
own digest, so that a flipped bit does not turn it into a tag of a removed attempt. A damaged tag may name any
attempt, so no checkpoint is deleted until that tag is removed or set again; listing and restoring still work.
A folder, or an object whose name is not valid for a tag, is not a tag.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.manifest import as_corrupt, read_object, sealed, unsealed
from strata.checkpoint.storage.sink import NotAnObject, ObjectMissing, Storage
from strata.core.ids import checked_id
from strata.core.kv.records import CheckpointState
from strata.documents.parsing import NOTE, check_json, json_object
from strata.errors import CheckpointCorrupt, Conflict, InvalidArgument, Refused

_PINS: Final = "pins"
_TAGS: Final = "tags"
_MARKABLE: Final = frozenset({CheckpointState.COMMITTED, CheckpointState.CORRUPT})


def pin(storage: Storage, checkpoint: CheckpointMetadata, *, who: str, why: str) -> None:
    """Protect a checkpoint from deletion; `Conflict` if it has a pin with another owner or reason."""
    _check_markable(checkpoint)
    name, body = f"{_PINS}/{checkpoint.id}", {"who": who, "why": why}
    data = json.dumps(body).encode()
    try:
        check_json(data, NOTE)
    except ValueError as error:
        raise InvalidArgument(f"the reason of a pin is too long: {error}") from error
    if storage.create_once(name, data):
        return
    with as_corrupt(name):
        held = json_object(read_object(storage, name), NOTE)
    if held != body:
        by = f"{held.get('who')}: {held.get('why')}" if held.get("why") else held.get("who")
        raise Conflict(f"step {checkpoint.step} is pinned already, by {by}", hint="unpin it first")


def unpin(storage: Storage, checkpoint: CheckpointMetadata) -> None:
    """Remove a checkpoint's pin; harmless if there is none."""
    storage.delete(f"{_PINS}/{checkpoint.id}")


def tag(storage: Storage, checkpoint: CheckpointMetadata, name: str) -> None:
    """Give a checkpoint a name, or move the name to it."""
    _check_markable(checkpoint)
    path = f"{_TAGS}/{checked_id('tag', name)}"
    body = sealed({"attempt": checkpoint.id})
    while not storage.create_once(path, body) and storage.read(path) != body:
        storage.delete(path)


def untag(storage: Storage, name: str) -> None:
    """Remove a tag; harmless if there is none."""
    storage.delete(f"{_TAGS}/{checked_id('tag', name)}")


def pins(storage: Storage) -> frozenset[str]:
    """Return the attempts that are pinned."""
    return frozenset(storage.list(_PINS))


@dataclass(frozen=True, slots=True)
class Tags:
    """The tags of each attempt that has any, and for each damaged tag the reason why it cannot be read."""

    of: Mapping[str, tuple[str, ...]]
    broken: Mapping[str, str]


def tags(storage: Storage) -> Tags:
    """Return all tags of the root; a damaged tag does not hide the others."""
    found: dict[str, tuple[str, ...]] = {}
    broken: dict[str, str] = {}
    for name in storage.list(_TAGS):
        try:
            checked_id("tag", name)
            attempt = str(unsealed(storage.read(f"{_TAGS}/{name}"), NOTE, what=f"{_TAGS}/{name}")["attempt"])
        except (ObjectMissing, InvalidArgument, NotAnObject):  # removed just now, or not a tag
            continue
        except CheckpointCorrupt as error:
            broken[name] = error.message
            continue
        found[attempt] = (*found.get(attempt, ()), name)
    return Tags(found, broken)


def forget(storage: Storage, checkpoint: CheckpointMetadata) -> None:
    """Remove the pin and the tags of a removed checkpoint."""
    unpin(storage, checkpoint)
    for name in checkpoint.tags:
        untag(storage, name)


def _check_markable(checkpoint: CheckpointMetadata) -> None:
    if checkpoint.state not in _MARKABLE:
        raise Refused(
            f"step {checkpoint.step} is {checkpoint.state.value}, so it can be neither pinned nor tagged"
        )
