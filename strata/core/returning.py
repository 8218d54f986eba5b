"""A member without a supervisor leaves to begin anew, and the next world waits until it is back.

Its process cannot leave a collective or a step, so it replaces its program as soon as its generation has
ended (`training.ending.LoneEnding`): it leaves, does its imports again, and registers under the same name a
few seconds later. A world that had a place for it meanwhile would lose it at once; one without it would
grow by it, and that growth have the others begin anew: they would come back one by one, each making a
world of its own, for ever. So the generation that follows is a forming one which names them:

    those it names                     what follows
    ---------------------------------  -----------------------------------------------------
    one has not left, or is not back   nothing, until the time is over
    all are back                       a world at once, of at least min members
    the time is over                   what follows any forming world, once those here have settled

How long they are waited for is in the head (`patience_ms`), for it depends on what is known of them. Where
nobody was lost or asked to leave, all are on their way, and a program may take long before it is at
`strata.init` again. If the time were over before that, those who were first would make a world, it would
grow by those who come later, and these would be late for the one after it: for ever. So it is well above a
start-up then. Where somebody died, others may have died with them whose leases still hold; whoever is gone
looks the same as who is on the way. Then it is short, and who comes later has the world grow, which waits long.

Members are known to begin anew by their registration, and to be bound to it once the ranks have met at
the barrier `strata.begin` (`core.agreement`): before that they adopt a newer world as they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from strata.core.agreement import BEGIN_BARRIER
from strata.core.job import JobView
from strata.core.records import Member, Returning, Worker, WorldHead
from strata.core.view import Entry

RETURN_S: Final = 90.0
"""How long those who begin anew are waited for when nobody was lost: they import torch and read data again."""
LOST_S: Final = 15.0
"""How long when somebody died, failed or was asked to leave: others may have gone with them."""
MAX_RETURNING: Final = 400
"""How many a head names. More are not waited for."""


def who_returns(
    job: JobView, generation: int, members: Iterable[Member], here: Mapping[str, Entry[Worker]]
) -> tuple[Returning, ...]:
    """Return those of the `members` of `generation` that leave when it ends, and come back."""
    if not job.met(BEGIN_BARRIER, generation):
        return ()
    found = tuple(
        Returning(worker=member.worker, incarnation=member.incarnation)
        for member in members
        if (worker := here.get(member.worker)) is not None
        and worker.create_revision == member.incarnation
        and worker.record.reexecutes
    )
    return found if len(found) <= MAX_RETURNING else ()


def patience_ms(*, lost: bool) -> int:
    """Return for how long a forming world waits for those it names."""
    return round(1000 * (LOST_S if lost else RETURN_S))


def return_s(head: WorldHead) -> float:
    """Return for how long this forming world waits."""
    return head.patience_ms / 1000


def not_back(head: WorldHead, here: Mapping[str, Entry[Worker]]) -> tuple[str, ...]:
    """Return whom a forming world still waits for: they have not left yet, or have not come back."""
    return tuple(
        one.worker
        for one in head.returning
        if (worker := here.get(one.worker)) is None or worker.create_revision == one.incarnation
    )
