"""Ranks are asked to stop together, members to leave, jobs to pause and to go on.

A *notice* asks the ranks of one generation to agree on a step, to save it and to stop there; how
they do that is theirs (`core.agreement`). It is created once, by any replica, and only ever made
wider or more urgent (`merged`). A rank that then ends with code 75 has stopped and not failed.

    action   who leaves                 when all who shall stop have ended
    -------  -------------------------  ------------------------------------------------
    PREEMPT  every member               a forming world; the job goes on with newcomers
    PAUSE    nobody                     a forming world, and phase PAUSED until resumed
    DRAIN    the members that it names  a world of the others

Who was asked to leave gets no place any more, in this generation's successors either: the heads
carry that on (`WorldHead.asked`) until they are gone. So nobody is placed while it packs up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from strata.core import reshaping
from strata.core.ids import WorkerId, checked_id
from strata.core.job import JobView, World
from strata.core.records import (
    Asked,
    JobPhase,
    Phase,
    StopAction,
    StopNotice,
    Worker,
    encode,
)
from strata.core.spent import SPENT_S
from strata.core.txn import Decision, Put, Txn, unchanged
from strata.core.view import Entry
from strata.errors import InvalidArgument, NotFound, Refused, StaleGeneration

DEFAULT_GRACE_MS: Final = 60_000
MAX_GRACE_MS: Final = 24 * 3600 * 1000
MAX_NAMED: Final = 100
"""How many members one notice may drain: heads carry their names."""
MAX_REASON_CHARS: Final = 500

LATE_S: Final = 30.0
"""How long after its grace a notice is waited for. Then the leader ends the generation anyway."""
GONE_S: Final = 90.0
"""How long after that grace those who were asked to leave are given no place, if they stay."""


def active_world(job: JobView) -> World | None:
    """Return the world, if it has members and is not one that finished before the job was resumed."""
    world = job.world()
    return None if world is None or world.head.forming or resumed(job) else world


def resumed(job: JobView) -> bool:
    """Tell whether somebody took the job up again, or paused it, since its last head was written."""
    head, phase = job.head(), job.view.entry(job.keys.phase, JobPhase)
    return phase is not None and head is not None and phase.mod_revision > head.mod_revision


def waits_for(job: JobView) -> str:
    """Return, for people, whom the next world of a job waits for that was taken up again; "" where that is not so."""
    spec = job.spec()
    if spec is None or job.phase() is not Phase.RUNNING or not resumed(job):
        return ""
    return f"{job.view.count(job.keys.workers)} of at least {spec.record.min_workers} members are here"


# -- who was asked to leave -------------------------------------------------------------------


def all_asked(job: JobView) -> tuple[Asked, ...]:
    """Return every request to leave that may still mean somebody: the notice's, and older ones."""
    head = job.head()
    if head is None:
        return ()
    notice = job.notice(head.record.generation)
    if notice is None or notice.record.action is StopAction.PAUSE:
        return head.record.asked
    asked = Asked(notice=notice.record, revision=meant_before(notice), written=notice.mod_revision)
    return (*head.record.asked, asked)


def meant_before(notice: Entry[StopNotice]) -> int:
    """Return the revision before which a member must have come to be meant by this notice."""
    return notice.record.since or notice.mod_revision


def means(asked: Asked, worker: str, incarnation: int) -> bool:
    """Tell whether this incarnation of `worker` was asked to leave."""
    names = asked.notice.workers
    return incarnation < asked.revision and (not names or worker in names)


def asked_notice(asked: Iterable[Asked], worker: str, incarnation: int) -> StopNotice | None:
    """Return the newest notice that asks this incarnation of `worker` to leave, or None."""
    found = [one for one in asked if means(one, worker, incarnation)]
    return max(found, key=lambda one: one.revision).notice if found else None


def leaving(
    asked: Iterable[Asked], workers: Iterable[Entry[Worker]], asked_s: Mapping[int, float]
) -> frozenset[str]:
    """Return the registered workers that get no place, because they were asked to leave.

    `asked_s`: for how long the caller has known of each request, by its revision. One whose members
    stay in spite of it is forgotten in the end: better that they train than that they wait for ever.
    """
    counts = remembered(asked, asked_s)
    if not counts:
        return frozenset()
    return frozenset(
        worker.name
        for worker in workers
        if any(means(one, worker.name, worker.create_revision) for one in counts)
    )


