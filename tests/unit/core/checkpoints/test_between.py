"""A transaction compares every key that its decision read, so any relevant write in between must make it fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from strata.core.checkpoints.lifecycle import (
    AckRequest,
    BeginRequest,
    SealRequest,
    decide_abort,
    decide_ack,
    decide_begin,
    decide_close,
    decide_commit,
    decide_delete,
    decide_pin,
    decide_seal,
    decide_unpin,
)
from strata.core.ids import AttemptId
from strata.core.kv.records import CheckpointType, Pin
from strata.core.kv.txn import Decision, Txn
from tests.not_none import not_none
from tests.unit.core.checkpoint_job import ROOT, Job
from tests.unit.core.rig import JOB, leave, register

Act = Callable[[Job], object]


def begin(job: Job, **more: object) -> Decision:
    fields = {
        "author": job.author(0),
        "step": 60,
        "type": CheckpointType.FULL,
        "root": ROOT,
        "attempt": AttemptId("new"),
        **more,
    }
    request = BeginRequest(**fields)  # type: ignore[arg-type]  # named fields
    return decide_begin(job.store.job(), request, now_unix_ms=0)


def incremental(job: Job) -> Decision:
    return begin(job, type=CheckpointType.INCREMENTAL, base_step=20, base_attempt=AttemptId("x20"))


def ack(job: Job) -> Decision:
    request = AckRequest(author=job.author(2), step=40, attempt="x40", digest="d2", size_bytes=1)
    return decide_ack(job.store.job(), request)


def seal(job: Job) -> Decision:
    job.ack(2, 40, "x40")
    request = SealRequest(author=job.author(0), step=40, attempt="x40", digest="m", size_bytes=1)
    return decide_seal(job.store.job(), request)


def commit(job: Job) -> Decision:
    job.ack(2, 40, "x40")
    job.seal(40, "x40")
    return decide_commit(job.store.job(), not_none(job.store.job().checkpoint(40, job.author(0).generation)))


def abort(job: Job) -> Decision:
    job.ack(2, 40, "x40")
    job.seal(40, "x40")
    return decide_abort(job.store.job(), author=job.author(0), step=40, attempt="x40", reason="r")


def close(job: Job) -> Decision:
    return decide_close(job.store.job(), through_generation=job.author(0).generation, reason="r")


def delete(job: Job) -> Decision:
    job.save(30, "x30")
    return decide_delete(job.store.job(), step=20, attempt="x20", finished=False)


def deleted(job: Job) -> Decision:
    job.store.execute(_txn(delete(job)))
    return decide_delete(job.store.job(), step=20, attempt="x20", finished=True)


def pin(job: Job) -> Decision:
    job.save(30, "x30")
    return decide_pin(job.store.job(), step=20, attempt="x20", who="me", why="")


def unpin(job: Job) -> Decision:
    job.store.put(JOB.pin(20, "x20"), Pin(who="me", why=""))
    return decide_unpin(job.store.job(), step=20, attempt="x20")


# -- writes between decision and transaction --------------------------------------------------


def aborted(job: Job) -> None:
    job.abort(step=40, attempt="x40")


def committed(job: Job) -> None:
    job.ack(2, 40, "x40")
    if not job.store.view().get(JOB.seal(40, job.author(0).generation, "x40")):
        job.seal(40, "x40")
    job.commit()


def another_world(job: Job) -> None:
    """Write only the new head: the old generation's open attempts are aborted later."""
    job.store.put(JOB.head, not_none(job.store.job().head()).record)


def dies(name: str) -> Act:
    return lambda job: leave(job.store, name)


def replaced(name: str) -> Act:
    def act(job: Job) -> None:
        leave(job.store, name)
        register(job.store, name)

    return act


def another_begins(job: Job) -> None:
    job.begin(rank=2, step=60, attempt="other")


def later_commit(job: Job) -> None:
    """Commit step 80 only: other complete saves stay uncommitted."""
    record = job.begin(step=80, attempt="x80")
    for rank in range(3):
        job.ack(rank, 80, "x80")
    job.seal(80, "x80")
    entry = not_none(job.store.job().checkpoint(80, record.generation))
    assert job.store.execute(_txn(decide_commit(job.store.job(), entry))).succeeded


def base_is_deleted(job: Job) -> None:
    job.save(50, "x50")
    job.store.execute(_txn(decide_delete(job.store.job(), step=20, attempt="x20", finished=False)))


def acked_otherwise(job: Job) -> None:
    job.ack(2, 40, "x40", digest="other")


def sealed_otherwise(job: Job) -> None:
    job.seal(40, "x40", digest="other")


def is_deleted(job: Job) -> None:
    job.store.execute(_txn(decide_delete(job.store.job(), step=20, attempt="x20", finished=False)))


def is_removed(job: Job) -> None:
    for finished in (False, True):
        decision = decide_delete(job.store.job(), step=20, attempt="x20", finished=finished)
        if decision.txn is not None:
            job.store.execute(decision.txn)


def is_pinned(job: Job) -> None:
    job.store.put(JOB.pin(20, "x20"), Pin(who="you", why="other"))


@pytest.mark.parametrize(
    ("decide", "meanwhile"),
    [
        (begin, another_begins),
        (begin, another_world),
        (begin, later_commit),
        (begin, dies("a")),
        (begin, replaced("a")),
        (incremental, base_is_deleted),
        (ack, aborted),
        (ack, another_world),
        (ack, acked_otherwise),
        (ack, dies("b")),
        (ack, replaced("b")),
        (seal, aborted),
        (seal, another_world),
        (seal, sealed_otherwise),
        (seal, dies("a")),
        (commit, aborted),
        (commit, another_world),
        (commit, later_commit),
        (abort, committed),
        (abort, another_world),
        (close, committed),
        (close, aborted),
        (delete, is_removed),
        (delete, later_commit),
        (deleted, is_removed),
        (pin, is_deleted),
        (pin, is_pinned),
        (unpin, is_pinned),
    ],
)
def test_a_write_in_between_fails_the_transaction(decide: Callable[[Job], Decision], meanwhile: Act) -> None:
    job = Job(a=2, b=1)
    job.save(20, "x20")
    job.begin(step=40, attempt="x40")
    for rank in (0, 1):
        job.ack(rank, 40, "x40")
    txn = _txn(decide(job))
    meanwhile(job)
    assert not job.store.execute(txn).succeeded
    assert job.store.problems() == []


def _txn(decision: Decision) -> Txn:
    assert decision.txn is not None, decision.reason
    return decision.txn


def test_a_save_completed_by_the_last_acks_is_committed_and_not_aborted() -> None:
    """t1: the leader decides the abort. t2: the last ack and the seal arrive. t3: the abort arrives and fails."""
    job = Job()
    record = job.begin(step=40, attempt="x40")
    for rank in range(record.ranks - 1):
        job.ack(rank, 40, "x40")
    outdated = _txn(close(job))
    job.ack(record.ranks - 1, 40, "x40")
    job.seal(40, "x40")
    assert not job.store.execute(outdated).succeeded
    job.store.settle(lambda v: decide_close(v, through_generation=record.generation, reason="r"))
    latest = not_none(job.store.job().latest())
    assert (latest.record.step, latest.record.attempt) == (40, "x40")
