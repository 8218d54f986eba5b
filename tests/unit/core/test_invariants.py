"""Each rule must reject a doctored keyspace and accept a sound one."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from strata.core.barriers.outcomes import Arrival, BarrierBook, decide_outcome
from strata.core.checkpoints.references import Reference, Rewind
from strata.core.datasets.assignment import decide_register_dataset, plan_assignment
from strata.core.ids import AttemptId, WorkerId
from strata.core.kv.records import (
    Ack,
    Assignment,
    BarrierFloor,
    BarrierOutcome,
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    DatasetSpec,
    GenerationRecord,
    JobPhase,
    Latest,
    LeaveRequest,
    Member,
    MembersChunk,
    Phase,
    RankDone,
    RankFailed,
    RankStopped,
    Restored,
    RestorePoint,
    Standbys,
    StopAction,
    StopNotice,
    Tier,
    TierState,
    WorldHead,
)
from strata.core.members.membership import decide_rank_exit
from tests.not_none import not_none
from tests.unit.core.rig import JOB, KEYS, Store, carry_out, lead, leave, register

DRAIN = StopAction.DRAIN
W0 = WorkerId("w0")
STOPPED = RankStopped(worker=W0)
RECORD = CheckpointRecord(
    attempt=AttemptId("a20"),
    step=20,
    generation=1,
    type=CheckpointType.FULL,
    state=CheckpointState.COMMITTED,
    ranks=4,
    path="file:///x",
    manifest_digest="d",
)


class Sound(Store):
    """A job in its second generation, restored from the first, with keys of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.epoch = lead(self)
        for name in ("w0", "w1", "w2"):
            register(self, name, slots=2, min_workers=2, max_workers=2)
        carry_out(self, self.epoch)
        self.put(JOB.checkpoint(20, 1), RECORD)
        latest = Latest(generation=1, step=20, attempt=AttemptId("a20"), record_generation=1)
        self.put(JOB.latest, latest)
        leave(self, "w1")
        carry_out(self, self.epoch)
        register(self, "w3", slots=2)
        carry_out(self, self.epoch)
        for round_ in (1, 2):
            self.meet(round_)
        self.meet(3, ranks=(0,), timeout_ms=5)
        self.settle(lambda job: decide_register_dataset(job, "d", DatasetSpec(shards=40)))
        for txn in plan_assignment(self.job(), keys=KEYS, epoch=self.epoch).txns:
            assert self.execute(txn).succeeded
        self.end(0)

    def meet(self, round_: int, ranks: tuple[int, ...] = (0, 1, 2, 3), timeout_ms: int = 0) -> None:
        sent = Arrival(job="job", name="b", generation=2, round=round_, ranks=ranks, timeout_ms=timeout_ms)
        entry = BarrierBook().add(sent, size=4, now_ms=0)
        self.settle(lambda job: decide_outcome(job, entry, now_ms=5))

    def end(self, rank: int) -> None:
        member = not_none(self.job().world()).member_of(rank)
        self.settle(
            lambda job: decide_rank_exit(job, WorkerId(member.worker), member.incarnation, 2, rank, 0)
        )

    def change(self, key: str, cls: Any, **changes: Any) -> int:
        return self.put(key, dataclasses.replace(not_none(self.view().record(key, cls)), **changes))

    def chunk(self) -> str:
        return JOB.members_chunk(2, self.epoch, 0)

    def change_member(self, index: int, **changes: Any) -> None:
        members = list(self.members())
        members[index] = dataclasses.replace(members[index], **changes)
        self.put(self.chunk(), MembersChunk(members=tuple(members)))

    def members(self) -> tuple[Member, ...]:
        return not_none(self.view().record(self.chunk(), MembersChunk)).members


def test_a_sound_keyspace_has_no_problems() -> None:
    sound = Sound()
    assert sound.problems() == []
    head = not_none(sound.job().head())
    assert head.record.restore == RestorePoint(step=20, attempt=AttemptId("a20"), record_generation=1)
    assert not_none(sound.view().record(JOB.standbys, Standbys)).workers == ("w3",)
    assert sound.view().names(JOB.barrier_generation("b", 2)) == [
        "000000000002",
        "000000000003",
        "floor",
    ]
    assert Store().problems() == []


def forming_with_leave_requests(store: Sound) -> None:
    store.change(JOB.head, WorldHead, members=0, size=0, chunks=0, restore=None)
    store.put(JOB.notice(2), StopNotice(action=StopAction.PREEMPT, reason=""))


Doctor = Callable[[Sound], object]

