"""The interface of faults: name, availability, injection, proof of effect, healing.

A fault is stateless; a `Wound` holds the state of one injection. An injection may have no effect although it raised
no error. So `took_effect` checks the effect and returns the evidence.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from strata_chaos.run.system import System


class NoTarget(Exception):
    """The fault has no target now: every part that it could break is already broken or has ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """One injection: the names of its targets, and the state that the fault needs for its check and for healing."""

    targets: tuple[str, ...]
    memory: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Effect:
    """Whether a fault had an effect, and the evidence."""

    effective: bool
    evidence: str


class Fault(Protocol):
    """One way to break a running system."""

    @property
    def name(self) -> str:
        """Name in scenarios, such as `kill-leader`."""
        ...

    @property
    def summary(self) -> str:
        """One-sentence description."""
        ...

    def available(self, backend: str) -> str:
        """Return why this backend does not support the fault; empty if it does."""
        ...

    async def inject(self, system: System, rng: random.Random) -> Wound:
        """Inject the fault and return the wound; raise `NoTarget` if there is nothing to break.

        Random choices come from `rng` alone. The fault claims its targets from `system`, so that two faults never
        share one.
        """
        ...

    async def took_effect(self, system: System, wound: Wound) -> Effect:
        """Check whether the fault had an effect; called after the injection and again before healing."""
        ...

    async def heal(self, system: System, wound: Wound) -> None:
        """Undo the fault, without waiting until the system is healthy."""
        ...
