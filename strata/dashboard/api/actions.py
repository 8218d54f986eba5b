"""Actions of an operator on a checkpoint over HTTP, carried out by the gRPC calls, with the same checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from strata.core.access.authority import Identity
from strata.core.checkpoints.order import find
from strata.core.job import JobView
from strata.dashboard.api import model
from strata.dashboard.api.saves import checkpoint
from strata.dashboard.source import Source
from strata.errors import CheckpointNotFound, InvalidArgument, NotFound
from strata.v1 import checkpoints_pb2 as pb

MAX_BODY: Final = 16 * 1024
HEADER: Final = b"x-strata-action"
"""A page of another site can send this header only after a CORS preflight, which the replica does not allow."""

Call = Callable[[str, int, model.CheckpointAction, str], tuple[str, Any]]

ACTIONS: Final[Mapping[str, Call]] = {
    "pin": lambda job, step, action, who: (
        "pin_checkpoint",
        pb.PinCheckpointRequest(job=job, step=step, attempt=action.attempt, who=who, why=action.why),
    ),
    "unpin": lambda job, step, action, who: (
        "unpin_checkpoint",
        pb.UnpinCheckpointRequest(job=job, step=step, attempt=action.attempt),
    ),
    "tag": lambda job, step, action, who: (
        "tag_checkpoint",
        pb.TagCheckpointRequest(job=job, step=step, attempt=action.attempt, tag=action.tag, who=who),
    ),
    "untag": lambda job, step, action, who: (
        "untag_checkpoint",
        pb.UntagCheckpointRequest(job=job, step=step, attempt=action.attempt, tag=action.tag),
    ),
    "fork": lambda job, step, action, who: (
        "fork_checkpoint",
        pb.ForkCheckpointRequest(job=action.into, source_job=job, step=step, attempt=action.attempt),
    ),
    "delete": lambda job, step, action, who: (
        "delete_checkpoint",
        pb.DeleteCheckpointRequest(job=job, step=step, attempt=action.attempt),
    ),
}


TAKES: Final[Mapping[str, str]] = {"pin": "why", "tag": "tag", "untag": "tag", "fork": "into"}
"""Action -> the one field that it takes besides `attempt`. Other fields would have no effect, so they are refused."""


async def act(
    source: Source, identity: Identity | None, job: str, step: int, name: str, body: bytes
) -> model.Checkpoint | None:
    """Perform action `name` on the checkpoint of `step`, or raise the refusal.

    Return the checkpoint after the action; None if its record was removed, as happens immediately for a deleted fork.
    """
    make = ACTIONS.get(name)
    if make is None:
        raise NotFound(f"there is no action {name[:40]}", hint=f"there are {', '.join(ACTIONS)}")
    try:
        action = msgspec.json.decode(body or b"{}", type=model.CheckpointAction)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        raise InvalidArgument(f"the body of the action cannot be read: {error}") from None
    for field in sorted(set(TAKES.values()) - {TAKES.get(name)}):
        if getattr(action, field):
            raise InvalidArgument(f"{name} takes no {field}", hint=f"leave {field} out")
    if not action.attempt:
        there = find(JobView(source.view, source.keys.job(job)), step)
        if there is None:
            raise CheckpointNotFound(f"no checkpoint of step {step} exists")
        action = dataclasses.replace(action, attempt=there.record.attempt)
    who = str(identity) if identity is not None else "dashboard"
    await source.call(*make(job, step, action, who), identity)
    view = JobView(source.view, source.keys.job(job))
    entry = find(view, step, action.attempt)
    return checkpoint(view, entry) if entry is not None else None