CASES: dict[str, tuple[Doctor, str]] = {
    # worlds
    "no chunks": (lambda s: s.delete(s.chunk()), "has 0 chunks, its head says 1"),
    "a foreign chunk": (
        lambda s: s.put(JOB.members_chunk(2, s.epoch, 1), MembersChunk(members=())),
        "has 2 chunks",
    ),
    "a member too few": (
        lambda s: s.put(s.chunk(), MembersChunk(members=s.members()[:1])),
        "has 1 members, not 2",
    ),
    "other slots": (lambda s: s.change_member(1, slots=3), "has not 4 ranks"),
    "ranks with a gap": (lambda s: s.change_member(1, first_rank=3), "is out of place"),
    "group ranks with a gap": (lambda s: s.change_member(0, group_rank=1), "is out of place"),
    "a member twice": (lambda s: s.change_member(1, worker=s.members()[0].worker), "has a member twice"),
    "keys of the far future": (
        lambda s: s.put(JOB.done_rank(4, 0), RankDone(worker=WorkerId("w0"))),
        "generation 4 has keys, and the head is 2",
    ),
    "another step restored": (
        lambda s: s.put(JOB.restored(2), Restored(step=10)),
        "restored 10, its head says 20",
    ),
    "nothing restored": (lambda s: s.delete(JOB.restored(2)), "restored None, its head says 20"),
    "forming and restoring": (
        lambda s: s.change(JOB.head, WorldHead, members=0),
        "is forming and restores",
    ),
    "ends without a head": (lambda s: s.delete(JOB.head), "and there is no head"),
    "a world without a spec": (lambda s: s.delete(JOB.spec), "it has a world and no spec"),
    # exits of ranks
    "done and failed": (
        lambda s: s.put(JOB.failed_rank(2, 0), RankFailed(reason="r", worker=WorkerId("w0"))),
        r"ranks \[0\] ended in two ways",
    ),
    "a rank that is none": (
        lambda s: s.put(JOB.done_rank(2, 4), RankDone(worker=WorkerId("w0"))),
        r"ranks \[4\] ended, of 4",
    ),
    "done too early": (
        lambda s: s.put(JOB.phase, JobPhase(phase=Phase.DONE, reason="")),
        "is done with 1 of 4 ranks",
    ),
    "a member that stands by": (
        lambda s: s.put(JOB.standbys, Standbys(workers=(WorkerId("w0"),))),
        r"members \['w0'\] of the world stand by",
    ),
    # barriers
    "a round below the floor": (
        lambda s: s.put(JOB.arrived("b", 2, 1), BarrierFloor(round=1)),
        "round 1 lies below the floor 2",
    ),
    "a release above the floor": (
        lambda s: s.put(JOB.barrier_floor("b", 2), BarrierFloor(round=1)),
        "round 2 was released, and the floor is 1",
    ),
    "a floor without its release": (
        lambda s: s.delete(JOB.outcome("b", 2, 2)),
        "the floor is 2, and that round has no outcome",
    ),
    "another rounds outcome": (
        lambda s: s.change(JOB.outcome("b", 2, 3), BarrierOutcome, round=2),
        "round 3 holds the outcome of another",
    ),
    "a release with missing": (
        lambda s: s.change(JOB.outcome("b", 2, 2), BarrierOutcome, missing=(3,)),
        "round 2 was released without all",
    ),
    "a barrier of the future": (
        lambda s: s.put(JOB.barrier_floor("b", 3), BarrierFloor(round=1)),
        "barrier b/3 is of a generation that does not exist",
    ),
    # checkpoints
    "latest of nothing": (lambda s: s.delete(JOB.checkpoint(20, 1)), "refers to no record"),
    "latest of another attempt": (
        lambda s: s.change(JOB.latest, Latest, attempt=AttemptId("b")),
        "refers to attempt b",
    ),
    "latest of an aborted one": (
        lambda s: s.change(JOB.checkpoint(20, 1), CheckpointRecord, state=CheckpointState.ABORTED),
        "refers to a record that is aborted",
    ),
    "latest before its record": (
        lambda s: s.change(JOB.latest, Latest, generation=0),
        "counts under a generation before its record's",
    ),
    "latest of the future": (
        lambda s: s.change(JOB.latest, Latest, generation=3),
        "is of a generation that does not exist",
    ),
    "latest not restored": (
        lambda s: s.change(JOB.head, WorldHead, restore=None),
        "differs from the restore point of generation 2",
    ),
    "a record in another slot": (
        lambda s: s.put(JOB.checkpoint(30, 1), RECORD),
        "checkpoint .20, 1. lies at",
    ),
    "a record of the future": (
        lambda s: s.put(JOB.checkpoint(30, 3), dataclasses.replace(RECORD, step=30, generation=3)),
        "checkpoint .30, 3. is of a generation that does not exist",
    ),
    "a commit without a manifest": (
        lambda s: s.change(JOB.checkpoint(20, 1), CheckpointRecord, manifest_digest=""),
        "is committed without a manifest's digest",
    ),
    "acks of what was given up": (
        lambda s: [
            s.put(JOB.checkpoint(30, 1), dataclasses.replace(RECORD, step=30, state=CheckpointState.ABORTED)),
            s.put(JOB.ack(30, 1, "a20", 0), Ack(digest="d", size_bytes=5, worker=W0, incarnation=1)),
        ],
        "checkpoint .30, 1. was given up and has acks",
    ),
    "a base that goes from its user's tier": (
        lambda s: [
            s.put(JOB.checkpoint(30, 1), dataclasses.replace(RECORD, step=30)),
            s.put(JOB.refs(20, 1, "a20") + "a20", Reference(step=30, generation=1)),
            s.change(
                JOB.checkpoint(20, 1),
                CheckpointRecord,
                tiers={"primary": Tier(path="file:///x", state=TierState.REMOVED), "s3": Tier(path="s3://b")},
            ),
        ],
        "is referenced by .30, 1. and is being deleted from primary",
    ),
    "a rewind that outlived a world": (
        lambda s: [
            s.put(JOB.rewind, Rewind(step=20, attempt=AttemptId("a20"), record_generation=1)),
            s.change(JOB.head, WorldHead),
        ],
        "generation 2 has begun since",
    ),
    # datasets
    "another number of shards": (
        lambda s: s.put(JOB.dataset_spec("d"), DatasetSpec(shards=41)),
        "is assigned with 40 shards, its spec differs",
    ),
    "no spec": (lambda s: s.delete(JOB.dataset_spec("d")), "its spec differs"),
    "an assignment of the future": (
        lambda s: s.change(JOB.assignment("d"), Assignment, generation=3),
        "is assigned in a generation that does not exist",
    ),
    "a worker outside": (
        lambda s: s.change(JOB.assignment("d"), Assignment, workers=(WorkerId("w0"), WorkerId("w9"))),
        "is assigned to workers outside the world",
    ),
    "a shard moved twice": (
        lambda s: s.change(JOB.assignment("d"), Assignment, moved={"w0": (1,), "w2": (1,)}),
        "moves a shard twice",
    ),
    "a shard that is none": (
        lambda s: s.change(JOB.assignment("d"), Assignment, moved={"w0": (40,)}),
        "or an unknown shard",
    ),
    "two on one seat": (
        lambda s: s.change(JOB.assignment("d"), Assignment, seats={"w0": "w2"}),
        "two workers in one seat",
    ),
    "a strangers seat": (
        lambda s: s.change(JOB.assignment("d"), Assignment, seats={"w9": "x"}),
        "or a seat for an unknown worker",
    ),
    "moved to a stranger": (
        lambda s: s.change(JOB.assignment("d"), Assignment, moved={"w9": (1,)}),
        "moves shards to workers that it is not assigned to",
    ),
    "too much moved": (
        lambda s: s.change(JOB.assignment("d"), Assignment, moved={"w0": tuple(range(29))}),
        "moves more shards to one worker than it may own",
    ),
    # notices and history
    "stopped and done": (lambda s: s.put(JOB.stopped_rank(2, 0), STOPPED), "ended in two ways"),
    "stopped without a request": (
        lambda s: s.put(JOB.stopped_rank(2, 1), STOPPED),
        "stopped without a stop request",
    ),
    "a strangers drain": (
        lambda s: s.put(JOB.notice(2), StopNotice(action=DRAIN, reason="", workers=(WorkerId("w9"),))),
        "has to drain",
    ),
    "a notice for a forming world": (forming_with_leave_requests, "is forming and has a stop request"),
    "a place for a member with a leave request": (
        lambda s: s.change(
            JOB.head,
            WorldHead,
            leave_requests=(
                LeaveRequest(
                    notice=StopNotice(action=StopAction.PREEMPT, reason=""), revision=10**6, written=1
                ),
            ),
        ),
        "which have a request to leave",
    ),
    "a leave request by a scale": (
        lambda s: s.change(
            JOB.head,
            WorldHead,
            leave_requests=(
                LeaveRequest(notice=StopNotice(action=StopAction.SCALE, reason=""), revision=1, written=1),
            ),
        ),
        "by a notice with the action scale",
    ),
    "history of the future": (
        lambda s: s.put(JOB.history_of(3), s.job().history()[-1].record),
        "has a history, and the head is 2",
    ),
    "another history": (
        lambda s: s.change(JOB.history_of(2), GenerationRecord, reason="so"),
        "differs from its head",
    ),
    # epochs
    "an epoch of the future": (
        lambda s: s.change(JOB.standbys, Standbys, epoch=10**6),
        "epoch 1000000 is above",
    ),
    "written by a leader to come": (
        lambda s: s.change(JOB.assignment("d"), Assignment, epoch=s.epoch + 1),
        "the newest that there was",
    ),
    # poison
    "a poison record": (lambda s: s.put(JOB.head, Restored(step=3)), "not a WorldHead record"),
    "a poison leader": (lambda s: s.put(KEYS.leader, Restored(step=3)), "not a Leader record"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_doctored_keyspace_is_rejected(name: str) -> None:
    doctor, why = CASES[name]
    store = Sound()
    doctor(store)
    problems = store.problems()
    assert problems
    assert any(re.search(why, problem) for problem in problems), problems


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.put(
            JOB.checkpoint(90, 9),
            dataclasses.replace(RECORD, step=90, generation=9, state=CheckpointState.PREPARED),
        ),
        lambda s: s.put(JOB.members_chunk(3, s.epoch, 0), MembersChunk(members=())),
    ],
    ids=["an imported record is of any generation", "chunks of an attempt that goes on"],
)
def test_imported_records_and_unfinished_chunks_are_no_problem(change: Doctor) -> None:
    store = Sound()
    change(store)
    assert store.problems() == []
