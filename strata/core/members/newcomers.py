"""A member that joins a training in progress is on trial: its crashes must not stop the others again and again.

A world grows by a save and a new generation for all. A newcomer whose ranks crash at their start ends that generation, and
would be taken in again at once: the members that train would never come far. So the head names who is on trial:

    what happens                                      what follows for a newcomer
    ------------------------------------------------  -------------------------------------------------------
    a generation with it commits a checkpoint         it is a member like others
    its failure ends a generation without a commit    no place for 10 s; 20, 40 … 600 s if it fails again
    fewer than the least members are left without it  it has a place all the same
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Final

from strata.core.ids import WorkerId
from strata.core.kv.records import Newcomer

FIRST_S: Final = 10.0
MOST_S: Final = 600.0
MAX_NEWCOMERS: Final = 100
"""How many a head names, the newest: the others are members like any."""


def delay_s(newcomer: Newcomer) -> float:
    """Return how long after its last failure a newcomer gets no place."""
    return min(MOST_S, FIRST_S * 2 ** (min(newcomer.crashes, 32) - 1)) if newcomer.crashes else 0.0


def kept_out(newcomers: Iterable[Newcomer], asked_s: Mapping[int, float]) -> frozenset[str]:
    """Return those that get no place yet; `asked_s` has for how long the leader has known of each failure."""
    return frozenset(
        one.worker for one in newcomers if one.crashes and asked_s.get(one.revision, 0.0) < delay_s(one)
    )


def after(
    newcomers: Iterable[Newcomer],
    *,
    members: Collection[str],
    failed: Collection[str],
    committed: bool,
    joined: Iterable[WorkerId],
    revision: int,
) -> tuple[Newcomer, ...]:
    """Return who is on trial in the next generation.

    `members`: of the generation that ends. `failed`: whose failure ended it. `committed`: whether it has committed a
    checkpoint. `joined`: members of the next one that are not of this one.
    """
    known = {one.worker: one for one in newcomers if not (committed and one.worker in members)}
    for worker in set(failed) & known.keys():
        one = known[WorkerId(worker)]
        known[one.worker] = replace(one, crashes=one.crashes + 1, revision=revision)
    for worker in joined:
        known.setdefault(worker, Newcomer(worker=worker))
    return tuple(list(known.values())[-MAX_NEWCOMERS:])
