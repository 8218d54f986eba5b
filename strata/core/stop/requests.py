"""Requests to stop: ranks stop together, members leave, jobs pause and resume.

A *notice* asks the ranks of one generation to agree on a step, save it and stop there. The ranks choose the step
(`core.stop.last_step`); `core.stop.notices` defines what the notice means for a member. The leader or any replica
creates the notice once; later requests only make it wider or more urgent. A rank that exits with code 75 after a
notice has stopped, not failed.

The leader ends the generation (`generation_over`) in any of four cases: the common step is committed; the ranks do
not save that step, and no earlier save is open; the step can no longer be saved; the time is over.

A member that was asked to leave gets no place in later generations: each later head carries the request
(`WorldHead.leave_requests`) until the member has departed. So no world includes a member that is shutting down.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from strata.core.barriers.outcomes import outcome_payloads
from strata.core.ids import WorkerId, checked_id
from strata.core.job import JobView, World
from strata.core.kv.records import (
    BarrierFloor,
    BarrierOutcome,
    CheckpointState,
    JobPhase,
    LeaveRequest,
    Phase,
    StopAction,
    StopNotice,
    Worker,
    encode,
)
from strata.core.kv.txn import Decision, Put, Txn, unchanged
from strata.core.kv.view import Entry
from strata.core.members.newcomers import delay_s
from strata.core.members.spent import SPENT_S
from strata.core.stop.last_step import BEGIN_BARRIER, STOP_BARRIER, read_decision
from strata.core.stop.last_step import Decision as CommonStep
from strata.core.stop.notices import MAX_NAMED, Meaning, cut, meaning, meant_before, merged
from strata.errors import InvalidArgument, NotFound, Refused, StaleGeneration

DEFAULT_GRACE_MS: Final = 60_000
MAX_GRACE_MS: Final = 24 * 3600 * 1000

SCALE_MS: Final = 60_000
"""Time for the ranks to agree on a last step before a world of another size; they train on meanwhile."""
SAVE_S: Final = 3600.0
"""Time to reach and commit the agreed step. Limit: a save, with an evaluation before it, must not take longer."""
LATE_S: Final = 30.0
"""Extra time after a notice's grace, before the leader ends the generation in any case."""
LEAVE_EXPIRY_S: Final = 90.0
"""Time after the grace during which a member that was asked to leave, but is still registered, gets no place."""


def active_world(job: JobView) -> World | None:
    """Return the world if it has members and did not finish before the job was resumed."""
    world = job.world()
    return None if world is None or world.head.forming or resumed(job) else world


def resumed(job: JobView) -> bool:
    """Return whether the job was resumed, or paused, since its last head was written."""
    head, phase = job.head(), job.view.entry(job.keys.phase, JobPhase)
    return phase is not None and head is not None and phase.mod_revision > head.mod_revision


def waits_for(job: JobView) -> str:
    """Return, for people, how many members the next world of a resumed job waits for; "" if it does not wait."""
    spec = job.spec()
    if spec is None or job.phase() is not Phase.RUNNING or not resumed(job):
        return ""
    return f"{job.view.count(job.keys.workers)} of at least {spec.record.min_workers} members are here"


# -- requests to leave ------------------------------------------------------------------------


def leave_requests(job: JobView) -> tuple[LeaveRequest, ...]:
    """Return every request to leave that may still apply: the current notice's, and older ones."""
    head = job.head()
    if head is None:
        return ()
    notice = job.notice(head.record.generation)
    if notice is None or notice.record.action is StopAction.SCALE:
        return head.record.leave_requests
    request = LeaveRequest(notice=notice.record, revision=meant_before(notice), written=notice.mod_revision)
    return (*head.record.leave_requests, request)


def means(request: LeaveRequest, worker: str, incarnation: int) -> bool:
    """Return whether this incarnation of `worker` was asked to leave."""
    return meaning(request.notice, worker, came_before=incarnation < request.revision) is Meaning.LEAVE


def leave_notice(pending: Iterable[LeaveRequest], worker: str, incarnation: int) -> StopNotice | None:
    """Return the newest notice that asks this incarnation of `worker` to leave, or None."""
    found = [one for one in pending if means(one, worker, incarnation)]
    return max(found, key=lambda one: one.revision).notice if found else None


def leaving(
    pending: Iterable[LeaveRequest], workers: Iterable[Entry[Worker]], request_ages_s: Mapping[int, float]
) -> frozenset[str]:
    """Return the registered workers that get no place, because they were asked to leave.

    `request_ages_s`: how long the caller has known of each request, by the request's revision. A request expires
    `LEAVE_EXPIRY_S` after its grace: members that have not left by then train again, instead of waiting for ever.
    """
    counts = remembered(pending, request_ages_s)
    if not counts:
        return frozenset()
    return frozenset(
        worker.name
        for worker in workers
        if any(means(one, worker.name, worker.create_revision) for one in counts)
    )


def remembered(
    pending: Iterable[LeaveRequest], request_ages_s: Mapping[int, float]
) -> tuple[LeaveRequest, ...]:
    """Return the requests to leave that have not expired."""
    return tuple(
        one for one in pending if not _over(one.notice, request_ages_s.get(one.written, 0.0), LEAVE_EXPIRY_S)
    )


