"""Fresh seeds: each commit draws seeds that no run has tried, so that each merge also searches for new failures.

Fresh seeds are far above the seeds of `make soak`, which counts up. They are consecutive, so that a block has all
kinds: the kind of a seed depends on its remainders (`is_operated`, `is_kept`, `saves_first`).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from tests.sim.seeds import revisions

COUNT = 60
BEGIN = 1_000_000_000
MANY = 3
"""After this many seeds that fail on the parent commit too, all further failures count as older than the change."""
BLOCKS = 100_000_000
"""Number of blocks of COUNT seeds from which a commit draws."""


def drawn(commit: str) -> range:
    """Return the seeds of a commit; outside a repository the first block."""
    name = commit.partition("-")[0]
    block = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % BLOCKS if name else 0
    first = BEGIN + block * COUNT
    return range(first, first + COUNT)


@dataclass(frozen=True, slots=True)
class Verdict:
    """The meaning of a failed fresh seed for the change."""

    blocks: bool
    reason: str


def judge(seed: int, wrong: str, holds_on_parent: bool | None, *, older: int = 0) -> Verdict:
    """Decide whether a failed seed blocks the change: only if it passes on the parent, or this clone has no parent.

    `older` other seeds failed on the parent. If `older` is MANY or more, the parent counts as broken and is not tried
    any more.
    """
    again = f"python -m tests.sim --seed {seed} --trace"
    if older >= MANY:
        return Verdict(
            False, f"seed {seed}: {wrong}; not tried on the parent, where {older} failed; again: {again}"
        )
    if holds_on_parent is None:
        return Verdict(True, f"seed {seed}: {wrong} (no parent commit to compare with); again: {again}")
    if holds_on_parent:
        return Verdict(True, f"seed {seed}: {wrong}; it holds on the parent commit; again: {again}")
    return Verdict(False, f"seed {seed}: {wrong}; it fails on the parent commit, too; again: {again}")


HEAD = revisions.head()
"""Read once, at collection, because all processes of a run must have the same seeds."""
SEEDS = drawn(HEAD)
