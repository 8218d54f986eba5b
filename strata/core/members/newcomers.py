"""Newcomers on trial: crashes of a member that joins a running training must not stop the others repeatedly.

A world grows by a save and a new generation for all members. A newcomer whose ranks crash at their start ends that
generation. If this newcomer were placed again immediately, the others would make little progress. So the head names
the newcomers, as members on trial:

    event                                             result for a newcomer
    ------------------------------------------------  -------------------------------------------------------
    a generation with it commits a checkpoint         it becomes an ordinary member
    its failure ends a generation without a commit    no place for 10 s; 20, 40 … 600 s if it fails again
    fewer than the minimum would be left without it   it gets a place all the same
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
"""The maximum number of members on trial that a head names, the newest; any others count as ordinary members."""


def delay_s(newcomer: Newcomer) -> float:
    """Return how many seconds after its last failure a newcomer gets no place."""
    return min(MOST_S, FIRST_S * 2 ** (min(newcomer.crashes, 32) - 1)) if newcomer.crashes else 0.0


def kept_out(newcomers: Iterable[Newcomer], request_ages_s: Mapping[int, float]) -> frozenset[str]:
    """Return the newcomers that get no place yet; `request_ages_s`: how long the leader has known of each failure."""
    return frozenset(
        one.worker
        for one in newcomers
        if one.crashes and request_ages_s.get(one.revision, 0.0) < delay_s(one)
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
    """Return the members on trial in the next generation.

    `members`: the members of the generation that ends. `failed`: the members whose failure ended that generation.
    `committed`: whether that generation has committed a checkpoint. `joined`: members of the next generation that
    are not in `members`.
    """
    known = {one.worker: one for one in newcomers if not (committed and one.worker in members)}
    for worker in set(failed) & known.keys():
        one = known[WorkerId(worker)]
        known[one.worker] = replace(one, crashes=one.crashes + 1, revision=revision)
    for worker in joined:
        known.setdefault(worker, Newcomer(worker=worker))
    return tuple(list(known.values())[-MAX_NEWCOMERS:])