def _over(notice: StopNotice, since_s: float, more_s: float) -> bool:
    return since_s >= notice.grace_ms / 1000 + more_s


def revisions(job: JobView) -> set[int]:
    """Return the keys of `request_ages_s`: every revision whose age affects a plan."""
    head = job.head()
    if head is None:
        return set()
    notice = job.notice(head.record.generation)
    found = {one.written for one in head.record.leave_requests}
    if head.record.spent:
        found.add(head.mod_revision)
    if notice is not None:
        found.add(notice.mod_revision)
        if (outcome := _stop_outcome(job, head.record.generation)) is not None:
            found.add(outcome.mod_revision)
    return found | {one.revision for one in head.record.newcomers if one.revision}


def next_deadline_s(job: JobView, request_ages_s: Mapping[int, float]) -> float | None:
    """Return the seconds until the age of some request next changes the plan, or None."""
    head = job.head()
    if head is None:
        return None
    left = [
        one.notice.grace_ms / 1000 + LEAVE_EXPIRY_S - request_ages_s.get(one.written, 0.0)
        for one in head.record.leave_requests
    ]
    notice = job.notice(head.record.generation)
    if notice is not None:
        limits = time_over_s(job, notice, request_ages_s)
        left += [limits, limits + LEAVE_EXPIRY_S - LATE_S]
    left += [
        delay_s(one) - request_ages_s.get(one.revision, 0.0) for one in head.record.newcomers if one.revision
    ]
    if head.record.spent:
        left.append(SPENT_S - request_ages_s.get(head.mod_revision, 0.0))
    return min((each for each in left if each > 0), default=None)


# -- when a generation with a stop notice is over ---------------------------------------------


def takes_part(job: JobView, generation: int) -> bool:
    """Return whether the ranks of `generation` support graceful stop: all have met at the begin barrier."""
    return job.met(BEGIN_BARRIER, generation)


def common_step(job: JobView, generation: int, *, ranks: int) -> CommonStep | None:
    """Return the step that the ranks of `generation` have agreed to stop at, or None."""
    outcome = _stop_outcome(job, generation)
    return None if outcome is None else read_decision(outcome_payloads(job, outcome), ranks=ranks)


def _stop_outcome(job: JobView, generation: int) -> Entry[BarrierOutcome] | None:
    """Return the newest outcome of the stop barrier. Its key stays as long as the keys of its generation."""
    floor = job.view.record(job.keys.barrier_floor(STOP_BARRIER, generation), BarrierFloor)
    if floor is None:
        return None
    return job.view.entry(job.keys.outcome(STOP_BARRIER, generation, floor.round), BarrierOutcome)


def generation_over(
    job: JobView, notice: Entry[StopNotice], world: World, request_ages_s: Mapping[int, float]
) -> str | None:
    """Return why a generation with a notice ends although not all its ranks have stopped; None while it goes on."""
    generation, record = world.head.generation, notice.record
    if not takes_part(job, generation):
        return "its ranks had not begun"
    if record.has_deadline and not record.grace_ms:
        return "at once"
    common = common_step(job, generation, ranks=world.head.size)
    over = time_over_s(job, notice, request_ages_s) <= 0
    if common is not None and not common.save:
        # an earlier save may still commit, but a new world would abort it
        return f"without a save: {common.verdict.sentence}" if over or not _saving(job, generation) else None
    if common is not None:
        entry = job.checkpoint(common.step, generation)
        if entry is not None and entry.record.state is CheckpointState.COMMITTED:
            return f"step {common.step} is saved"
        if entry is not None and entry.record.state is CheckpointState.ABORTED:
            return f"step {common.step} could not be saved: {entry.record.reason}"
    if not over:
        return None
    return (
        "the ranks had not stopped in time" if common is None else f"step {common.step} was not saved in time"
    )


def _saving(job: JobView, generation: int) -> bool:
    return any(
        one.record.state is CheckpointState.OPEN and one.record.generation == generation
        for one in job.checkpoints()
    )


def time_over_s(job: JobView, notice: Entry[StopNotice], request_ages_s: Mapping[int, float]) -> float:
    """Return the seconds until the leader stops waiting for the ranks to stop; `request_ages_s` is as in `leaving`."""
    record = notice.record
    grace_s = record.grace_ms / 1000
    if record.has_deadline:
        return grace_s + LATE_S - request_ages_s.get(notice.mod_revision, 0.0)
    world = job.world()
    outcome = None if world is None else _stop_outcome(job, world.head.generation)
    if (
        world is None
        or outcome is None
        or common_step(job, world.head.generation, ranks=world.head.size) is None
    ):
        return grace_s - request_ages_s.get(notice.mod_revision, 0.0)
    return SAVE_S - request_ages_s.get(outcome.mod_revision, 0.0)


def act(notice: StopNotice) -> str:
    """Return, for people, the action that a notice requests."""
    alone = notice.pause and notice.action is StopAction.SCALE
    return StopAction.PAUSE.value if alone else notice.action.value


