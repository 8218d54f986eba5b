"""Placement: which registered member gets which group rank in the next world.

A place is a group rank and not a global rank, because members may have different numbers of slots. A member's first
global rank is the sum of the slots of the members before it. Survivors keep their group rank, and newcomers fill the
holes in order of registration. If the world is smaller, survivors whose group rank does not exist any more fill the
holes. If all members have the same number of slots, a member that keeps its group rank also keeps its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from strata.core.ids import WorkerId
from strata.core.job import World
from strata.core.kv.records import Member, Worker
from strata.core.kv.view import Entry


def placed(before: World | None, workers: Mapping[str, Entry[Worker]], *, most: int) -> tuple[Member, ...]:
    """Return the members of the next world, at most `most`, by group rank.

    `workers`: the registered members by name. Members of `before` go first, then the others in
    the order of their incarnations.
    """
    old_place = {
        member.worker: member.group_rank
        for member in (before.members if before is not None else ())
        if member.worker in workers and workers[member.worker].create_revision == member.incarnation
    }
    survivors = sorted(old_place, key=lambda name: old_place[name])[:most]
    newcomers = sorted(
        (name for name in workers if name not in old_place),
        key=lambda name: workers[name].create_revision,
    )[: most - len(survivors)]
    places = _places({name: old_place[name] for name in survivors}, newcomers)
    members, first_rank = [], 0
    for group_rank, name in enumerate(places):
        worker = workers[name]
        members.append(
            Member(
                worker=WorkerId(name),
                incarnation=worker.create_revision,
                group_rank=group_rank,
                slots=worker.record.slots,
                first_rank=first_rank,
            )
        )
        first_rank += worker.record.slots
    return tuple(members)


def _places(survivors: Mapping[str, int], newcomers: list[str]) -> list[str]:
    """Return the names, ordered by their new group rank."""
    size = len(survivors) + len(newcomers)
    kept = {rank: name for name, rank in survivors.items() if rank < size}
    movers = sorted((rank, name) for name, rank in survivors.items() if rank >= size)
    fillers = [*newcomers, *(name for _rank, name in reversed(movers))]
    holes = [rank for rank in range(size) if rank not in kept]
    kept.update(zip(holes, fillers, strict=True))
    return [kept[rank] for rank in range(size)]
