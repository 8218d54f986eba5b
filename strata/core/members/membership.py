"""Membership: registration, hand-over, departure and removal of members, and how their ranks end (PROTOCOLS 5).

A worker key holds one `boot`: one run of one process. Its incarnation is the key's
create_revision. A hand-over (a Put of the same boot by another replica) keeps the incarnation; a
replacement (delete, then create: two transactions) never does.

    key        this boot              another boot
    ---------  ---------------------  -----------------------------------------------------
    absent     create                 -
    present    settled, or hand-over  names an incarnation      -> StaleIncarnation
                                      a newcomer, the old alive -> Conflict
                                      a newcomer, the old dead  -> delete, then create
"""

from __future__ import annotations

from strata.core.exit_codes import PREEMPTED
from strata.core.ids import InstanceId, WorkerId
from strata.core.job import JobView
from strata.core.kv.records import (
    Anew,
    JobPhase,
    Phase,
    RankDone,
    RankFailed,
    RankStopped,
    Worker,
    encode,
)
from strata.core.kv.txn import (
    Compare,
    Decision,
    Delete,
    Operation,
    Put,
    Txn,
    absent,
    created_at,
    none_in,
    refusable,
    unchanged,
)
from strata.core.kv.view import Entry
from strata.core.members.admission import NAME_IT, Admission, admit, refuse_other_command
from strata.core.members.registration import Registration, check_registration
from strata.errors import (
    Conflict,
    InvalidArgument,
    Refused,
    StaleGeneration,
    StaleIncarnation,
)

MAX_JOBS = 10_000
"""Limit per cluster: every replica holds keys of each job, and any caller that may register may create one."""
MAX_REASON_CHARS = 2000
"""Limit for the reason that a process reports: enough for a stack's last lines, not for a log."""


@refusable
def decide_register(
    job: JobView,
    registration: Registration,
    *,
    served_by: InstanceId,
    failed_incarnation: int = 0,
    max_jobs: int = MAX_JOBS,
    leaving: bool = False,
) -> Decision:
    """Make `registration.boot` the holder of its worker key, served by `served_by`.

    Creates the job with the registration's spec if the job is new. `failed_incarnation`: an incarnation whose
    transport has failed, as the caller knows; only this incarnation may be superseded. Refusals:
    - `Conflict`: another process is alive under this name. The caller lets a newcomer wait for `detect_s` before it
      reports this refusal.
    - `StaleIncarnation`, and the refusals of `core.members.admission`.
    - `Refused`: the member is `leaving` and its key is deleted, or a new job would exceed `max_jobs`. The second
      case is no `QuotaExceeded`, because waiting frees no job. Limit: the check reads the view, so jobs created at
      the same moment may exceed `max_jobs`.
    """
    check_registration(registration)
    name = registration.worker
    held = job.worker(name)
    if held is not None and held.record.boot == registration.boot:
        if held.record.served_by == served_by:
            return Decision(reason=f"{name} is registered as incarnation {held.create_revision}")
        return Decision(
            reason=f"{name} is handed over to replica instance {served_by}",
            txn=Txn(
                compares=(unchanged(held.key, held.mod_revision),),
                success=(Put(key=held.key, value=encode(_worker(registration, served_by))),),
            ),
        )
    if leaving:
        raise Refused(f"{name} has left")
    if held is not None:
        return _taken(job, registration, held, failed_incarnation)
    admission = admit(job, registration)
    if not job.exists and (count := job.view.count(job.keys.folder)) >= max_jobs:
        raise Refused(
            f"job {job.keys.name} is not created: the cluster has {count} jobs, ended ones included, the limit",
            hint="register in a job that exists, or raise coordinator.max_jobs",
        )
    return _create(job, registration, served_by, admission)


def _worker(registration: Registration, served_by: InstanceId) -> Worker:
    return Worker(
        boot=registration.boot,
        served_by=served_by,
        host=registration.host,
        slots=registration.slots,
        devices=registration.devices,
        pid=registration.pid,
        cannot_restart=registration.cannot_restart,
    )