# -- the decisions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """A client's request to stop. `generation` 0 means the current one; `now`: without a save."""

    action: StopAction
    reason: str = ""
    workers: tuple[WorkerId, ...] = ()
    grace_ms: int = 0
    generation: int = 0
    now: bool = False


def decide_stop(job: JobView, request: StopRequest) -> Decision:
    """Ask the ranks of the current generation to stop; PAUSE pauses a job without ranks immediately.

    Refusals: `InvalidArgument` and `NotFound` for workers that cannot be drained, `StaleGeneration`
    if the request names another generation, `Refused` for a job that has ended.
    """
    _check(request)
    name, phase, world = job.keys.name, job.phase(), active_world(job)
    if phase in {Phase.DONE, Phase.FAILED}:
        why = f"job {name} has ended: it is {phase.value}"
        return Decision(reason=why, refusal=Refused(why, hint="there is nothing to stop"))
    head = job.head()
    current = head.record.generation if head is not None else 0
    if 0 < request.generation < current and job.notice(request.generation) is not None:
        return Decision(reason=f"generation {request.generation} had a stop request, and has ended")
    if request.generation not in {0, current}:
        why = f"the request is for generation {request.generation}; the world is {current}"
        return Decision(reason=why, refusal=StaleGeneration(why))
    if phase is Phase.PAUSED:
        return Decision(reason=f"job {name} is paused: no rank runs")
    if request.action is StopAction.PAUSE and (world is None or request.now):
        return _pause_at_once(job, request)
    if world is None:
        return Decision(reason=f"no rank of job {name} runs: there is nothing to stop")
    refusal = _undrainable(job, world, request)
    if refusal is not None:
        return Decision(reason=refusal.message, refusal=refusal)
    held = job.notice(current)
    notice = _notice(request) if held is None else merged(held, _notice(request))
    if held is not None and notice == held.record:
        return Decision(reason=f"generation {current} has a stop request already: {held.record.reason}")
    key = job.keys.notice(current)
    compares = (
        unchanged(job.keys.head, job.view.mod_revision(job.keys.head)),
        unchanged(job.keys.phase, job.view.mod_revision(job.keys.phase)),
        unchanged(key, held.mod_revision if held is not None else 0),
    )
    return Decision(
        reason=f"generation {current} has a stop request ({act(notice)}): {notice.reason}",
        txn=Txn(compares=compares, success=(Put(key=key, value=encode(notice)),)),
    )


# -- inside -----------------------------------------------------------------------------------


def _check(request: StopRequest) -> None:
    for worker in request.workers:
        checked_id("worker", worker)
    if not 0 <= request.grace_ms <= MAX_GRACE_MS:
        raise InvalidArgument(
            f"a grace of {request.grace_ms} ms", hint=f"0, for the default, to {MAX_GRACE_MS} (a day)"
        )
    if request.action is StopAction.SCALE:
        raise InvalidArgument(
            "scale is no action of a stop request", hint="ScaleJob changes the number of members"
        )
    if request.generation < 0:
        raise InvalidArgument(f"no generation {request.generation} can exist", hint="0 is the current one")
    if (request.action is StopAction.DRAIN) != bool(request.workers):
        raise InvalidArgument(
            f"{request.action.value} with {len(request.workers)} workers named",
            hint="drain names the members that leave; preempt and pause affect all members",
        )
    if len(request.workers) > MAX_NAMED:
        raise InvalidArgument(f"{len(request.workers)} workers to drain: at most {MAX_NAMED} at once")


def _notice(request: StopRequest) -> StopNotice:
    reason = request.reason or f"{request.action.value} was requested"
    pauses = request.action is StopAction.PAUSE
    return StopNotice(
        action=StopAction.SCALE if pauses else request.action,
        pause=pauses,
        reason=cut(reason),
        workers=tuple(sorted(set(request.workers))),
        grace_ms=0 if request.now else request.grace_ms or DEFAULT_GRACE_MS,
    )


def _pause_at_once(job: JobView, request: StopRequest) -> Decision:
    """Write the phase; the leader then ends the generation, if there is one."""
    keys, view = job.keys, job.view
    record = JobPhase(phase=Phase.PAUSED, reason=_notice(request).reason, attempt=job.attempt())
    compares = (
        unchanged(keys.head, view.mod_revision(keys.head)),
        unchanged(keys.phase, view.mod_revision(keys.phase)),
    )
    return Decision(
        reason=f"job {keys.name} is paused: {record.reason}",
        txn=Txn(compares=compares, success=(Put(key=keys.phase, value=encode(record)),)),
    )


def _undrainable(job: JobView, world: World, request: StopRequest) -> Refused | NotFound | None:
    for worker in request.workers:
        held = job.worker(worker)
        if held is None:
            return NotFound(
                f"no member {worker} is in job {job.keys.name}", hint="strata members lists the members"
            )
        if world.find(worker, held.create_revision) is None:  # a standby, or a newer incarnation of the name
            return Refused(
                f"{worker} stands by in job {job.keys.name}: it has no rank that could stop",
                hint="end its strata run; the world does not change",
            )
    return None
