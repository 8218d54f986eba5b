"""Ranks that report that they cannot save, and later that they can: rules for the key, and for a head's count.

The rules do not use `core.stop.save_hold`: they look at the key, at the step from which the generation started, and at
the counts of two heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core.checkpoints.references import SavesHeld
from strata.core.job import JobView
from strata.core.kv.records import WorldHead, decode
from strata.core.kv.txn import KeyValue
from strata.core.stop.save_hold import SaveHold

EVERY = 3
"""Every so many steps one rank cannot save; two steps later it can. Saves are due every four steps, so a generation
may end before it has committed a save."""


def hold_at(step: int, rank: int, size: int) -> SaveHold | None:
    """Return why this rank of `size` ranks cannot save at this step, or None if it can."""
    begins = step - step % EVERY
    if begins == 0 or step - begins > 1 or begins // EVERY % size != rank:
        return None
    return SaveHold(step=begins, reason="disk full", host=f"host-{rank}")


@dataclass(slots=True)
class Holds:
    """Counts holds, and ended generations that had one and no commit."""

    written: int = 0
    ended: int = 0

    def key(self, job: JobView, generation: int, kv: KeyValue) -> str | None:
        """Return the problem of a newly written key, or None."""
        self.written += 1
        held, head = decode(SavesHeld, kv.value), job.head()
        if kv.version != 1 or head is None or head.record.generation != generation:
            return f"{kv.key} was written again, or not in its generation"
        if held.step <= (job.restored(generation) or 0):
            return f"{kv.key}: step {held.step} is not beyond where generation {generation} began"
        return None

    def head(self, job: JobView, before: WorldHead, after: WorldHead) -> str | None:
        """Return the problem of the count in a newly written head, or None."""
        if job.held(before.generation) is None:
            return None
        self.ended += 1
        if after.no_progress not in {before.no_progress, 0}:
            return f"generation {before.generation} could not save, and counts as one without progress"
        return None