def _taken(
    job: JobView, registration: Registration, held: Entry[Worker], failed_incarnation: int
) -> Decision:
    name, holder = registration.worker, f"{held.record.host or 'a host'}:{held.record.pid}"
    if registration.incarnation:
        raise StaleIncarnation(
            f"{name} was incarnation {registration.incarnation} and has been replaced"
            f" by {held.create_revision} ({holder})"
        )
    if failed_incarnation == held.create_revision:
        return Decision(
            reason=f"{name}: incarnation {held.create_revision} has lost its transport,"
            " and a new process replaces it",
            txn=Txn(
                compares=(unchanged(held.key, held.mod_revision),),
                success=(Delete(key=held.key),),
            ),
        )
    refuse_other_command(job, registration)
    hint = NAME_IT if registration.sole else "stop that process, or use another worker id"
    raise Conflict(f"{name} is alive elsewhere ({holder}) in job {job.keys.name}", hint=hint)


def _create(
    job: JobView, registration: Registration, served_by: InstanceId, admission: Admission
) -> Decision:
    keys, view = job.keys, job.view
    key = keys.worker(registration.worker)
    compares = [
        absent(key),
        *(unchanged(one, view.mod_revision(one)) for one in (keys.spec, keys.phase, keys.run)),
    ]
    if admission.alone:
        compares.append(none_in(keys.workers))
    puts: list[Operation] = [Put(key=key, value=encode(_worker(registration, served_by)))]
    reason = f"{registration.worker} registers with {registration.slots} slots"
    spec = job.spec()
    if spec is None:
        puts.append(Put(key=keys.spec, value=encode(registration.spec)))
        reason += f" and creates job {keys.name}"
    elif spec.record != registration.spec and admission.brings_spec:
        puts.append(Put(key=keys.spec, value=encode(registration.spec)))
        reason += "; its spec replaces the job's"
    elif spec.record != registration.spec:
        reason += "; the job's spec stays, this member's is ignored"
    if admission.run != job.run():
        puts.append(Put(key=keys.run, value=encode(admission.run)))
    if admission.taken_up:
        paused = view.record(keys.phase, JobPhase) if job.phase() is Phase.PAUSED else None
        again = JobPhase(
            phase=Phase.RUNNING if paused is None else Phase.PAUSED,
            reason=admission.taken_up if paused is None else paused.reason,
            attempt=max(registration.attempt, job.attempt()),
        )
        puts.append(Put(key=keys.phase, value=encode(again)))
        reason += f"; job {keys.name} is {admission.taken_up}"
    if admission.anew:
        # this transaction compares the phase, and so does every transaction of the leader that writes a world
        head = job.head()
        generation = head.record.generation if head is not None else 0
        compares.append(unchanged(keys.head, view.mod_revision(keys.head)))
        puts += [Put(key=keys.anew, value=encode(Anew(generation=generation)))]
        puts += [Delete(key=keys.latest), Delete(key=keys.rewind)]
        reason += f" from nothing: the checkpoints of its {generation} generations are given up"
    return Decision(reason=reason, txn=Txn(compares=tuple(compares), success=tuple(puts)))


def decide_leave(job: JobView, worker: WorkerId, incarnation: int) -> Decision:
    """Delete the key of this incarnation: the process departs for good.

    If the member is in the world, its leave ends the generation, unless `decide_rank_exit` has already recorded
    code 0 for each of the member's ranks.
    """
    held = job.worker(worker)
    if held is None or held.create_revision != incarnation:
        return Decision(reason=f"{worker}, incarnation {incarnation}, is not registered (any more)")
    return Decision(
        reason=f"{worker}, incarnation {incarnation}, leaves",
        txn=Txn(compares=(created_at(held.key, incarnation),), success=(Delete(key=held.key),)),
    )


