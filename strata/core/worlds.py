"""Membership becomes a world: who trains together, as which ranks, from which checkpoint.

`plan_world` looks at a job and says what to write next; the leader executes it and asks again
(PROTOCOLS 6.1). What makes a new generation:

    the world         what is seen                                  what is written
    ----------------  --------------------------------------------  ------------------------------
    none, or forming  max members, or min and the settling is over   a world
    of a resumed job  the same: what finished before does not count  a world, fruitless 0
    with members      every rank done                               phase DONE, no world
                      a death (key gone or replaced, rank failed)    a world of those left, at once;
                                                                    below min: a forming one
                      ... the max-th fruitless one in a row          phase FAILED, no world
                      standbys, room for them, settling over         a larger world

A generation is *fruitless* if a failure ended it before it committed a checkpoint. Growth and
forming worlds neither count nor reset.

What the transactions compare: the leader's epoch, the head, the phase, `latest`; nothing of the
members, for a death in between simply makes the next generation. That needs no comparison either
where a plan rests on a death: an incarnation that is gone never returns, and the `failed` and
`done` keys of a generation stay until a newer head is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from strata.core.checkpoint_order import latest_under, restore_point
from strata.core.chunks import chunks_of, write_members
from strata.core.ids import WorkerId
from strata.core.job import JobView, World
from strata.core.keys import ClusterKeys
from strata.core.placement import placed
from strata.core.records import (
    CheckpointRecord,
    CheckpointState,
    JobPhase,
    JobSpec,
    Member,
    Phase,
    Restored,
    Standbys,
    WorldHead,
    encode,
)
from strata.core.txn import Compare, Operation, Put, Txn, created_at, unchanged
from strata.core.view import Entry

MAX_REASON_CHARS = 500
MAX_STANDBYS_SHOWN = 400
_NAMED = 4
"""How many deaths a reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """What to write, in order; then plan again on a view that shows it, or that shows why not.

    `open_records`: saves that must be committed or aborted before a head can be written; then
    there are no transactions yet.
    """

    reason: str
    txns: tuple[Txn, ...] = ()
    open_records: tuple[Entry[CheckpointRecord], ...] = ()


def plan_world(job: JobView, *, keys: ClusterKeys, epoch: int, settled: bool) -> WorldPlan:
    """Say what the leader of `epoch` writes next for this job.

    `settled`: the set of registered members has been the same for the spec's `settle_s`.
    """
    spec = job.spec()
    if spec is None:
        return WorldPlan(reason=f"job {job.keys.name} does not exist")
    if job.phase() is not Phase.RUNNING:
        return WorldPlan(reason=f"job {job.keys.name} is {job.phase().value}")
    planner = _Planner(job, keys, epoch, spec.record)
    return planner.plan(settled=settled)


def needs_settling(job: JobView) -> bool:
    """Tell whether a world waits only for the members to settle: the time to start a timer."""
    spec = job.spec()
    if spec is None or job.phase() is not Phase.RUNNING:
        return False
    planner = _Planner(job, None, 0, spec.record)
    return planner.change(settled=False) is None and planner.change(settled=True) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """Why the current generation ends, and what follows it."""

    why: str
    failure: bool = False
    phase: Phase | None = None
    forming: bool = False


