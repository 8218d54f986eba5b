"""Planning of worlds: turns membership into the next generation's ranks and restore point, and writes that generation.

`plan_world` reads a job and returns the next writes; the leader executes them and plans again
(PROTOCOLS 6.1). `core.worlds.changes` decides whether and why a new generation is due; this module
builds its transactions.

Every transaction compares the leader's epoch, the head, the phase, the spec, the notice, the saves-held key and the
rewind. A head's transaction also compares `latest`. This transaction fails if, since the view, ranks have met again
at the begin or closing barrier, or further ranks are done. No transaction compares member keys: if a member dies
after the plan, the next plan begins another generation. A plan based on a death needs no compare either: a removed
incarnation never returns, and the `failed` and `stopped` keys of a generation stay until a newer head is written.

The transaction of a head also writes the history record of the new generation, and completes that of the previous
generation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from strata.core.checkpoints.order import latest_under, newest, pending_rewind, restore_point
from strata.core.ids import WorkerId
from strata.core.job import JobView
from strata.core.kv.chunks import chunks_of, write_members
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    GenerationRecord,
    JobPhase,
    Member,
    Phase,
    Restored,
    Standbys,
    StopAction,
    StopNotice,
    WorldHead,
    encode,
)
from strata.core.kv.txn import Compare, Delete, Operation, Put, Txn, created_at, none_newer_in, unchanged
from strata.core.kv.view import Entry
from strata.core.stop import requests
from strata.core.stop.last_step import BEGIN_BARRIER, CLOSING_BARRIER
from strata.core.worlds.changes import Change, Situation
from strata.core.worlds.placement import placed

MAX_REASON_CHARS = 500
MAX_STANDBYS_SHOWN = 400
HISTORY_KEPT = 200
"""The number of generations whose history is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldPlan:
    """The next writes, in order. After them the leader plans again, on a view that shows the writes or why they failed.

    `open_records`: saves that must be committed or aborted before a head can be written; until then `txns` is
    empty. `again_s`: plan again after this many seconds even if nothing changes.
    """

    reason: str
    txns: tuple[Txn, ...] = ()
    open_records: tuple[Entry[CheckpointRecord], ...] = ()
    again_s: float | None = None


def plan_world(
    job: JobView,
    *,
    keys: ClusterKeys,
    epoch: int,
    settled: bool,
    request_ages_s: Mapping[int, float],
    now_unix_ms: int,
) -> WorldPlan:
    """Return the next writes of the leader of `epoch` for this job.

    `settled`: the set of registered members has not changed for the spec's `settle_s`. `request_ages_s`: for each revision
    in `requests.revisions`, how many seconds this leader has known of it. `now_unix_ms` is only for display.
    """
    spec, name, phase = job.spec(), job.keys.name, job.phase()
    if spec is None:
        return WorldPlan(reason=f"job {name} does not exist")
    if phase in {Phase.DONE, Phase.FAILED}:
        return WorldPlan(reason=f"job {name} is {phase.value}")
    situation = Situation(job, spec.record, request_ages_s)
    return _Planner(situation, job, keys, epoch, now_unix_ms).plan(settled=settled)


def needs_settling(job: JobView, request_ages_s: Mapping[int, float]) -> bool:
    """Return whether a world waits only for the members to settle; the leader then starts a timer."""
    spec = job.spec()
    if spec is None or job.phase() is not Phase.RUNNING:
        return False
    situation = Situation(job, spec.record, request_ages_s)
    return situation.change(settled=False) is None and situation.change(settled=True) is not None


