"""Invariants of the keyspace: rules that must hold in every view; a violation is reported as a sentence.

Unit tests, the simulation, and every replica (on its own view) check these rules. A violation is a bug of Strata,
of etcd or of the link to it, or the result of a manual write to the keyspace. No rule compares views over time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from strata.core.checkpoints.deletion import fork_reference
from strata.core.checkpoints.references import Reference, Tag
from strata.core.checkpoints.tiers import present_on, tiers_of
from strata.core.datasets.ring import bound
from strata.core.job import JobView, World, job_names
from strata.core.kv.keys import ClusterKeys
from strata.core.kv.records import (
    Assignment,
    BarrierFloor,
    BarrierOutcome,
    BarrierResult,
    CheckpointRecord,
    CheckpointState,
    DatasetSpec,
    JobPhase,
    Leader,
    Phase,
    PoisonRecord,
    Standbys,
    StopAction,
    TierState,
)
from strata.core.kv.view import View
from strata.core.stop.requests import means

_GOING = frozenset({TierState.DELETING, TierState.REMOVED})
_LATEST_STATES = {CheckpointState.COMMITTED, CheckpointState.CORRUPT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One violated rule. `key`: the key, or the folder of keys, to which the rule applies."""

    job: str
    key: str
    says: str


def check(view: View, keys: ClusterKeys) -> list[str]:
    """Return the violations in the keyspace, in words; empty if there are none."""
    return [f"job {v.job}: {v.says}" for name in job_names(view, keys) for v in check_job(view, keys, name)]


def check_job(view: View, keys: ClusterKeys, name: str) -> list[Violation]:
    """Return the violations in one job."""
    job = JobView(view, keys.job(name))
    of = job.keys
    rules: tuple[tuple[str, Callable[[JobView], Iterable[str]]], ...] = (
        (of.worlds, _worlds),
        (of.worlds, _ends),
        (of.worlds, _notices),
        (of.root, _history),
        (of.barriers, _barriers),
        (of.latest, _latest),
        (of.checkpoints, _catalog),
        (of.root, _rewind_and_tags),
        (of.datasets, _datasets),
        (of.root, lambda job: _epochs(job, keys)),
    )
    found: list[Violation] = []
    for key, rule in rules:
        try:
            found += [Violation(job=name, key=key, says=problem) for problem in rule(job)]
        except PoisonRecord as error:
            found.append(Violation(job=name, key=key, says=error.message))
        except ValueError:  # a key's name is not the number that it should be
            found.append(Violation(job=name, key=key, says="the name of a key there is not valid"))
    return found


# -- worlds -----------------------------------------------------------------------------------


def _worlds(job: JobView) -> Iterator[str]:
    """The head's members and their chunks exist, and match the head."""
    world = job.world_as_written()
    if world is None:
        for name in job.view.names(job.keys.worlds):
            for ended in ("done", "failed", "stopped", "held", "notice", "restored"):
                if ended in job.view.names(job.keys.generation(int(name))):
                    yield f"generation {name} has {ended} keys, and there is no head"
        return
    head = world.head
    yield from _members(world)
    folder = job.keys.members(head.generation, head.epoch)
    chunks = len(job.view.names(folder))
    if chunks != head.chunks:
        yield f"generation {head.generation} has {chunks} chunks, its head says {head.chunks}"
    newest = max(map(int, job.view.names(job.keys.worlds)), default=0)
    if newest > head.generation + 1:
        yield f"generation {newest} has keys, and the head is {head.generation}"
    step = job.restored(head.generation)
    expected = head.restore.step if head.restore is not None else None
    if step != expected:
        yield f"generation {head.generation} restored {step}, its head says {expected}"
    if head.forming and head.restore is not None:
        yield f"generation {head.generation} is forming and restores"


def _members(world: World) -> Iterator[str]:
    head, members = world.head, world.members
    if len(members) != head.members:
        yield f"generation {head.generation} has {len(members)} members, not {head.members}"
    if sum(member.slots for member in members) != head.size:
        yield f"generation {head.generation} has not {head.size} ranks"
    first_rank = 0
    for index, member in enumerate(members):
        if (member.group_rank, member.first_rank) != (index, first_rank):
            yield f"generation {head.generation}: {member.worker} is out of place"
        first_rank += member.slots
    if len({member.worker for member in members}) != len(members):
        yield f"generation {head.generation} has a member twice"


