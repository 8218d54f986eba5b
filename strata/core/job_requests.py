"""Client requests for a job as a whole: scale, resume and delete.

Stop requests are in `core.stop.requests`. Any replica may write these requests, in a transaction that compares the
keys that it read. The leader finds them in the view and acts on them.
"""

from __future__ import annotations

import dataclasses

from strata.core.checkpoints.deletion import fork_reference
from strata.core.checkpoints.fork import forks_of
from strata.core.job import JobView
from strata.core.kv.records import JobPhase, Phase, encode
from strata.core.kv.txn import (
    Decision,
    Delete,
    Put,
    Txn,
    delete_prefix,
    none_in,
    none_newer_in,
    refusable,
    unchanged,
)
from strata.core.members.registration import check_spec
from strata.core.stop.requests import active_world
from strata.errors import NotFound, Refused


@refusable
def decide_resume(job: JobView) -> Decision:
    """Let a paused job train again. `Refused`: the job has ended, or is still being paused."""
    name, phase = job.keys.name, job.view.entry(job.keys.phase, JobPhase)
    now = phase.record.phase if phase is not None else Phase.RUNNING
    if now in {Phase.DONE, Phase.FAILED}:
        raise Refused(f"job {name} is {now.value}, not paused", hint="resume it with strata run --resume")
    if phase is None or now is Phase.RUNNING:
        head = job.head()
        notice = job.notice(head.record.generation) if head is not None else None
        if notice is not None and notice.record.pause and active_world(job) is not None:
            raise Refused(
                f"job {name} is being paused: its ranks save and stop",
                hint="resume it once its phase is paused",
            )
        return Decision(reason=f"job {name} is running")
    again = JobPhase(phase=Phase.RUNNING, reason="resumed", attempt=job.attempt())
    put = Put(key=job.keys.phase, value=encode(again))
    txn = Txn(compares=(unchanged(phase.key, phase.mod_revision),), success=(put,))
    return Decision(reason=f"job {name} is resumed", txn=txn)


@refusable
def decide_scale(job: JobView, *, min_workers: int = 0, max_workers: int = 0) -> Decision:
    """Change how many members the job needs and accepts; 0 leaves a limit unchanged.

    Limit: a retry whose first try took effect may find a later change by another client. The retry replaces that
    change, as if the two requests had been concurrent.
    """
    spec = job.spec()
    if spec is None:
        raise NotFound(f"no job {job.keys.name} exists", hint="a job begins with its first member")
    before = spec.record
    requested = dataclasses.replace(
        before,
        min_workers=min_workers or before.min_workers,
        max_workers=max_workers or before.max_workers,
    )
    check_spec(requested)
    limits = f"{requested.min_workers} to {requested.max_workers} members"
    if requested == before:
        return Decision(reason=f"job {job.keys.name} takes {limits}")
    return Decision(
        reason=f"job {job.keys.name} now takes {limits}",
        txn=Txn(
            compares=(unchanged(spec.key, spec.mod_revision),),
            success=(Put(key=spec.key, value=encode(requested)),),
        ),
    )


@refusable
def decide_delete(job: JobView) -> Decision:
    """Delete a job: all its keys, in one transaction. The files of its checkpoints stay where they are.

    A later job of the same name is a different job: its first registration finds no spec. Writes still in
    flight for the old job compare the head, the spec or a member, and therefore fail.
    `Refused` while it has members, pinned checkpoints, or other jobs' forks.
    """
    keys, view, name = job.keys, job.view, job.keys.name
    if not job.exists and job.latest() is None:
        return Decision(reason=f"no job {name} exists (any more)")
    workers, pins = view.names(keys.workers), view.names(keys.pins)
    if workers:
        raise Refused(
            f"job {name} has {len(workers)} members: {', '.join(workers[:4])}",
            hint="end their strata run first: strata jobs preempt makes all of them leave",
        )
    if pins:
        raise Refused(
            f"job {name} has pinned checkpoints, of step {', '.join(str(int(pin)) for pin in pins[:4])}",
            hint="unpin them first",
        )
    if forks := forks_of(job):
        raise Refused(
            f"job {', '.join(forks[:4])} was forked from job {name}, and uses its bytes",
            hint="delete that job, or the checkpoint that it began from",
        )
    read = (keys.spec, keys.head, keys.phase, keys.latest)
    compares = (
        *(unchanged(key, view.mod_revision(key)) for key in read),
        none_in(keys.workers),
        none_in(keys.pins),
        none_newer_in(keys.checkpoints, view.revision),  # no other job has been forked from it since the view
    )
    sources = (
        Delete(key=fork_reference(job, entry.record))
        for entry in job.checkpoints()
        if entry.record.origin is not None
    )
    return Decision(
        reason=f"job {name} is deleted",
        txn=Txn(compares=compares, success=(delete_prefix(keys.root), *sources)),
    )
