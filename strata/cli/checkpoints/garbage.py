"""An item that `strata checkpoints gc` may delete."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Garbage:
    """An item that may be deleted, the reason, and the function that deletes it."""

    what: str
    why: str
    remove: Callable[[], None]