def _ends(job: JobView) -> Iterator[str]:
    """A rank ends in one way only, and its number is below the world's size; DONE means that all ranks are done."""
    world = job.world_as_written()
    if world is None:
        return
    generation, size = world.head.generation, world.head.size
    done, failed, stopped = job.done(generation), job.failed(generation), job.stopped(generation)
    if both := (done & failed.keys()) | (stopped & (done | failed.keys())):
        yield f"generation {generation}: ranks {sorted(both)} ended in two ways"
    if outside := {rank for rank in done | failed.keys() | stopped if rank >= size}:
        yield f"generation {generation}: ranks {sorted(outside)} ended, of {size}"
    if stopped and job.notice(generation) is None:
        yield f"generation {generation}: ranks {sorted(stopped)} stopped without a stop request"
    if job.phase() is Phase.DONE and len(done) != size:
        yield f"the job is done with {len(done)} of {size} ranks"
    standbys = job.view.record(job.keys.standbys, Standbys)
    waiting = set(standbys.workers) if standbys is not None else set()
    alive = {
        member.worker
        for member in world.members
        if (worker := job.worker(member.worker)) is not None and worker.create_revision == member.incarnation
    }
    if inside := waiting & alive:
        yield f"members {sorted(inside)} of the world stand by"


def _notices(job: JobView) -> Iterator[str]:
    """A member that was asked to leave has no place in a world; a forming world has no notice."""
    world = job.world_as_written()
    if world is None:
        return
    head = world.head
    notice = job.notice(head.generation)
    if notice is not None and head.forming:
        yield f"generation {head.generation} is forming and has a stop request"
    if notice is not None:
        if notice.record.action is StopAction.PAUSE:
            yield f"generation {head.generation} has a notice with the action pause, which no notice may have"
        named = set(notice.record.workers)
        if strangers := named - {member.worker for member in world.members}:
            yield f"generation {head.generation} has to drain {sorted(strangers)}, which are not in it"
    spent = {(one.worker, one.incarnation) for one in head.spent}
    if placed := [m.worker for m in world.members if (m.worker, m.incarnation) in spent]:
        yield f"generation {head.generation} has a place for {placed[:4]}, which cannot restart"
    for requested in head.leave_requests:
        if requested.notice.action is StopAction.SCALE:
            yield f"generation {head.generation} has a request to leave by a notice with the action scale"
        placed = [m.worker for m in world.members if means(requested, m.worker, m.incarnation)]
        if placed:
            yield f"generation {head.generation} has a place for {placed[:4]}, which have a request to leave"


def _history(job: JobView) -> Iterator[str]:
    """The history ends with the head, and matches it; a job whose world has members has a spec."""
    head, entries = job.head(), job.history()
    if head is not None and not head.record.forming and job.spec() is None:
        yield "it has a world and no spec"
    current = job.generation()
    for entry in entries:
        if int(entry.name) > current:
            yield f"generation {entry.name} has a history, and the head is {current}"
    if head is None or not entries or int(entries[-1].name) != current:
        return
    recorded, record = entries[-1].record, head.record
    if (recorded.members, recorded.size, recorded.reason, recorded.epoch, recorded.restore) != (
        record.members, record.size, record.reason, record.epoch, record.restore,
    ):  # fmt: skip
        yield f"the history of generation {current} differs from its head"


# -- barriers ---------------------------------------------------------------------------------