class _Planner:
    """The facts that one plan rests on, read once from one view."""

    def __init__(self, job: JobView, keys: ClusterKeys | None, epoch: int, spec: JobSpec) -> None:
        self.job = job
        self.keys = keys
        self.epoch = epoch
        self.spec = spec
        self.head = job.head()
        self.world: World | None = job.world()
        self.workers = {w.name: w for w in job.workers()}
        self.latest = job.latest()

    # -- what is the case

    @property
    def generation(self) -> int:
        return self.head.record.generation if self.head is not None else 0

    @property
    def resumed(self) -> bool:
        """Whether somebody took the job up again after its last generation had finished it."""
        phase = self.job.view.entry(self.job.keys.phase, JobPhase)
        return phase is not None and self.head is not None and phase.mod_revision > self.head.mod_revision

    @property
    def active(self) -> World | None:
        """The world, if it has members and is not one that finished before the job was resumed."""
        world = self.world
        return None if world is None or world.head.forming or self.resumed else world

    def alive(self, member: Member) -> bool:
        worker = self.workers.get(member.worker)
        return worker is not None and worker.create_revision == member.incarnation

    def deaths(self, world: World, done: set[int]) -> list[str]:
        """Return, in words, the failed ranks and the members that went before they were done."""
        found = []
        for member in world.members:
            ranks = range(member.first_rank, member.first_rank + member.slots)
            if not self.alive(member) and not all(rank in done for rank in ranks):
                gone = "was replaced" if member.worker in self.workers else "is gone"
                found.append(f"{member.worker} {gone}")
        for rank, failed in sorted(self.job.failed(self.generation).items()):
            found.append(f"rank {rank} of {failed.worker} failed ({failed.reason})")
        return found

    def committed(self) -> bool:
        """Tell whether the current generation has committed a checkpoint of its own."""
        latest = self.latest.record if self.latest is not None else None
        return (
            latest is not None
            and latest.generation == self.generation
            and latest.record_generation == self.generation
        )

    def fruitless(self, *, failure: bool) -> int:
        """Return the count that the next head carries."""
        if self.head is None or self.resumed:
            return 0
        if self.active is None:
            return self.head.record.fruitless
        if self.committed():
            return 0
        return self.head.record.fruitless + (1 if failure else 0)

    # -- what follows

    def change(self, *, settled: bool) -> _Change | None:
        """Return what ends the current generation, or None while it goes on."""
        world = self.active
        count, spec = len(self.workers), self.spec
        if world is None:
            if count >= spec.max_workers:
                return _Change(why=f"all {spec.max_workers} members are here")
            if count >= spec.min_workers and settled:
                return _Change(why=f"{count} members, at least {spec.min_workers}, have settled")
            return None
        done = self.job.done(self.generation)
        if len(done) >= world.head.size:
            return _Change(why=f"all {world.head.size} ranks are done", phase=Phase.DONE)
        deaths = self.deaths(world, done)
        if deaths:
            return self._after(deaths)
        newcomers = count - sum(self.alive(member) for member in world.members)
        if newcomers and world.head.members < spec.max_workers and not done and settled:
            return _Change(why=f"{newcomers} more members have settled")
        return None

    def _after(self, deaths: list[str]) -> _Change:
        more = f" and {len(deaths) - _NAMED} more" if len(deaths) > _NAMED else ""
        why = ", ".join(deaths[:_NAMED]) + more
        limit = self.spec.max_fruitless_generations
        fruitless = self.fruitless(failure=True)
        if fruitless >= limit:
            return _Change(
                why=f"{fruitless} generations in a row failed without a checkpoint; the last: {why}",
                failure=True,
                phase=Phase.FAILED,
            )
        if len(self.workers) < self.spec.min_workers:
            short = f"{len(self.workers)} of at least {self.spec.min_workers} members are left"
            return _Change(why=f"{why}; {short}", failure=True, forming=True)
        return _Change(why=why, failure=True)

    # -- what is written

    def plan(self, *, settled: bool) -> WorldPlan:
        change = self.change(settled=settled)
        if change is None:
            return self._keep()
        if change.phase is not Phase.DONE:
            open_records = tuple(
                entry for entry in self.job.checkpoints() if entry.record.state is CheckpointState.OPEN
            )
            if open_records:
                return WorldPlan(
                    reason=f"{change.why}: {len(open_records)} open checkpoints first",
                    open_records=open_records,
                )
        if change.phase is not None:
            return self._end(change.phase, change.why)
        return self._begin(change)

    def _guards(self) -> list[Compare]:
        """The leader's fence, and the facts that every plan reads."""
        assert self.keys is not None, "only a plan writes"
        view, job = self.job.view, self.job.keys
        return [
            created_at(self.keys.leader, self.epoch),
            unchanged(job.head, view.mod_revision(job.head)),
            unchanged(job.phase, view.mod_revision(job.phase)),
        ]

    def _end(self, phase: Phase, why: str) -> WorldPlan:
        """Finish the job. An all-done world rests on `done` keys, which outlive the head."""
        keys, view = self.job.keys, self.job.view
        record = JobPhase(phase=phase, reason=_cut(why), epoch=self.epoch)
        compares = [*self._guards(), unchanged(keys.latest, view.mod_revision(keys.latest))]
        put = Put(key=keys.phase, value=encode(record))
        return WorldPlan(
            reason=f"job {keys.name} is {phase.value}: {why}",
            txns=(Txn(compares=tuple(compares), success=(put,)),),
        )

    def _begin(self, change: _Change) -> WorldPlan:
        """Write the next generation: its members' chunks and its head."""
        keys, view = self.job.keys, self.job.view
        generation = self.generation + 1
        members: tuple[Member, ...] = ()
        if not change.forming:
            members = placed(self.active, self.workers, most=self.spec.max_workers)
        chunks = chunks_of(members)
        restore = None if change.forming else restore_point(self.job)
        size = sum(member.slots for member in members)
        head = WorldHead(
            generation=generation,
            epoch=self.epoch,
            members=len(members),
            size=size,
            reason=_cut(change.why),
            chunks=len(chunks),
            restore=restore,
            fruitless=self.fruitless(failure=change.failure),
        )
        operations: list[Operation] = [Put(key=keys.head, value=encode(head))]
        if restore is not None:
            latest = latest_under(generation, restore)
            operations += [
                Put(key=keys.latest, value=encode(latest)),
                Put(key=keys.restored(generation), value=encode(Restored(step=restore.step))),
            ]
        standbys, standbys_known = self._standbys(members)
        operations += standbys
        latest_known = unchanged(keys.latest, view.mod_revision(keys.latest))
        compares = (*self._guards(), latest_known, *standbys_known)
        txns = write_members(
            self.job,
            generation=generation,
            epoch=self.epoch,
            chunks=chunks,
            guards=self._guards(),
            last=Txn(compares=compares, success=tuple(operations)),
        )
        what = (
            f"a forming generation {generation}"
            if change.forming
            else f"generation {generation} of {len(members)} members, {size} ranks"
        )
        return WorldPlan(reason=f"{what}: {change.why}", txns=txns)

    def _keep(self) -> WorldPlan:
        """Go on with the world as it is; at most the list of standbys is brought up to date."""
        world, count, spec = self.active, len(self.workers), self.spec
        if world is None:
            what = "settling" if count >= spec.min_workers else f"{spec.min_workers} are needed"
            reason = f"{count} of at most {spec.max_workers} members are here; {what}"
        else:
            reason = f"generation {self.generation} goes on with {world.head.members} members"
        operations, compares = self._standbys(world.members if world is not None else ())
        if not operations:
            return WorldPlan(reason=reason)
        txn = Txn(compares=(*self._guards(), *compares), success=tuple(operations))
        return WorldPlan(reason=f"{reason}; the standbys changed", txns=(txn,))

    def _standbys(self, members: tuple[Member, ...]) -> tuple[list[Operation], list[Compare]]:
        """Return the write of a changed list of standbys, for people: no decision reads it.

        Without a world nobody stands by: everyone waits for it.
        """
        key = self.job.keys.standbys
        before = self.job.view.entry(key, Standbys)
        inside = {member.worker for member in members if self.alive(member)}
        names = sorted(self.workers.keys() - inside) if members else []
        wanted = tuple(WorkerId(name) for name in names[:MAX_STANDBYS_SHOWN])
        known = [unchanged(key, before.mod_revision if before is not None else 0)]
        if wanted == (before.record.workers if before is not None else ()):
            return [], known
        return [Put(key=key, value=encode(Standbys(workers=wanted, epoch=self.epoch)))], known


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"
