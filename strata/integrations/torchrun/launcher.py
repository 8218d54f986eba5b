"""Reads torchrun's launch settings and worker failures from the call stack: torchrun does not pass them to handlers.

torch gives a rendezvous handler addresses and numbers of nodes. The number of workers, the restart limit and the failed
workers are local variables of torch's own functions, which are on the stack whenever the handler is called. This module
only reads them. If a launcher or a later torch has no such functions, Strata cannot check these
settings or name the failed workers; everything else works.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The agent's launch settings."""

    slots: int
    max_restarts: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """The agent's specification of its workers. It exists under every launcher, while `Launch` is torchrun's alone."""

    slots: int
    role: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """A failed worker. `code`: its exit code, or the negative number of the signal that ended it."""

    rank: int
    code: int
    reason: str


def find_launch() -> Launch | None:
    """Return the launch settings of the caller's agent, or None outside of torch's own launcher."""
    config = _local("launch_agent", "config")
    try:
        return Launch(
            slots=int(config.nproc_per_node), max_restarts=int(config.max_restarts), role=str(config.role)
        )
    except (AttributeError, TypeError, ValueError):
        return None


def find_workers() -> Workers | None:
    """Return the workers of the agent that calls the rendezvous, or None outside of torch's own agents."""
    spec = getattr(_local("_rendezvous", "worker_group"), "spec", None)
    try:
        return Workers(slots=int(spec.local_world_size), role=str(spec.role))  # type: ignore[union-attr]
    except (AttributeError, TypeError, ValueError):
        return None


def find_failure() -> RankFailure | None:
    """Return the worker failure that makes the calling agent restart or end, or None."""
    failures = getattr(sys.exc_info()[1], "failures", None)  # a ChildFailedError: the agent gives up
    if failures is None:
        failures = getattr(_local("_invoke_run", "run_result"), "failures", None)
    return first_failure(failures) if isinstance(failures, Mapping) else None


def first_failure(failures: Mapping[int, Any]) -> RankFailure | None:
    """Return the earliest of torch's failures: the other workers fail because that one failed."""
    if not failures:
        return None
    rank = min(failures, key=lambda one: getattr(failures[one], "timestamp", 0))
    code = int(getattr(failures[rank], "exitcode", 1)) or 1
    return RankFailure(rank=rank, code=code, reason=_in_words(code))


def _in_words(code: int) -> str:
    if code >= 0:
        return f"exited with {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def _local(function: str, variable: str) -> Any:
    """Return a local variable of the nearest caller named `function`, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == function and variable in frame.f_locals:
            return frame.f_locals[variable]
        frame = frame.f_back
    return None
