"""What a fault is: a name, whether it can be had, how it is done, that it took effect, how it ends.

A fault is stateless; what one injection did is its `Wound`. Whether it took effect is never
assumed from the absence of an error: `took_effect` looks, and says what it saw.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, Protocol

from strata_chaos.run.system import System


class NoTarget(Exception):
    """Nothing that this fault breaks is whole at this moment: all of it is broken already, or gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wound:
    """One injection: what was hit, by name, and what its fault needs to look and to heal."""

    targets: tuple[str, ...]
    memory: Any = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Effect:
    """Whether a fault had an effect, and what shows it."""

    effective: bool
    evidence: str


class Fault(Protocol):
    """One way to break a running system."""

    @property
    def name(self) -> str:
        """As scenarios name it: `kill-leader`."""
        ...

    @property
    def summary(self) -> str:
        """What it does, in one sentence."""
        ...

    def available(self, backend: str) -> str:
        """Return why it cannot be had on this backend; empty when it can."""
        ...

    async def inject(self, system: System, rng: random.Random) -> Wound:
        """Break it, and return what was broken; `NoTarget` when there is nothing to break.

        Chance comes from `rng` alone. Targets are claimed from `system`, so that two faults never
        share one.
        """
        ...

    async def took_effect(self, system: System, wound: Wound) -> Effect:
        """Look whether it had an effect; asked after the injection and again before healing."""
        ...

    async def heal(self, system: System, wound: Wound) -> None:
        """Put right what was broken, and return without waiting until all is well."""
        ...
