from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from strata.core.checkpoints.lifecycle import (
    Reference,
    acked,
    complete,
    decide_abort,
    decide_close,
    decide_commit,
    decide_delete,
    find,
    sealed,
)
from strata.core.ids import WorkerId
from strata.core.kv.records import Ack, CheckpointRecord, CheckpointState, CheckpointType
from strata.core.kv.txn import MAX_OPS
from strata.errors import (
    CheckpointAborted,
    CheckpointNotFound,
    Conflict,
    InvalidArgument,
    QuotaExceeded,
    Refused,
    StaleGeneration,
    StaleIncarnation,
)
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT, Job
from tests.unit.core.rig import JOB, leave, register

# -- begin ------------------------------------------------------------------------------------


@pytest.fixture
def job() -> Job:
    return Job()


def test_the_first_rank_opens_the_slot_and_other_ranks_join_its_attempt(job: Job) -> None:
    first = job.begin(rank=0, attempt="x", epoch=3, metadata={"note": "n"})
    assert (first.state, first.attempt, first.ranks) == (CheckpointState.OPEN, "x", 3)
    assert (first.epoch, first.metadata, first.created_unix_ms) == (3, {"note": "n"}, 7)
    assert first.path == f"{ROOT}/job/step-000000000020-gen-{first.generation:06d}-x"
    assert job.begin(rank=2, attempt="y") == first
    assert job.begin(rank=0, attempt="x") == first


@pytest.mark.parametrize(
    "root", ["file:///", "file://localhost/a%20b", "s3://bucket", "s3://b.c/p/q", "gs://b/%3C"]
)
def test_every_supported_storage_root_is_accepted(job: Job, root: str) -> None:
    assert job.begin(root=root).path.startswith(root.rstrip("/") + "/")


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        *(
            ({"root": root}, "not the URI of a storage root")
            for root in (
                "",
                "/data",
                "relative",
                "file://host/data",
                "file:///da\nta",
                "file:///data?x",
                "s3://user:secret@bucket/p",
                "s3:///p",
                "https://host/p",
                "javascript:alert(1)",
                "file:///" + "x" * 5000,
            )
        ),
        ({"step": -1}, "below 0"),
        ({"attempt": "a/b"}, "cannot name a attempt"),
        ({"type": CheckpointType.INCREMENTAL}, "names the step and the attempt it builds on"),
    ],
)
def test_an_invalid_begin_is_refused_with_the_reason(job: Job, wrong: dict[str, Any], why: str) -> None:
    """Paths in the catalog are shown to people: no unknown scheme, no secret and no control character may occur."""
    with pytest.raises(InvalidArgument, match=why):
        job.begin(**wrong)


def test_steps_and_generations_have_slots_of_their_own(job: Job) -> None:
    job.begin(step=20, attempt="x")
    job.begin(step=40, attempt="y")
    before = job.author(0).generation
    job.next_world()
    assert job.begin(step=20, attempt="z").generation > before
    assert [e.record.attempt for e in job.store.job().checkpoints()] == ["x", "z", "y"]


def test_an_aborted_attempt_is_joined_unless_it_is_named_to_be_replaced(job: Job) -> None:
    job.begin(attempt="x")
    job.ack(0)
    job.abort()
    late = job.begin(rank=2, attempt="y")
    assert (late.attempt, late.state) == ("x", CheckpointState.ABORTED)
    again = job.begin(rank=0, attempt="z", replaces="x")
    assert (again.attempt, again.state) == ("z", CheckpointState.OPEN)
    assert acked(job.store.job(), again) == set()
    assert job.begin(rank=2, attempt="y", replaces="x").attempt == "z"
    assert not list(job.store.view().walk(JOB.attempt(20, again.generation, "x")))


def test_a_repeated_begin_never_replaces_its_own_aborted_attempt(job: Job) -> None:
    job.begin(attempt="x")
    job.abort()
    assert job.begin(attempt="x", replaces="x").state is CheckpointState.ABORTED


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"generation": 1}, StaleGeneration),
        ({"generation": 99}, Refused),
        ({"incarnation": 1}, StaleIncarnation),
        ({"worker": "stranger"}, Refused),
        ({"rank": 2}, Refused),
    ],
)
def test_only_the_owner_of_a_rank_in_the_current_world_may_begin(
    job: Job, change: dict[str, Any], refusal: type[Exception]
) -> None:
    job.next_world()
    author = dataclasses.replace(job.author(0), **change)
    with pytest.raises(refusal):
        job.begin(author=author)


def test_a_member_that_was_declared_dead_begins_and_acks_nothing(job: Job) -> None:
    dead = job.author(2)
    job.begin(rank=0)
    leave(job.store, "b")
    with pytest.raises(StaleIncarnation):
        job.begin(author=dead, step=40)
    with pytest.raises(StaleIncarnation):
        job.ack(2, author=dead)
    register(job.store, "b")
    with pytest.raises(StaleIncarnation, match="took the place"):
        job.ack(2, author=dead)


