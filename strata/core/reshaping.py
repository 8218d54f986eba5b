"""Growing and shrinking lose no steps: the ranks save first, where they can.

A world that loses nobody could be ended at any moment, but what its ranks have trained since their
last save would be lost. So the leader first asks them, by a key of its own beside the notice
(`core.stopping`), to agree on a step and to save it; then it writes the next head:

    all ranks have met at     the key                     what follows
    ------------------------  --------------------------  -------------------------------------------
    nothing                   -                           the next world at once: nobody would heed it
    BEGIN                     absent                      the key is written
    BEGIN                     present                     they train on; after the grace the next world
    BEGIN, SAVED              present                     the next world
    CLOSING                   any                         nothing: the training is about to end

The barriers are what `strata.init` does anyhow, so no other word of the ranks is needed: a
released round is in every view. A death ends the generation as ever, and a notice, which anybody
may write meanwhile, is heeded instead: ranks that wait for the next world then leave.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata.core.job import JobView
from strata.core.records import Reshape
from strata.core.view import Entry

BEGIN_BARRIER: Final = "strata.begin"
"""Where ranks that heed notices meet when they are ready for their first step."""
CLOSING_BARRIER: Final = "strata.closing"
"""Where the first rank that is about to be done is alone: others may evaluate."""
SAVED_BARRIER: Final = "strata.stop.saved"
"""Where they meet once the common step is saved, or cannot be."""
GRACE_MS: Final = 60_000
"""How long the ranks may take: the training goes on meanwhile, and only newcomers wait."""
LATE_S: Final = 5.0
"""How long after that the leader waits for those who are about to be done."""


def heeded(job: JobView, generation: int) -> bool:
    """Tell whether the ranks of `generation` would save if they were asked to."""
    return job.met(BEGIN_BARRIER, generation)


def finished(job: JobView, generation: int) -> bool:
    """Tell whether they have done what they could."""
    return job.met(SAVED_BARRIER, generation)


def is_ending(job: JobView, generation: int) -> bool:
    """Tell whether a rank is about to be done: it makes its last save, waits to, or leaves."""
    return job.met(CLOSING_BARRIER, generation)


def is_late(reshape: Entry[Reshape], asked_s: Mapping[int, float]) -> bool:
    """Tell whether they had their time; `asked_s` has for how long the leader has known of it."""
    return asked_s.get(reshape.create_revision, 0.0) >= deadline_s(reshape.record)


def deadline_s(reshape: Reshape) -> float:
    """Return after how many seconds nobody waits for the ranks any more."""
    return reshape.grace_ms / 1000 + LATE_S