def remembered(asked: Iterable[Asked], asked_s: Mapping[int, float]) -> tuple[Asked, ...]:
    """Return the requests to leave that still count."""
    return tuple(one for one in asked if not _over(one.notice, asked_s.get(one.written, 0.0), GONE_S))


def is_late(notice: Entry[StopNotice], asked_s: Mapping[int, float]) -> bool:
    """Tell whether the ranks had all the time that a notice gave them, and `LATE_S`."""
    return _over(notice.record, asked_s.get(notice.mod_revision, 0.0), LATE_S)


def _over(notice: StopNotice, since_s: float, more_s: float) -> bool:
    return since_s >= notice.grace_ms / 1000 + more_s


def revisions(job: JobView) -> set[int]:
    """Return what `asked_s` is about: the revision of everything whose age matters."""
    head = job.head()
    if head is None:
        return set()
    notice = job.notice(head.record.generation)
    found = {one.written for one in head.record.asked}
    if head.record.spent:
        found.add(head.mod_revision)
    if notice is not None:
        found.add(notice.mod_revision)
    reshape = job.reshape(head.record.generation)
    return found if reshape is None else found | {reshape.create_revision}


def next_deadline_s(job: JobView, asked_s: Mapping[int, float]) -> float | None:
    """Return in how many seconds the age of some request changes what is to be done, or None."""
    head = job.head()
    if head is None:
        return None
    requests = [(one.notice, one.written) for one in head.record.asked]
    notice = job.notice(head.record.generation)
    if notice is not None:
        requests.append((notice.record, notice.mod_revision))
    left = [
        request.grace_ms / 1000 + more_s - asked_s.get(revision, 0.0)
        for request, revision in requests
        for more_s in (LATE_S, GONE_S)
    ]
    reshape = job.reshape(head.record.generation)
    if reshape is not None:
        left.append(reshaping.deadline_s(reshape.record) - asked_s.get(reshape.create_revision, 0.0))
    if head.record.spent:
        left.append(SPENT_S - asked_s.get(head.mod_revision, 0.0))
    return min((each for each in left if each > 0), default=None)


# -- the decisions ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequest:
    """What somebody asks for. `generation` 0 means the current one, `now`: without a save."""

    action: StopAction
    reason: str = ""
    workers: tuple[WorkerId, ...] = ()
    grace_ms: int = 0
    generation: int = 0
    now: bool = False


def decide_stop(job: JobView, request: StopRequest) -> Decision:
    """Ask the ranks of the current generation to stop; PAUSE pauses a job without ranks at once.

    Refusals: `InvalidArgument` and `NotFound` for workers that cannot be drained, `StaleGeneration`
    when another generation was meant, `Refused` for a job that has ended.
    """
    _check(request)
    name, phase, world = job.keys.name, job.phase(), active_world(job)
    if phase in {Phase.DONE, Phase.FAILED}:
        why = f"job {name} has ended: it is {phase.value}"
        return Decision(reason=why, refusal=Refused(why, hint="there is nothing to stop"))
    head = job.head()
    current = head.record.generation if head is not None else 0
    if 0 < request.generation < current and job.notice(request.generation) is not None:
        return Decision(reason=f"generation {request.generation} was asked to stop, and has ended")
    if request.generation not in {0, current}:
        why = f"generation {request.generation} was to stop; the world is {current}"
        return Decision(reason=why, refusal=StaleGeneration(why))
    if phase is Phase.PAUSED:
        return Decision(reason=f"job {name} is paused: no rank runs")
    if request.action is StopAction.PAUSE and (world is None or request.now):
        return _pause_at_once(job, request)
    if world is None:
        return Decision(reason=f"no rank of job {name} runs: there is nobody to ask")
    refusal = _undrainable(job, world, request)
    if refusal is not None:
        return Decision(reason=refusal.message, refusal=refusal)
    held = job.notice(current)
    notice = _notice(request) if held is None else merged(held, _notice(request))
    if held is not None and notice == held.record:
        return Decision(reason=f"generation {current} is asked to stop already: {held.record.reason}")
    key = job.keys.notice(current)
    compares = (
        unchanged(job.keys.head, job.view.mod_revision(job.keys.head)),
        unchanged(job.keys.phase, job.view.mod_revision(job.keys.phase)),
        unchanged(key, held.mod_revision if held is not None else 0),
    )
    return Decision(
        reason=f"generation {current} is asked to stop ({notice.action.value}): {notice.reason}",
        txn=Txn(compares=compares, success=(Put(key=key, value=encode(notice)),)),
    )