def _barriers(job: JobView) -> Iterator[str]:
    """The floor is the highest released round, and no key exists of a round below the floor."""
    view, keys, current = job.view, job.keys, job.generation()
    for name in view.names(keys.barriers):
        for generation in map(int, view.names(keys.barrier_name(name))):
            what = f"barrier {name}/{generation}"
            if generation > current:
                yield f"{what} is of a generation that does not exist"
            record = view.record(keys.barrier_floor(name, generation), BarrierFloor)
            floor = record.round if record is not None else 0
            rounds = view.names(keys.barrier_generation(name, generation))
            for round_ in (int(text) for text in rounds if text != "floor"):
                outcome = view.entry(keys.outcome(name, generation, round_), BarrierOutcome)
                if round_ < floor:
                    yield f"{what}: round {round_} lies below the floor {floor}"
                if outcome is None:
                    continue
                released = outcome.record.result is BarrierResult.RELEASED
                if released and round_ != floor:
                    yield f"{what}: round {round_} was released, and the floor is {floor}"
                if (outcome.record.generation, outcome.record.round) != (generation, round_):
                    yield f"{what}: round {round_} holds the outcome of another"
                if released and outcome.record.missing:
                    yield f"{what}: round {round_} was released without all"
            if floor and view.get(keys.outcome(name, generation, floor)) is None:
                yield f"{what}: the floor is {floor}, and that round has no outcome"


# -- checkpoints ------------------------------------------------------------------------------


def _latest(job: JobView) -> Iterator[str]:
    """`latest` names a COMMITTED or CORRUPT record, and an existing generation whose restore point it matches."""
    latest, head = job.latest(), job.head()
    if latest is None:
        return
    record = latest.record
    where = f"latest ({record.generation}, {record.step})"
    checkpoint = job.checkpoint(record.step, record.record_generation)
    if checkpoint is None:
        yield f"{where} refers to no record"
    elif checkpoint.record.attempt != record.attempt:
        yield f"{where} refers to attempt {record.attempt}, which is not the record's"
    elif checkpoint.record.state not in _LATEST_STATES:
        yield f"{where} refers to a record that is {checkpoint.record.state.value}"
    if record.record_generation > record.generation:
        yield f"{where} counts under a generation before its record's"
    if record.generation == 0:  # a fork whose first world has not begun
        if head is not None and not head.record.forming:
            yield f"{where} is a fork's, and generation {head.record.generation} did not begin from it"
        return
    if head is None or record.generation > head.record.generation:
        yield f"{where} is of a generation that does not exist"
        return
    restore = head.record.restore
    if (
        record.generation == head.record.generation
        and record.record_generation != record.generation
        and (restore is None or (restore.step, restore.attempt) != (record.step, record.attempt))
    ):
        yield f"{where} differs from the restore point of generation {record.generation}"


def _catalog(job: JobView) -> Iterator[str]:
    """A record's key matches its step and its existing generation; each state has the acks or digests it needs."""
    current = job.generation()
    for entry in job.checkpoints():
        record = entry.record
        what = f"checkpoint ({record.step}, {record.generation})"
        if entry.key != job.keys.checkpoint(record.step, record.generation):
            yield f"{what} lies at {entry.key}"
        if record.generation > current and record.state is not CheckpointState.PREPARED:
            yield f"{what} is of a generation that does not exist"
        if record.state is CheckpointState.COMMITTED and not record.manifest_digest:
            yield f"{what} is committed without a manifest's digest"
        if record.state is CheckpointState.COMMITTED and not present_on(record):
            yield f"{what} is committed and on no tier"
        if (
            record.state is CheckpointState.ABORTED
            and all(tier.shared for tier in record.tiers.values())
            and job.view.names(job.keys.acks(*record.where))
        ):
            yield f"{what} was given up and has acks"
        if (record.origin is not None) != (record.generation == 0):
            yield f"{what} has {'an' if record.origin else 'no'} origin"
        if record.origin is not None and job.view.get(fork_reference(job, record)) is None:
            yield f"{what} is a fork without a reference to its source"
        yield from _uses(job, record, what)


def _uses(job: JobView, record: CheckpointRecord, what: str) -> Iterator[str]:
    """No record in use is in deletion; every reference belongs to an existing record."""
    users = [e.record for e in job.view.entries(job.keys.refs(*record.where), Reference) if not e.record.job]
    attempts = set(job.view.names(job.keys.refs(*record.where)))
    for user in users:
        entry = job.checkpoint(user.step, user.generation)
        if entry is None or entry.record.attempt not in attempts:
            yield f"{what} is referenced by ({user.step}, {user.generation}), which is not there"
        elif lost := _removed_from(record, entry.record):
            yield f"{what} is referenced by ({user.step}, {user.generation}) and is being deleted from {lost}"
    tags = job.view.names(job.keys.tags_of(*record.where))
    for tag in tags:
        named = job.view.record(job.keys.tag(tag), Tag)
        if named is None or named.where != record.where:
            yield f"{what} has the tag {tag}, which names another"
    if record.state is CheckpointState.DELETING:
        pinned = job.view.get(job.keys.pin(record.step, record.attempt)) is not None
        for kind, needed in (("references", attempts), ("tags", tags), ("a pin", pinned)):
            if needed:
                yield f"{what} is being deleted and has {kind}"


