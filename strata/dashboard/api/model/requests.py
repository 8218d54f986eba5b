"""What callers send, and what the stream sends."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAction:
    """The body of an action on one checkpoint. `attempt` may be empty if the step has one only.

    A field that the action does not have is refused.
    """

    attempt: str = ""
    why: str = ""
    """Of `pin`: kept beside it."""
    tag: str = ""
    """Of `tag` and `untag`."""
    into: str = ""
    """Of `fork`: the job that is to begin from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The data of one server-sent event: `GET` of `path` returns `body` now.

    Of `events` and `history`, `body` has what is newer than in the change before, and belongs behind it.
    """

    path: str
    body: object = field(default=None)
