"""The current world of each job, indexed for the look-ups that every message needs."""

from __future__ import annotations

from dataclasses import dataclass

from strata.core.job import JobView, World
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import Member, WorldHead
from strata.core.kv.view import View


@dataclass(slots=True, kw_only=True)
class RankIndex:
    """The members of one generation, by worker and incarnation."""

    head: WorldHead
    places: dict[tuple[str, int], Member]
    """By worker and incarnation."""
    wounded: bool
    """Whether a member is lost, or a rank failed, is done or stopped: some barrier may have to break."""

    def place(self, worker: str, incarnation: int) -> Member | None:
        """Return this incarnation's place, or None for a standby."""
        return self.places.get((worker, incarnation))

    def had(self, worker: str, incarnation: int) -> bool:
        """True if an earlier incarnation of this worker has a place, and this incarnation has none."""
        if (worker, incarnation) in self.places:
            return False
        return any(name == worker and before < incarnation for name, before in self.places)

    def ranks(self, worker: str, incarnation: int) -> range:
        """Return the ranks that this incarnation runs; none for a standby."""
        member = self.places.get((worker, incarnation))
        if member is None:
            return range(0)
        return range(member.first_rank, member.first_rank + member.slots)


class RankIndexes:
    """Makes an index once a generation. A world's members never change while its head stays the same.

    Every message uses an index, so `of` does not check the view for a new head: `Fanout` reports a new head by
    `forget`.
    """

    def __init__(self, view: View, keys: ClusterKeys) -> None:
        self._view = view
        self._keys = keys
        self._made: dict[str, RankIndex] = {}

    def of(self, job: str) -> RankIndex | None:
        """Return the index of the job's current world, or None before the first one."""
        held = self._made.get(job)
        if held is not None:
            return held
        view = JobView(self._view, self._keys.job(job))
        world = view.world()
        if world is None:
            return None
        index = self._made[job] = RankIndex(
            head=world.head,
            places={(m.worker, m.incarnation): m for m in world.members},
            wounded=_wounded(view, world),
        )
        return index

    def forget_all(self) -> None:
        """Drop all indexes: changes until now were not reported."""
        self._made.clear()

    def forget(self, job: str) -> None:
        """Record that the job's head changed. Call it before any use of the new head."""
        self._made.pop(job, None)

    def wound(self, job: str) -> None:
        """Record that a member or a rank of the job was lost or ended."""
        if (index := self.of(job)) is not None:
            index.wounded = True


def _wounded(job: JobView, world: World) -> bool:
    generation = world.head.generation
    alive = {(worker.name, worker.create_revision) for worker in job.workers()}
    return (
        bool(job.view.names(job.keys.failed(generation)))
        or bool(job.view.names(job.keys.done(generation)))
        or bool(job.view.names(job.keys.stopped(generation)))
        or any((m.worker, m.incarnation) not in alive for m in world.members)
    )
