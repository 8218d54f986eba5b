"""The decision behind `plan_world`: does the current generation end, why, and what follows it?

    the world         what the view shows                            what follows
    ----------------  ---------------------------------------------  -----------------------------
    none, or forming  max members, or min members and settled        a world
    of a resumed job  as above; a world done before is ignored       a world, no_progress 0
    with members      every rank done                                phase DONE, no world
                      a death (key deleted or replaced, or a rank    a world of the remaining members,
                          failed)                                    immediately; below min: a forming one
                      ... the max-th in a row without progress, or   phase FAILED, no world
                          the last failure `max_generations` allows
                      ... the second early failure, if no earlier    phase FAILED
                          generation began; a no-progress limit
                          above the default replaces "second"
                      ... a rank's exit code 78, as a retry would    phase FAILED
                          fail again; not for a newcomer on trial
                      ... while a notice asks its ranks to pause     a forming one, phase PAUSED
                      a notice, and nothing is left to wait for      see `core.stop.notices`
                      phase PAUSED                                   a forming one
                      a rewind, or the checkpoint that its ranks     a world with another
                          still have to read is corrupt              restore point
                      more members than the spec allows (now)        a smaller world, and
                      standbys, free places for them, settled        a larger world: after a notice
                                                                     has asked the ranks to stop
                      ... below min, or a rank is done, or all make  nothing: it trains on, or is
                          their last save                            about to finish

A generation is *without progress* if a failure ended it before it had committed a checkpoint. Growth, shrinking,
notices, forming worlds, and generations that trained but could not save (`core.stop.save_hold`) neither count nor
reset the count. A generation failed *early* if no member died and each failed rank failed by itself, within its
first seconds and before it reported a step. Such a failure counts as an error in the program: a retry would fail in
the same way. The next run of a job starts the job again if the job failed early with nothing saved, whichever limit
the job reached. The same holds after exit code 78: the operator who runs the job again has fixed the cause.

Two kinds of members do not count as present. The first are members that a notice asked to leave. The second are
members that cannot restart (`Worker.cannot_restart`), once a generation in which they trained has ended: their
processes exit by themselves. A world with such a member therefore does not grow: newcomers stand by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from strata.core.checkpoints.corruption import missed_by
from strata.core.checkpoints.order import newest, pending_rewind
from strata.core.checkpoints.references import SavesHeld
from strata.core.exit_codes import DO_NOT_REQUEUE
from strata.core.job import JobView, World
from strata.core.kv.records import (
    CheckpointState,
    JobSpec,
    LeaveRequest,
    Member,
    Newcomer,
    Phase,
    StopAction,
    StopNotice,
    Worker,
)
from strata.core.kv.view import Entry
from strata.core.members import newcomers
from strata.core.members.spent import spent
from strata.core.stop import requests
from strata.core.stop.last_step import CLOSING_BARRIER
from strata.core.stop.notices import Meaning, meaning
from strata.core.words import first_few

EARLY_FAILURES = 2
"""The number of early failures after which a job fails, unless its no-progress limit is above the default."""
MEND = "mend this, and run the command again"
"""The advice shown for a failed job that its next run starts again."""
_NAMED = 4
"""The number of deaths that a reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Why the current generation ends, and what follows it: `forming`, a `phase`, or a world.

    `save_first`: the generation does not end yet; a SCALE notice must first ask its ranks to stop. `early`: a rank
    exited with code 78, or this generation failed early and the job has saved nothing.
    """

    why: str
    failure: bool = False
    early: bool = False
    phase: Phase | None = None
    forming: bool = False
    save_first: bool = False


class Situation:
    """The facts behind one plan, read once from one view.

    `request_ages_s`: for each request to leave, by the request's revision, how many seconds the leader has known of it.
    """

    def __init__(self, job: JobView, spec: JobSpec, request_ages_s: Mapping[int, float]) -> None:
        self.job = job
        self.spec = spec
        self.request_ages_s = request_ages_s
        self.head = job.head()
        self.world: World | None = job.world()
        self.active: World | None = requests.active_world(job)
        self.resumed = requests.resumed(job)
        self.latest = job.latest()
        self.leave_requests = requests.leave_requests(job)
        self.registered = {w.name: w for w in job.workers()}
        self.leaving = requests.leaving(self.leave_requests, self.registered.values(), request_ages_s)
        self.spent = spent(job, self.registered, request_ages_s)
        departing = self.leaving | {one.worker for one in self.spent}
        self.present: dict[str, Entry[Worker]] = {
            name: worker for name, worker in self.registered.items() if name not in departing
        }

    @property
    def generation(self) -> int:
        return self.head.record.generation if self.head is not None else 0

    @property
    def notice(self) -> Entry[StopNotice] | None:
        """The notice that asks the ranks of the active world to stop, or None."""
        return self.job.notice(self.generation) if self.active is not None else None

    def alive(self, member: Member) -> bool:
        worker = self.registered.get(member.worker)
        return worker is not None and worker.create_revision == member.incarnation

    def committed(self) -> bool:
        """Return whether the current generation has committed a checkpoint of its own."""
        latest = self.latest.record if self.latest is not None else None
        return (
            latest is not None
            and latest.generation == self.generation
            and latest.record_generation == self.generation
        )

    @property
    def held(self) -> SavesHeld | None:
        """The record of ranks of this generation that trained but could not save; None without one, or after a commit."""
        return None if self.committed() else self.job.held(self.generation)

    def counts(self, *, failure: bool) -> tuple[int, int, bool]:
        """Return `no_progress`, `failures` and `began` for the next head; `failure`: a failure ended this generation.

        These are the number of generations in a row without progress, the number of generations that a failure
        ended, and whether any generation so far may have made a step.
        """
        if self.head is None or self.resumed:
            return 0, 0, False
        before = self.head.record
        if self.active is None:
            return before.no_progress, before.failures, before.began
        more = 1 if failure else 0
        no_progress = before.no_progress + (more if self.held is None else 0)
        began = before.began or not (failure and self.failed_early())
        return 0 if self.committed() else no_progress, before.failures + more, began

    def failed_early(self) -> bool:
        """Return whether only ranks failed, each by itself in its first seconds, before a step was reported."""
        failed = self.job.failed(self.generation)
        members = self.active.members if self.active is not None else ()
        lost = any(not self.alive(member) for member in members)
        return bool(failed) and not lost and all(one.early for one in failed.values())

    def pending_leave_requests(self) -> tuple[LeaveRequest, ...]:
        """Return the requests to leave that the next head must carry: those whose members are still registered."""
        return tuple(
            one
            for one in requests.remembered(self.leave_requests, self.request_ages_s)
            if any(requests.means(one, w.name, w.create_revision) for w in self.registered.values())
        )

    # -- what follows

    def change(self, *, settled: bool) -> Change | None:
        """Return why and how the current generation ends, or None while it goes on."""
        if self.job.phase() is Phase.PAUSED:
            if self.head is None or self.head.record.forming:
                return None
            return Change(why="the job is paused", forming=True)
        if self.active is None:
            return self._first(settled=settled)
        return self._next(self.active, settled=settled)

    def _first(self, *, settled: bool) -> Change | None:
        count, spec = len(self.present), self.spec
        if count >= spec.max_workers:
            return Change(why=f"all {spec.max_workers} members are here")
        if count >= spec.min_workers and settled:
            return Change(why=f"{count} members, at least {spec.min_workers}, have settled")
        short = self._short()
        if short is not None and self.runs_on():
            return Change(why=f"the job was resumed; {short}", forming=True)
        return None

    def runs_on(self) -> bool:
        """Return whether ranks of a world that a pause should have ended may still run.

        This happens if a job was paused and resumed before a leader saw the pause. The leader no longer sends
        notices to that world and no longer counts its ranks, so it must end that world before the next one forms.
        """
        world = self.world
        if not self.resumed or world is None or len(self.job.done(self.generation)) >= world.head.size:
            return False
        return any(map(self.alive, world.members))

    def _next(self, world: World, *, settled: bool) -> Change | None:
        spec, generation = self.spec, self.generation
        done = self.job.done(generation)
        if len(done) >= world.head.size:
            return Change(why=f"all {world.head.size} ranks are done", phase=Phase.DONE)
        ended = done | self.job.stopped(generation)
        left, deaths = self._deaths(world, ended)
        if deaths:
            # the exit of the first rank that stops breaks the other ranks' collectives, so their failures do not count
            stopped = bool(self.job.stopped(generation))
            return self._after(first_few([*deaths, *left], _NAMED), failure=not stopped)
        if left:
            return self._after(first_few(left, _NAMED), failure=False)
        if self.notice is not None and self.notice.record.has_deadline:
            return self._stopped(self.notice, world, done, ended)
        if done or self.job.met(CLOSING_BARRIER, generation):
            return None  # it is about to finish
        if self.notice is not None:
            return self._stopped(self.notice, world, done, ended)
        if world.head.members > spec.max_workers:
            return self._scaled(f"the job takes {spec.max_workers} members now")
        here = {member.worker for member in world.members if self.alive(member)}
        waiting = newcomers.kept_out(world.head.newcomers, self.request_ages_s)
        new = len(self.present.keys() - here - waiting)
        grows = new > 0 and world.head.members < spec.max_workers
        if (why := self._elsewhere(world)) is not None:
            return why
        if grows and settled and not any(self._cannot_restart(member) for member in world.members):
            return self._scaled(f"{new} more members have settled")
        return None

    def _cannot_restart(self, member: Member) -> bool:
        return self.alive(member) and self.registered[member.worker].record.cannot_restart

    def _scaled(self, why: str) -> Change | None:
        """Return the change to a world of another size; its ranks first get a notice to stop, if they support it.

        None if that world would have too few members: the current world trains on until enough members are registered.
        """
        if self._short() is not None:
            return None
        return Change(why=why, save_first=requests.takes_part(self.job, self.generation))

    def _short(self) -> str | None:
        """Return a sentence if fewer members are left than the job needs, else None."""
        count, least = len(self.present), self.spec.min_workers
        return None if count >= least else f"{count} of at least {least} members are left"

    def _elsewhere(self, world: World) -> Change | None:
        """Return the change if the ranks must restore another checkpoint: after a rewind, or if this one is corrupt."""
        point, rewind = world.head.restore, pending_rewind(self.job)
        if rewind is not None:
            who = rewind.record.who or "somebody"
            return self._of_the_rest(f"{who} rewinds the job to step {rewind.record.step}")
        if point is None:
            return None
        entry = self.job.checkpoint(point.step, point.record_generation)
        if entry is None or entry.record.attempt != point.attempt:
            return None
        corrupt = entry.record.state is CheckpointState.CORRUPT
        if not corrupt or not missed_by(self.job, entry.record, self.generation):
            return None  # the ranks read it before it was damaged
        why = f"step {point.step}, where it began, is corrupt: {entry.record.reason}"
        if newest(self.job) is None:
            return Change(why=f"{why}; no good checkpoint is left", failure=True, phase=Phase.FAILED)
        return self._of_the_rest(why)

    def _of_the_rest(self, why: str, *, failure: bool = False) -> Change:
        """Return the change to a world of the remaining members; if they are too few, to a forming world.

        A forming world keeps a pending rewind.
        """
        short = self._short()
        return Change(
            why=why if short is None else f"{why}; {short}", failure=failure, forming=short is not None
        )

    def _deaths(self, world: World, ended: set[int]) -> tuple[list[str], list[str]]:
        """Return two lists of sentences: departures that a notice requested before the ranks ended, and failures."""
        left, found = [], []
        for member in world.members:
            if self.alive(member) or all(rank in ended for rank in member.ranks):
                continue
            how = "was replaced" if member.worker in self.registered else "is gone"
            if requests.leave_notice(self.leave_requests, member.worker, member.incarnation) is not None:
                left.append(f"{member.worker} {how}, as requested")
            else:
                found.append(f"{member.worker} {how}")
        for rank, failed in sorted(self.job.failed(self.generation).items()):
            found.append(f"rank {rank} of {failed.worker} failed ({failed.reason})")
        return left, found

    def next_newcomers(self, members: Iterable[Member], *, failure: bool) -> tuple[Newcomer, ...]:
        """Return the members on trial in a next generation of `members`; `failure`: a failure ended this generation."""
        if self.head is None or self.resumed:
            return ()
        before = self.active.members if self.active is not None else ()
        lost = {member.worker for member in before if not self.alive(member)}
        failed = lost | {one.worker for one in self.job.failed(self.generation).values()}
        known = {member.worker for member in before}
        return newcomers.after(
            self.head.record.newcomers,
            members=known,
            failed=failed if failure else (),
            committed=self.committed(),
            joined=[m.worker for m in members if m.worker not in known] if self.active is not None else (),
            revision=self.job.view.revision,
        )

    def placeable(self, *, failure: bool) -> dict[str, Entry[Worker]]:
        """Return the candidates for a next world; members that failed on trial are left out if enough others remain."""
        waiting = newcomers.kept_out(self.next_newcomers((), failure=failure), self.request_ages_s)
        rest = {name: worker for name, worker in self.present.items() if name not in waiting}
        return rest if len(rest) >= self.spec.min_workers else self.present

    def _after(self, why: str, *, failure: bool) -> Change:
        """Return what follows a generation that lost a member or rank."""
        if failure and (held := self.held) is not None:
            why = f"{why}; saves were held: {held.reason} on host {held.host}"
        if failure and (end := self._too_many(why)) is not None:
            return end
        notice = self.notice
        if notice is not None and notice.record.pause:
            why = f"{why}; paused: {notice.record.reason}"
            return Change(why=why, failure=failure, phase=Phase.PAUSED, forming=True)
        return self._of_the_rest(why, failure=failure)

    def _too_many(self, why: str) -> Change | None:
        no_progress, failures, began = self.counts(failure=True)
        most = self.spec.max_no_progress_generations
        early = self.latest is None and self.failed_early()
        tried = EARLY_FAILURES if most <= JobSpec().max_no_progress_generations else most
        lasting = self._lasting()
        if lasting:
            sentence = why
        elif early and failures >= tried and not began:
            sentence = (
                f"{failures} generations failed in their first seconds, before a step was reported;"
                f" the last: {why}"
            )
        elif no_progress >= most:
            sentence = f"{no_progress} generations in a row failed without a checkpoint; the last: {why}"
        elif 0 < self.spec.max_generations <= failures:
            sentence = f"{failures} generations failed, as many as max_generations allows; the last: {why}"
        else:
            return None
        again = early or lasting
        why = f"{MEND}: {sentence}" if again else sentence
        return Change(why=why, failure=True, phase=Phase.FAILED, early=again)

    def _lasting(self) -> bool:
        """Return whether a rank exited with code 78 and no member on trial failed.

        One newcomer must not fail a job: a fault on its host may show as an error on every rank, because ranks
        compare their settings.
        """
        on_trial = {one.worker for one in self.head.record.newcomers} if self.head is not None else set()
        ended = self.job.failed(self.generation).values()
        return any(one.code == DO_NOT_REQUEUE for one in ended) and not any(
            one.worker in on_trial for one in ended
        )

    def _stopped(
        self, notice: Entry[StopNotice], world: World, done: set[int], ended: set[int]
    ) -> Change | None:
        """Return what follows a generation that a notice asks to stop; None while the leader waits for it."""
        record = notice.record
        leaving = [m for m in world.members if meaning(record, m.worker) is Meaning.LEAVE] or world.members
        ranks = {rank for member in leaving for rank in member.ranks}
        if ranks <= done:
            return None  # the ranks finished before they stopped
        why = record.reason if not record.has_deadline else f"{_ACTS[requests.act(record)]}: {record.reason}"
        names = ", ".join(record.workers[:_NAMED])
        why = f"{names} {why}" if names else why
        if not ranks <= ended:
            over = requests.generation_over(self.job, notice, world, self.request_ages_s)
            if over is None:
                return None
            why = f"{why}; {over}"
        if record.pause:
            more = "; and paused" if record.action is not StopAction.SCALE else ""
            return Change(why=f"{why}{more}", phase=Phase.PAUSED, forming=True)
        return self._of_the_rest(why)


_ACTS = {"preempt": "preempted", "pause": "paused", "drain": "drained", "scale": "scaled"}