def _removed_from(used: CheckpointRecord, user: CheckpointRecord) -> str:
    """Return the first tier on which `user` is readable but `used` is removed, or ""."""
    tiers = tiers_of(used)
    return next((name for name in present_on(user) if name in tiers and tiers[name].state in _GOING), "")


def _rewind_and_tags(job: JobView) -> Iterator[str]:
    """A job with a rewind has a world; every tag names a checkpoint that has the tag."""
    rewind = job.rewind()
    head = job.head()
    if rewind is not None and head is None:
        yield "the job has a rewind and no world"
    if rewind is not None and head is not None and not head.record.forming:
        begun, step = head.record.generation, rewind.record.step
        if head.mod_revision > rewind.mod_revision:
            yield f"the job has a rewind to step {step}, and generation {begun} has begun since"
    for entry in job.view.entries(job.keys.tags, Tag):
        record = entry.record
        if job.view.get(job.keys.tags_of(*record.where) + entry.name) is None:
            yield f"the tag {entry.name} names a checkpoint that does not have it"


# -- datasets ---------------------------------------------------------------------------------


def _datasets(job: JobView) -> Iterator[str]:
    """An assignment matches its dataset and a world, and its loads are bounded."""
    current, world = job.generation(), job.world_as_written()
    for name in job.view.names(job.keys.datasets):
        spec = job.view.record(job.keys.dataset_spec(name), DatasetSpec)
        assignment = job.view.record(job.keys.assignment(name), Assignment)
        if assignment is None:
            continue
        if spec is None or spec.shards != assignment.shards:
            yield f"dataset {name} is assigned with {assignment.shards} shards, its spec differs"
        if assignment.generation > current:
            yield f"dataset {name} is assigned in a generation that does not exist"
        members = {member.worker for member in world.members} if world is not None else set()
        if assignment.generation == current and not set(assignment.workers) <= members:
            yield f"dataset {name} is assigned to workers outside the world"
        moved = [shard for taken in assignment.moved.values() for shard in taken]
        if len(set(moved)) != len(moved) or not set(moved) <= set(range(assignment.shards)):
            yield f"dataset {name} moves a shard twice, or an unknown shard"
        seats = [assignment.seats.get(worker, worker) for worker in assignment.workers]
        if len(set(seats)) != len(seats) or not assignment.seats.keys() <= set(assignment.workers):
            yield f"dataset {name} has two workers in one seat, or a seat for an unknown worker"
        if not assignment.moved.keys() <= set(assignment.workers):
            yield f"dataset {name} moves shards to workers that it is not assigned to"
        most = bound(len(assignment.workers), assignment.shards, percent=40)
        if max(map(len, assignment.moved.values()), default=0) > most:
            yield f"dataset {name} moves more shards to one worker than it may own"


# -- epochs -----------------------------------------------------------------------------------


def _highest_epoch(job: JobView) -> int:
    view, keys = job.view, job.keys
    head = job.head()
    epochs = [head.record.epoch if head is not None else 0]
    if (phase := view.record(keys.phase, JobPhase)) is not None:
        epochs.append(phase.epoch)
    if (standbys := view.record(keys.standbys, Standbys)) is not None:
        epochs.append(standbys.epoch)
    assignments = (view.record(keys.assignment(name), Assignment) for name in view.names(keys.datasets))
    epochs += (assignment.epoch for assignment in assignments if assignment is not None)
    return max(epochs)


def _epochs(job: JobView, keys: ClusterKeys) -> Iterator[str]:
    """No record has the epoch of a future leader."""
    leader = job.view.entry(keys.leader, Leader)
    newest = leader.create_revision if leader is not None else job.view.revision
    if (epoch := _highest_epoch(job)) > newest:
        yield f"epoch {epoch} is above {newest}, the newest that there was"