@dataclass(frozen=True, slots=True)
class _Planner:
    """Builds the transactions that follow from a situation, fenced by one leader's epoch."""

    situation: Situation
    job: JobView
    keys: ClusterKeys
    epoch: int
    now_unix_ms: int

    def plan(self, *, settled: bool) -> WorldPlan:
        change = self.situation.change(settled=settled)
        if change is None:
            return self._keep()
        if change.save_first:
            return self._request_save(change.why)
        if change.phase is not Phase.DONE:
            open_records = tuple(
                entry for entry in self.job.checkpoints() if entry.record.state is CheckpointState.OPEN
            )
            if open_records:
                return WorldPlan(
                    reason=f"{change.why}: {len(open_records)} open checkpoints first",
                    open_records=open_records,
                )
        if change.phase in {Phase.DONE, Phase.FAILED}:
            return self._end(change.phase, change.why, early=change.early)
        return self._begin(change)

    def _guards(self) -> list[Compare]:
        """Return the leader's fence, and compares of the keys that every plan reads."""
        view, job = self.job.view, self.job.keys
        read, generation = [job.head, job.phase, job.spec, job.rewind], self.situation.generation
        if generation:
            read += [job.notice(generation), job.held(generation)]
        return [
            created_at(self.keys.leader, self.epoch),
            *(unchanged(key, view.mod_revision(key)) for key in read),
        ]

    def _request_save(self, why: str) -> WorldPlan:
        """Plan the notice that asks the current ranks to stop before a world of another size; then plan again."""
        generation = self.situation.generation
        notice = StopNotice(action=StopAction.SCALE, reason=_cut(why), grace_ms=requests.SCALE_MS)
        put = Put(key=self.job.keys.notice(generation), value=encode(notice))
        return WorldPlan(
            reason=f"the ranks of generation {generation} save first: {why}",
            txns=(Txn(compares=(*self._guards(), *self._no_further_meeting()), success=(put,)),),
        )

    def _end(self, phase: Phase, why: str, *, early: bool = False) -> WorldPlan:
        """Finish the job. The phase DONE is based on `done` keys, which nothing deletes while the head stays."""
        keys, view = self.job.keys, self.job.view
        record = JobPhase(
            phase=phase,
            reason=_cut(why),
            epoch=self.epoch,
            attempt=self.job.attempt(),
            ended_unix_ms=self.now_unix_ms,
            early=early,
        )
        compares = [*self._guards(), unchanged(keys.latest, view.mod_revision(keys.latest))]
        put = Put(key=keys.phase, value=encode(record))
        return WorldPlan(
            reason=f"job {keys.name} is {phase.value}: {why}",
            txns=(Txn(compares=tuple(compares), success=(put,)),),
        )

    def _begin(self, change: Change) -> WorldPlan:
        """Plan the next generation: its members' chunks and its head."""
        keys, view, situation = self.job.keys, self.job.view, self.situation
        generation = situation.generation + 1
        members: tuple[Member, ...] = ()
        if not change.forming:
            able = situation.placeable(failure=change.failure)
            members = placed(situation.active, able, most=situation.spec.max_workers)
        chunks = chunks_of(members)
        hosts = {situation.registered[member.worker].record.host for member in members}
        restore = None if change.forming else restore_point(self.job, hosts)
        if not change.forming and restore is None and (lost := newest(self.job)) is not None:
            where = f"step {lost.record.step} lies on the disks of other hosts"
            if situation.active is None and not situation.runs_on():
                return self._keep(f"no world begins, for {where}")
            return self._begin(replace(change, why=f"{change.why}; {where}", forming=True))
        if not change.forming and restore is None and situation.latest is not None:
            return self._end(Phase.FAILED, f"{change.why}; no good checkpoint is left to begin from")
        size = sum(member.slots for member in members)
        no_progress, failures, began = situation.counts(failure=change.failure)
        head = WorldHead(
            generation=generation,
            epoch=self.epoch,
            members=len(members),
            size=size,
            reason=_cut(change.why),
            chunks=len(chunks),
            restore=restore,
            no_progress=no_progress,
            failures=failures,
            began=began,
            leave_requests=situation.pending_leave_requests(),
            spent=situation.spent,
            newcomers=situation.next_newcomers(members, failure=change.failure),
        )
        operations: list[Operation] = [Put(key=keys.head, value=encode(head))]
        operations += self._history(head, change)
        if change.phase is not None:
            phase = JobPhase(
                phase=change.phase, reason=_cut(change.why), epoch=self.epoch, attempt=self.job.attempt()
            )
            operations.append(Put(key=keys.phase, value=encode(phase)))
        if restore is not None:
            latest = latest_under(generation, restore)
            operations += [
                Put(key=keys.latest, value=encode(latest)),
                Put(key=keys.restored(generation), value=encode(Restored(step=restore.step))),
            ]
        if self.job.rewind() is not None and not change.forming:
            operations.append(Delete(key=keys.rewind))  # the rewind is done, or its checkpoint is lost
        standbys, standbys_known = self._standbys(members)
        operations += standbys
        latest_known = unchanged(keys.latest, view.mod_revision(keys.latest))
        compares = (*self._guards(), latest_known, *self._no_further_meeting(), *standbys_known)
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

    def _no_further_meeting(self) -> list[Compare]:
        """Compare that ranks have not met again at the begin or closing barrier, and that no other rank is done.

        Otherwise the plan must change: ask for a save first, let the ranks finish, or end the job as done.
        """
        view, keys, generation = self.job.view, self.job.keys, self.situation.generation
        names = (BEGIN_BARRIER, CLOSING_BARRIER)
        floors = (keys.barrier_floor(name, generation) for name in names)
        return [
            *(unchanged(floor, view.mod_revision(floor)) for floor in floors),
            none_newer_in(keys.done(generation), view.revision),
        ]

    def _history(self, head: WorldHead, change: Change) -> list[Operation]:
        """Record why this generation begins and what the previous one committed; delete old history.

        The previous record needs no compare: only the leader rewrites it, together with a head, and the head is
        compared.
        """
        keys, situation = self.job.keys, self.situation
        record = GenerationRecord(
            epoch=self.epoch,
            members=head.members,
            size=head.size,
            reason=head.reason,
            began_unix_ms=self.now_unix_ms,
            failure=change.failure,
            restore=head.restore,
        )
        operations: list[Operation] = [Put(key=keys.history_of(head.generation), value=encode(record))]
        before = self.job.view.record(keys.history_of(situation.generation), GenerationRecord)
        if before is not None and situation.latest is not None and situation.committed():
            closed = replace(before, committed_step=situation.latest.record.step)
            operations.append(Put(key=keys.history_of(situation.generation), value=encode(closed)))
        oldest = head.generation - HISTORY_KEPT + 1
        names = self.job.view.names(keys.history)
        if names and int(names[0]) < oldest:
            operations.append(Delete(key=keys.history, range_end=keys.history_of(oldest)))
        return operations

    def _keep(self, why: str = "") -> WorldPlan:
        """Keep the current world; at most update the list of standbys, and delete a rewind that is over."""
        situation = self.situation
        world, count, spec = situation.active, len(situation.present), situation.spec
        if self.job.phase() is Phase.PAUSED:
            reason = f"job {self.job.keys.name} is paused"
        elif world is None:
            what = "settling" if count >= spec.min_workers else f"{spec.min_workers} are needed"
            reason = f"{count} of at most {spec.max_workers} members are here; {what}"
        else:
            reason = f"generation {situation.generation} goes on with {world.head.members} members"
            if world.head.members > spec.max_workers and count < spec.min_workers:
                reason += f", not {spec.max_workers}: too few of them could restart in a smaller world"
            if situation.notice is not None:
                reason += f", which have a stop request: {situation.notice.record.reason}"
        reason = f"{reason}; {why}" if why else reason
        again_s = requests.next_deadline_s(self.job, situation.request_ages_s)
        operations, compares = self._standbys(world.members if world is not None else ())
        if operations:
            reason = f"{reason}; the standbys changed"
        if self.job.rewind() is not None and pending_rewind(self.job) is None:
            operations.append(Delete(key=self.job.keys.rewind))
            reason = f"{reason}; the rewind is done, or its checkpoint is lost"
        if not operations:
            return WorldPlan(reason=reason, again_s=again_s)
        txn = Txn(compares=(*self._guards(), *compares), success=tuple(operations))
        return WorldPlan(reason=reason, txns=(txn,), again_s=again_s)

    def _standbys(self, members: tuple[Member, ...]) -> tuple[list[Operation], list[Compare]]:
        """Return the write of a changed list of standbys, for people: no decision reads it.

        Without a world there are no standbys: every member waits for the world.
        """
        key = self.job.keys.standbys
        before = self.job.view.entry(key, Standbys)
        inside = {member.worker for member in members if self.situation.alive(member)}
        names = sorted(self.situation.registered.keys() - inside) if members else []
        shown = tuple(WorkerId(name) for name in names[:MAX_STANDBYS_SHOWN])
        known = [unchanged(key, before.mod_revision if before is not None else 0)]
        if shown == (before.record.workers if before is not None else ()):
            return [], known
        return [Put(key=key, value=encode(Standbys(workers=shown, epoch=self.epoch)))], known


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"
