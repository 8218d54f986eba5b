"""Who calls, what they may, and what they are told instead of an answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """An answer other than 2xx: what is wrong, and what to do."""

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