def decide_remove(job: JobView, worker: WorkerId, *, mod_revision: int, reason: str) -> Decision:
    """Delete the key of a dead member, unless the key was written since `mod_revision`.

    A hand-over writes the key. So a member that has reconnected to another replica is never removed.
    """
    held = job.worker(worker)
    if held is None or held.mod_revision != mod_revision:
        return Decision(reason=f"{worker} was removed or handed over meanwhile")
    return Decision(
        reason=f"{worker}, incarnation {held.create_revision}, is removed: {reason}",
        txn=Txn(compares=(unchanged(held.key, mod_revision),), success=(Delete(key=held.key),)),
    )


@refusable
def decide_rank_exit(
    job: JobView,
    worker: WorkerId,
    incarnation: int,
    generation: int,
    rank: int,
    code: int,
    reason: str = "",
    *,
    early: bool = False,
) -> Decision:
    """Record that `rank` ended: as done for code 0, else as failed or stopped. The first report counts.

    `early`: the rank's process failed by itself within its first seconds, before it reported a step.

    If a notice with a deadline asks the generation to stop, a rank that exits with code 75 counts as stopped. After
    the first rank has stopped, every further exit counts as stopped: the first exit breaks the collectives of the
    other ranks, and the agents then end these ranks. A rank that fails before any rank has stopped counts as
    failed. A rank that exits during a SCALE also counts as failed, because a SCALE asks no rank to exit.

    Refusals: `StaleGeneration` for a world that has ended, `StaleIncarnation` for a replaced
    member, `Refused` for a rank that this member does not run.
    """
    keys = job.keys
    if rank < 0 or generation < 0:
        raise InvalidArgument(f"no rank {rank} of generation {generation} can exist")
    ends = {
        "failed": keys.failed_rank(generation, rank),
        "done": keys.done_rank(generation, rank),
        "stopped": keys.stopped_rank(generation, rank),
    }
    who = f"rank {rank} of generation {generation} ({worker})"
    for how, key in ends.items():
        if job.view.get(key) is not None:
            return Decision(reason=f"{who} is recorded as {how}")
    head = job.head()
    if head is None or head.record.generation < generation:
        raise Refused(f"job {keys.name} has no generation {generation} yet")
    if head.record.generation > generation:
        raise StaleGeneration(f"generation {generation} has ended; the world is {head.record.generation}")
    held = job.worker(worker)
    if held is None:
        return Decision(reason=f"{worker} is not registered any more: its removal covers the exit")
    if held.create_revision != incarnation:
        raise StaleIncarnation(f"{worker} is incarnation {held.create_revision} now, not {incarnation}")
    world = job.world()
    member = world.find(worker, incarnation) if world is not None else None
    if member is None or rank not in member.ranks:
        raise Refused(f"{worker} does not run rank {rank} in generation {generation}")
    compares: tuple[Compare, ...] = (
        created_at(held.key, incarnation),
        unchanged(head.key, head.mod_revision),  # while the head stays, its members' chunks never change
        *map(absent, ends.values()),
    )
    put: Put
    notice = job.notice(
        generation
    )  # no compare: the notice and the stopped keys stay as long as the head, which is compared
    if code == 0:
        how, put = "is done", Put(key=ends["done"], value=encode(RankDone(worker=worker)))
    elif notice is not None and notice.record.has_deadline and (code == PREEMPTED or job.stopped(generation)):
        how = "stopped as requested"
        if code != PREEMPTED:
            how += f", though it ended with {reason or describe_exit(code)}"[:MAX_REASON_CHARS]
        put = Put(key=ends["stopped"], value=encode(RankStopped(worker=worker)))
    else:
        if code == PREEMPTED:
            compares = (*compares, unchanged(keys.notice(generation), notice.mod_revision if notice else 0))
        record = RankFailed(
            reason=(reason or describe_exit(code))[:MAX_REASON_CHARS], worker=worker, code=code, early=early
        )
        how, put = f"failed: {record.reason}", Put(key=ends["failed"], value=encode(record))
    return Decision(reason=f"{who} {how}", txn=Txn(compares=compares, success=(put,)))


def describe_exit(code: int) -> str:
    """Return an exit code as a sentence; a negative code is minus the signal that ended the process."""
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