def merged(held: Entry[StopNotice], asked: StopNotice) -> StopNotice:
    """Return the one notice that says what both ask for; the held one when that covers it.

        held              asked    what holds
        ----------------  -------  ----------------------------------------------------------------
        DRAIN             DRAIN    a DRAIN of both's members, if that are not too many for one
        DRAIN, PREEMPT    PREEMPT  a PREEMPT: it means all who are here by now
        PREEMPT           DRAIN    the held one: who is drained leaves with all
        PAUSE             others   the other one, and the job is paused when that is done (`pause`)
        DRAIN, PREEMPT    PAUSE    the held one, and `pause`

    The shorter time of both holds, and a `pause` stays. `since` keeps whom the held one means: who comes
    back under a name that was drained is a newcomer, whatever is added after that.
    """
    record = held.record
    grace_ms, pause = min(record.grace_ms, asked.grace_ms), record.pause
    if record.action is not asked.action and StopAction.PAUSE in {record.action, asked.action}:
        pause = True
        if record.action is StopAction.PAUSE:
            return replace(asked, grace_ms=grace_ms, pause=True)
    if asked.action is StopAction.PREEMPT and record.action is StopAction.DRAIN:
        return replace(asked, grace_ms=grace_ms, pause=pause)
    names, reason = record.workers, record.reason
    if asked.action is record.action is StopAction.DRAIN and not set(asked.workers) <= set(names):
        names = tuple(sorted({*names, *asked.workers}))
        if len(names) > MAX_NAMED:
            return record
        reason = reason if asked.reason in reason else _cut(f"{reason}; {asked.reason}")
    wider = replace(record, grace_ms=grace_ms, workers=names, reason=reason, pause=pause)
    return record if wider == record else replace(wider, since=meant_before(held))


# -- inside -----------------------------------------------------------------------------------


def _check(request: StopRequest) -> None:
    for worker in request.workers:
        checked_id("worker", worker)
    if not 0 <= request.grace_ms <= MAX_GRACE_MS:
        raise InvalidArgument(
            f"a grace of {request.grace_ms} ms", hint=f"0, for the default, to {MAX_GRACE_MS} (a day)"
        )
    if request.generation < 0:
        raise InvalidArgument(f"no generation {request.generation} can exist", hint="0 is the current one")
    if (request.action is StopAction.DRAIN) != bool(request.workers):
        raise InvalidArgument(
            f"{request.action.value} with {len(request.workers)} workers named",
            hint="to drain names those who leave; to preempt or to pause means all",
        )
    if len(request.workers) > MAX_NAMED:
        raise InvalidArgument(f"{len(request.workers)} workers to drain: at most {MAX_NAMED} at once")


def _notice(request: StopRequest) -> StopNotice:
    reason = request.reason or f"{request.action.value} was asked for"
    return StopNotice(
        action=request.action,
        reason=_cut(reason),
        workers=tuple(sorted(set(request.workers))),
        grace_ms=0 if request.now else request.grace_ms or DEFAULT_GRACE_MS,
    )


def _cut(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else reason[: MAX_REASON_CHARS - 1] + "…"


def _pause_at_once(job: JobView, request: StopRequest) -> Decision:
    """Write the phase; the leader ends the generation, if there is one, when it sees that."""
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
            return NotFound(f"no member {worker} is in job {job.keys.name}", hint="strata members shows them")
        if world.find(worker, held.create_revision) is None:  # it, or the one that came in its place
            return Refused(
                f"{worker} stands by in job {job.keys.name}: it has no rank that could stop",
                hint="end its strata run, which nobody will notice",
            )
    return None