def test_there_is_no_save_before_a_world(job: Job) -> None:
    author = job.author(0)
    job.store.delete(JOB.head)
    with pytest.raises(Refused, match="no world"):
        job.begin(author=author)


def test_going_back_inside_a_generation_is_refused(job: Job) -> None:
    job.save(40)
    with pytest.raises(Refused, match="new generation"):
        job.begin(step=20, attempt="y")
    assert job.begin(step=40, attempt="y").state is CheckpointState.COMMITTED
    job.next_world()
    job.begin(step=40, attempt="z")
    with pytest.raises(Refused, match="new generation"):
        job.begin(step=39, attempt="y")


# -- an Incremental's bases -------------------------------------------------------------------


def incremental(job: Job, step: int, base: CheckpointRecord, attempt: str = "") -> CheckpointRecord:
    return job.begin(
        step=step,
        attempt=attempt or f"x{step}",
        type=CheckpointType.INCREMENTAL,
        base_step=base.step,
        base_attempt=base.attempt,
    )


def references(job: Job, record: CheckpointRecord) -> list[str]:
    return job.store.view().names(JOB.refs(record.step, record.generation, record.attempt))


def test_an_incremental_refers_to_all_that_its_base_uses(job: Job) -> None:
    full = job.save(20)
    job.save(40, type=CheckpointType.INCREMENTAL, base_step=20, base_attempt="x20")
    second = not_none(find(job.store.job(), 40))
    third = incremental(job, 60, second.record)
    assert references(job, full) == ["x40", "x60"]
    assert references(job, second.record) == ["x60"]
    reference = job.store.view().record(
        JOB.refs(20, full.generation, full.attempt) + third.attempt, Reference
    )
    assert reference == Reference(step=60, generation=third.generation)


def test_an_aborted_incremental_takes_its_references_back(job: Job) -> None:
    full = job.save(20)
    incremental(job, 40, full)
    job.abort(step=40, attempt="x40")
    assert references(job, full) == []


def test_an_incremental_needs_a_committed_base(job: Job) -> None:
    opened = job.begin(step=20)
    with pytest.raises(Refused, match="is open"):
        incremental(job, 40, opened)
    with pytest.raises(CheckpointNotFound):
        incremental(job, 40, dataclasses.replace(opened, step=30))


def test_a_chain_of_references_ends_and_fits_a_transaction() -> None:
    job = Job(a=1)
    base = job.save(1)
    for step in range(2, 34):
        base = job.save(step, type=CheckpointType.INCREMENTAL, base_step=base.step, base_attempt=base.attempt)
    with pytest.raises(QuotaExceeded, match="Full"):
        incremental(job, 34, base)


# -- acks and the seal ------------------------------------------------------------------------


def test_a_second_digest_of_a_part_or_of_the_seal_ends_the_attempt() -> None:
    job = Job(a=1)
    for step in (20, 40):
        job.begin(step=step)
        job.ack(0, step, digest="one")
    with pytest.raises(CheckpointAborted, match="two different digests"):
        job.ack(0, 20, digest="other")
    with pytest.raises(CheckpointAborted):
        job.ack(0, 20, digest="one more")
    job.seal(40, digest="one")
    job.seal(40, digest="one")
    with pytest.raises(CheckpointAborted, match="sealed with two"):
        job.seal(40, digest="other")


def test_an_ack_after_the_abort_or_of_a_replaced_attempt_is_refused(job: Job) -> None:
    job.begin()
    job.ack(0)
    job.abort()
    with pytest.raises(CheckpointAborted, match="disk full"):
        job.ack(1)
    job.begin(attempt="y", replaces="x")
    with pytest.raises(CheckpointAborted, match="took its place"):
        job.ack(1)
    with pytest.raises(CheckpointNotFound):
        job.ack(1, step=21)


def test_a_late_ack_of_an_aborted_attempt_under_deletion_gets_the_reason(job: Job) -> None:
    job.begin()
    job.abort()
    job.save(40)
    job.store.settle(lambda view: decide_delete(view, step=20, attempt="x", finished=False))
    with pytest.raises(CheckpointAborted, match="given up: disk full"):
        job.ack(1)


@pytest.mark.parametrize("parts", ["d0 d2 d1", "d0 d1", "d0 d1 d2 d3"])
def test_a_seal_of_other_parts_than_were_acked_is_refused(job: Job, parts: str) -> None:
    record = job.begin()
    for rank in range(3):
        job.ack(rank)
    with pytest.raises(Conflict, match="cannot be sealed"):
        job.seal(parts=parts)
    assert sealed(job.store.job(), record) is None
    job.seal(parts="d0 d1 d2")
    assert sealed(job.store.job(), record) is not None


def test_the_seal_comes_after_every_rank(job: Job) -> None:
    job.begin()
    job.ack(0)
    job.ack(2)
    with pytest.raises(Refused, match="rank 1"):
        job.seal()
    job.ack(1)
    job.seal()
    record = not_none(job.store.job().checkpoint(20, job.author(0).generation))
    assert complete(job.store.job(), record.record)
    seal = not_none(sealed(job.store.job(), record.record))
    assert (seal.digest, seal.model_hash, seal.size_bytes) == ("m", "h", 15)


