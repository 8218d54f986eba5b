"""Whether the current generation ends, why, and what follows it: the judgement behind `plan_world`.

    the world         what is seen                                   what follows
    ----------------  ---------------------------------------------  -----------------------------
    none, or forming  max members, or min and the settling is over    a world
    of a resumed job  the same: what finished before does not count   a world, fruitless 0
    with members      every rank done                                phase DONE, no world
                      a death (key gone or replaced, rank failed)     a world of those left, at once;
                                                                     below min: a forming one
                      ... the max-th fruitless one in a row, or the   phase FAILED, no world
                          last that `max_generations` allows to fail
                      ... the second early one, and no other was,     phase FAILED
                          unless more fruitless ones are allowed
                          than by default
                      ... a rank's exit code 78: a retry would meet   phase FAILED
                          the same; not of a newcomer on trial
                      ... while its ranks are asked to pause          a forming one, phase PAUSED
                      a notice, and nothing is left to wait for       see `core.stop.notices`
                      phase PAUSED                                    a forming one
                      somebody has it go back, or the checkpoint      a world that begins elsewhere
                          that its ranks wait for is corrupt
                      more members than the spec takes (any more)     a smaller world, and
                      standbys, room for them, settling over          a larger world: once the
                                                                     ranks were asked to stop for it
                      ... below min, or a rank is done, or all make   nothing: it trains on, or is about
                          their last save                            to finish

A generation is *fruitless* if a failure ended it before it committed a checkpoint. Growth, shrinking,
notices, forming worlds, and generations that had trained and could not save (`core.stop.save_hold`) neither count nor reset. It failed *early* if nothing but ranks failed in it, each by
itself within its first seconds and before a step was reported: an error in the program, that a retry meets again.
A job that fails by such a one, with nothing saved, is started again by the next run, whichever limit it met. So is one
that exit code 78 fails: whoever runs it again has mended it.

Members who were asked to leave are not counted among those that are here, nor are those that cannot restart
(`Worker.cannot_restart`) once a generation that they had begun has ended: they end by themselves. So a world that holds
such a member does not grow: newcomers stand by.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from strata.core.checkpoints.corruption import missed_by
from strata.core.checkpoints.order import asked_back, newest
from strata.core.checkpoints.references import SavesHeld
from strata.core.exit_codes import DO_NOT_REQUEUE
from strata.core.job import JobView, World
from strata.core.kv.records import (
    Asked,
    CheckpointState,
    JobSpec,
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
"""A program that fails in its first seconds is tried so often, where nobody allows more than the default."""
MEND = "mend this, and run the command again"
"""What to do about a job that the next run starts again."""
_NAMED = 4
"""How many deaths a reason names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Why the current generation ends, and what follows it: `forming`, a `phase`, or a world.

    `save_first`: it does not end yet; its ranks are to be asked to stop, by a SCALE. `early`: nothing is saved, and this
    one failed early; or a rank ended with 78.
    """

    why: str
    failure: bool = False
    early: bool = False
    phase: Phase | None = None
    forming: bool = False
    save_first: bool = False


class Situation:
    """The facts that one plan rests on, read once from one view.

    `asked_s`: for how long the leader has known of each request to leave, by its revision.
    """

    def __init__(self, job: JobView, spec: JobSpec, asked_s: Mapping[int, float]) -> None:
        self.job = job
        self.spec = spec
        self.asked_s = asked_s
        self.head = job.head()
        self.world: World | None = job.world()
        self.active: World | None = requests.active_world(job)
        self.resumed = requests.resumed(job)
        self.latest = job.latest()
        self.asked = requests.all_asked(job)
        self.registered = {w.name: w for w in job.workers()}
        self.leaving = requests.leaving(self.asked, self.registered.values(), asked_s)
        self.spent = spent(job, self.registered, asked_s)
        gone = self.leaving | {one.worker for one in self.spent}
        self.present: dict[str, Entry[Worker]] = {
            name: worker for name, worker in self.registered.items() if name not in gone
        }

    @property
    def generation(self) -> int:
        return self.head.record.generation if self.head is not None else 0

    @property
    def notice(self) -> Entry[StopNotice] | None:
        """What asks the ranks of the active world to stop."""
        return self.job.notice(self.generation) if self.active is not None else None

    def alive(self, member: Member) -> bool:
        worker = self.registered.get(member.worker)
        return worker is not None and worker.create_revision == member.incarnation

    def committed(self) -> bool:
        """Tell whether the current generation has committed a checkpoint of its own."""
        latest = self.latest.record if self.latest is not None else None
        return (
            latest is not None
            and latest.generation == self.generation
            and latest.record_generation == self.generation
        )

    @property
    def held(self) -> SavesHeld | None:
        """What kept the current generation from a commit though it had trained, if that is so."""
        return None if self.committed() else self.job.held(self.generation)

    def counts(self, *, failure: bool) -> tuple[int, int, bool]:
        """Return what the next head carries, if `failure` ended this generation or something else did.

        How many generations in a row were fruitless, how many a failure has ended, and whether one so far may have
        made a step.
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
        """Tell whether nothing but ranks has failed, each by itself in its first seconds, before a step was reported."""
        failed = self.job.failed(self.generation)
        members = self.active.members if self.active is not None else ()
        gone = any(not self.alive(member) for member in members)
        return bool(failed) and not gone and all(one.early for one in failed.values())

    def still_asked(self) -> tuple[Asked, ...]:
        """Return the requests to leave that the next head carries on: those who are meant are here."""
        return tuple(
            one
            for one in requests.remembered(self.asked, self.asked_s)
            if any(requests.means(one, w.name, w.create_revision) for w in self.registered.values())
        )

    # -- what follows

    def change(self, *, settled: bool) -> Change | None:
        """Return what ends the current generation, or None while it goes on."""
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
        """Tell whether ranks may still run of a world that a pause should have ended.

        The job was paused and resumed before a leader saw it. Of that world nobody is asked or counted
        any more, so it must not outlast the wait for another one.
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
            # the first rank that stops breaks what they do together: how the others end is no failure
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
        waiting = newcomers.kept_out(world.head.newcomers, self.asked_s)
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
        """Return the world that follows, though nobody was lost; its ranks are asked to stop first if they take part.

        None where it would have too few members: who trains goes on until there are enough.
        """
        if self._short() is not None:
            return None
        return Change(why=why, save_first=requests.takes_part(self.job, self.generation))

    def _short(self) -> str | None:
        """Return, in words, that fewer members are left than the job needs; None when there are enough."""
        count, least = len(self.present), self.spec.min_workers
        return None if count >= least else f"{count} of at least {least} members are left"

    def _elsewhere(self, world: World) -> Change | None:
        """Return why the ranks should begin again, and elsewhere: their restore point is damaged, or was left."""
        point, rewind = world.head.restore, asked_back(self.job)
        if rewind is not None:
            who = rewind.record.who or "somebody"
            return self._of_the_rest(f"{who} has the job go back to step {rewind.record.step}")
        if point is None:
            return None
        entry = self.job.checkpoint(point.step, point.record_generation)
        if entry is None or entry.record.attempt != point.attempt:
            return None
        corrupt = entry.record.state is CheckpointState.CORRUPT
        if not corrupt or not missed_by(self.job, entry.record, self.generation):
            return None  # they had read it before it was damaged
        why = f"step {point.step}, where it began, is corrupt: {entry.record.reason}"
        if newest(self.job) is None:
            return Change(why=f"{why}; no good checkpoint is left", failure=True, phase=Phase.FAILED)
        return self._of_the_rest(why)

    def _of_the_rest(self, why: str, *, failure: bool = False) -> Change:
        """Return the world of those who are left; a forming one, which keeps a rewind, where they are too few."""
        short = self._short()
        return Change(
            why=why if short is None else f"{why}; {short}", failure=failure, forming=short is not None
        )

    def _deaths(self, world: World, ended: set[int]) -> tuple[list[str], list[str]]:
        """Return, in words, who left as asked but before its ranks had ended, and what failed."""
        left, found = [], []
        for member in world.members:
            if self.alive(member) or all(rank in ended for rank in member.ranks):
                continue
            gone = "was replaced" if member.worker in self.registered else "is gone"
            if requests.asked_notice(self.asked, member.worker, member.incarnation) is not None:
                left.append(f"{member.worker} {gone}, as asked")
            else:
                found.append(f"{member.worker} {gone}")
        for rank, failed in sorted(self.job.failed(self.generation).items()):
            found.append(f"rank {rank} of {failed.worker} failed ({failed.reason})")
        return left, found

    def next_newcomers(self, members: Iterable[Member], *, failure: bool) -> tuple[Newcomer, ...]:
        """Return who is on trial in a next generation of `members`, if `failure` ended this one or something else did."""
        if self.head is None or self.resumed:
            return ()
        before = self.active.members if self.active is not None else ()
        gone = {member.worker for member in before if not self.alive(member)}
        failed = gone | {one.worker for one in self.job.failed(self.generation).values()}
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
        """Return the members that a next world may have: without those that failed on trial, if there are enough."""
        waiting = newcomers.kept_out(self.next_newcomers((), failure=failure), self.asked_s)
        rest = {name: worker for name, worker in self.present.items() if name not in waiting}
        return rest if len(rest) >= self.spec.min_workers else self.present

    def _after(self, why: str, *, failure: bool) -> Change:
        """Return what follows a generation that cannot go on."""
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
        """Tell whether a rank ended with 78, and none of a member on trial failed: one newcomer must not fail a job.

        What is wrong on a newcomer's host may be an error on each rank: they compare their settings.
        """
        on_trial = {one.worker for one in self.head.record.newcomers} if self.head is not None else set()
        ended = self.job.failed(self.generation).values()
        return any(one.code == DO_NOT_REQUEUE for one in ended) and not any(
            one.worker in on_trial for one in ended
        )

    def _stopped(
        self, notice: Entry[StopNotice], world: World, done: set[int], ended: set[int]
    ) -> Change | None:
        """Return what follows a generation that is asked to stop; None while it is waited for."""
        record = notice.record
        asked = [m for m in world.members if meaning(record, m.worker) is Meaning.LEAVE] or world.members
        ranks = {rank for member in asked for rank in member.ranks}
        if ranks <= done:
            return None  # they finished before they stopped
        why = record.reason if not record.has_deadline else f"{_ACTS[requests.act(record)]}: {record.reason}"
        names = ", ".join(record.workers[:_NAMED])
        why = f"{names} {why}" if names else why
        if not ranks <= ended:
            over = requests.generation_over(self.job, notice, world, self.asked_s)
            if over is None:
                return None
            why = f"{why}; {over}"
        if record.pause:
            more = "; and paused" if record.action is not StopAction.SCALE else ""
            return Change(why=f"{why}{more}", phase=Phase.PAUSED, forming=True)
        return self._of_the_rest(why)


_ACTS = {"preempt": "preempted", "pause": "paused", "drain": "drained", "scale": "scaled"}
