"""Requests of callers, messages of the stream, the caller's rights, and refusals."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointAction:
    """The body of an action on one checkpoint. `attempt` may be empty if the step has only one attempt.

    A field that the action does not have is refused.
    """

    attempt: str = ""
    why: str = ""
    """For `pin`: the reason, which is kept with the pin."""
    tag: str = ""
    """For `tag` and `untag`: the tag."""
    into: str = ""
    """For `fork`: the job that is to begin from the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The data of one server-sent event: `GET` of `path` returns `body` now.

    For `events` and `history`, `body` has only the items that are newer than those of the previous change.
    Append them.
    """

    path: str
    body: object = field(default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The body of an answer other than 2xx: the error, and a hint what to do."""

    error: str
    hint: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Me:
    """The caller as the replica knows it. `role` is empty if the replica does not authenticate callers."""

    identity: str
    role: str
    jobs: tuple[str, ...]
    """The jobs that the caller is limited to; empty: all."""
    may_operate: bool
    """Whether the caller may pin, tag, fork and delete checkpoints here."""
    takes_tokens: bool
    """Whether a caller without an identity can sign in with a token. False if the cluster does not authenticate
    callers, or does so by certificates alone."""
    cluster: str
    replica: str
    version: str