def test_a_repeated_ack_succeeds_after_the_commit_and_in_a_later_generation(job: Job) -> None:
    author = job.author(0)
    job.save(20, "x")
    job.next_world()
    before = job.store.revision
    job.ack(0, author=author)
    assert job.store.revision == before
    with pytest.raises(Conflict):
        job.ack(0, author=author, digest="other")
    with pytest.raises(Conflict, match="committed already"):
        job.store.settle(lambda view: decide_abort(view, author=author, step=20, attempt="x", reason="late"))


# -- commit and abort -------------------------------------------------------------------------


def test_a_commit_needs_every_ack_and_the_seal(job: Job) -> None:
    job.begin()
    for rank in (2, 0, 1):
        assert job.commit() == []
        job.ack(rank)
    assert job.commit() == []
    job.seal()
    (record,) = job.commit()
    assert (record.manifest_digest, record.size_bytes, record.model_hash) == ("m", 15, "h")
    latest = not_none(job.store.job().latest())
    assert (latest.record.generation, latest.record.step) == (record.generation, 20)
    assert job.commit() == [record]


def test_a_thousand_ranks_commit_in_one_small_transaction() -> None:
    job = Job(a=1000)
    job.begin()
    ack = Ack(digest="d", size_bytes=1, worker=WorkerId("a"), incarnation=1)
    generation = job.author(0).generation
    for rank in range(1000):
        job.store.put(JOB.ack(20, generation, "x", rank), ack)
    job.seal()
    (entry,) = job.store.job().checkpoints()
    txn = not_none(decide_commit(job.store.job(), entry).txn)
    assert len(txn.compares) + len(txn.success) < 10 < MAX_OPS


def test_an_older_step_that_commits_later_does_not_move_latest_back() -> None:
    job = Job(a=1)
    job.begin(step=20, attempt="x")
    job.begin(step=40, attempt="y")
    for step, attempt in ((40, "y"), (20, "x")):
        job.ack(0, step, attempt)
        job.seal(step, attempt)
        job.commit()
    assert not_none(job.store.job().latest()).record.step == 40


@pytest.mark.parametrize("kind", [CheckpointType.MODEL_ONLY, CheckpointType.OPTIMIZER_ONLY])
def test_a_part_of_the_state_is_never_latest(job: Job, kind: CheckpointType) -> None:
    job.save(20)
    job.save(40, type=kind)
    assert not_none(job.store.job().latest()).record.step == 20


def test_nothing_of_an_ended_generation_commits(job: Job) -> None:
    """A save is complete, but the next generation's head is written before its commit."""
    author, record = job.author(0), job.begin()
    for rank in range(3):
        job.ack(rank)
    job.seal()
    head = not_none(job.store.job().head()).record
    job.store.put(JOB.head, dataclasses.replace(head, generation=head.generation + 1))
    (entry,) = job.store.job().checkpoints()
    assert decide_commit(job.store.job(), entry).txn is None
    with pytest.raises(StaleGeneration):
        job.store.settle(lambda v: decide_abort(v, author=author, step=20, attempt="x", reason="r"))
    job.store.settle(lambda v: decide_close(v, through_generation=record.generation, reason="new world"))
    (entry,) = job.store.job().checkpoints()
    assert entry.record.state is CheckpointState.ABORTED


def test_one_ranks_abort_aborts_the_attempt_and_a_commit_cannot_be_aborted(job: Job) -> None:
    job.begin()
    job.abort(rank=1)
    job.abort(rank=2)
    (entry,) = job.store.job().checkpoints()
    assert (entry.record.state, entry.record.reason) == (CheckpointState.ABORTED, "disk full")
    job.save(40)
    with pytest.raises(Conflict):
        job.abort(step=40, attempt="x40")
    with pytest.raises(CheckpointNotFound):
        job.abort(step=60)


def test_an_abort_of_a_replaced_attempt_changes_nothing(job: Job) -> None:
    job.begin()
    job.abort()
    job.begin(attempt="y", replaces="x")
    job.abort(attempt="x")
    (entry,) = job.store.job().checkpoints()
    assert (entry.record.attempt, entry.record.state) == ("y", CheckpointState.OPEN)


def test_closing_a_generation_commits_complete_saves_and_aborts_the_rest(job: Job) -> None:
    job.begin(step=20, attempt="x")
    job.begin(step=40, attempt="y")
    for rank in range(3):
        job.ack(rank, 40, "y")
    job.seal(40, "y")
    earlier = job.author(0).generation - 1
    assert decide_close(job.store.job(), through_generation=earlier, reason="new world").txn is None
    job.close()
    states = {e.record.step: e.record.state for e in job.store.job().checkpoints()}
    assert states == {20: CheckpointState.ABORTED, 40: CheckpointState.COMMITTED}
