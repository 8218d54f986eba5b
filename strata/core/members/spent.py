"""Members that cannot restart: after a generation that had begun, they get no further place (PROTOCOLS 5.7).

A standalone process that trains by `strata.init` cannot leave a collective or a step, and nothing starts it again.
So it exits after its generation. Between the write of the newer head and this exit the member's key still exists.
Worlds that are planned in this time must not include the member.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from strata.core.job import JobView
from strata.core.kv.records import Member, Spent, Worker
from strata.core.kv.view import Entry
from strata.core.stop.last_step import BEGIN_BARRIER

SPENT_S: Final = 15.0
"""The time for which such a member gets no place.

If the member is still registered after this time, it had not begun to train: it missed the outcome of `strata.begin`.
"""


def spent(
    job: JobView, here: Mapping[str, Entry[Worker]], request_ages_s: Mapping[int, float]
) -> tuple[Spent, ...]:
    """Return the registered members that cannot restart and were in a generation that had begun.

    `request_ages_s`: how long the leader has known of the head, by its revision.
    """
    head, world = job.head(), job.world()
    known: list[Spent | Member] = []
    if head is not None and request_ages_s.get(head.mod_revision, 0.0) < SPENT_S:
        known += head.record.spent
    if head is not None and world is not None and job.met(BEGIN_BARRIER, head.record.generation):
        known += world.members
    return tuple(
        Spent(worker=one.worker, incarnation=one.incarnation)
        for one in known
        if (worker := here.get(one.worker)) is not None
        and worker.create_revision == one.incarnation
        and worker.record.cannot_restart
    )
