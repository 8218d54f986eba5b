"""What `strata checkpoints gc` finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """Something that may go, why, and what removes it."""

    what: str
    why: str
    remove: Callable[[], None]
