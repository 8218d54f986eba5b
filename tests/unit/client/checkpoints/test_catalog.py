from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator

import pytest

from strata.checkpoint.catalog.protocol import CheckpointAck, CheckpointMetadata, CheckpointSeal, SaveRequest
from strata.client.checkpoints.catalog import CoordinatedCatalog
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointAborted, StaleGeneration, Unavailable
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.worlds_pb2 import RestorePoint
from tests.unit.checkpoint.ports import Cluster, Port

LIMIT_S = 20
NEVER = threading.Event()


def catalog_of(port: Port, *, save_wait_s: float = LIMIT_S, retry_s: float = 2.0) -> CoordinatedCatalog:
    ids: Iterator[str] = (f"r{port.rank}n{n}" for n in range(100))
    return CoordinatedCatalog(
        port,
        root_uri="file:///data",
        new_id=lambda: next(ids),
        save_wait_s=save_wait_s,
        retry_s=retry_s,
    )


def test_ranks_meet_in_one_attempt_and_each_learns_of_the_commit() -> None:
    cluster = Cluster(a=1, b=1)
    catalogs = [catalog_of(cluster.port(rank)) for rank in (0, 1)]
    records = [catalog.begin(SaveRequest(step=20, epoch=3, metadata={"k": "v"})) for catalog in catalogs]
    assert {record.id for record in records} == {"r0n0"}
    assert records[0].metadata == {"k": "v"}
    assert catalogs[1].folder(records[1]) == f"job/step-000000000020-gen-{records[0].generation:06d}-r0n0"
    assert records[0].path == f"file:///data/{catalogs[0].folder(records[0])}"
    for rank, catalog in enumerate(catalogs):
        catalog.ack(records[rank], CheckpointAck(digest=f"d{rank}", size_bytes=1))
    seen = catalogs[0].wait(records[0], lambda r: not r.missing, timeout_s=LIMIT_S, cancelled=NEVER)
    assert seen.acked == {0, 1}
    catalogs[0].seal(
        seen, CheckpointSeal(manifest_digest="m", size_bytes=2, model_hash="h", part_digests=("d0", "d1"))
    )
    for catalog, record in zip(catalogs, records, strict=True):
        end = catalog.wait(record, _is_committed, timeout_s=LIMIT_S, cancelled=NEVER)
        assert (end.manifest_digest, end.size_bytes, end.latest) == ("m", 2, True)
    latest = catalogs[1].latest()
    assert latest is not None
    assert latest.id == "r0n0"
    assert [c.id for c in catalogs[0].all()] == ["r0n0"]


def _is_committed(record: CheckpointMetadata) -> bool:
    return record.state is CheckpointState.COMMITTED


def saved(cluster: Cluster, catalog: CoordinatedCatalog, step: int) -> CheckpointMetadata:
    """Save `step` in a world of one rank, up to the seal."""
    record = catalog.begin(SaveRequest(step=step))
    catalog.ack(record, CheckpointAck(digest="d", size_bytes=1))
    return catalog.seal(
        record, CheckpointSeal(manifest_digest="m", size_bytes=1, model_hash="", part_digests=("d",))
    )


def test_a_lost_push_is_replaced_by_polling() -> None:
    cluster = Cluster(a=1)
    cluster.pushes = False
    catalog = catalog_of(cluster.port(0), retry_s=0.01)
    record = saved(cluster, catalog, 20)
    assert record.state is CheckpointState.OPEN, "the answer is from before the commit"
    assert catalog.wait(record, _is_committed, timeout_s=LIMIT_S, cancelled=NEVER).sealed


def test_a_request_whose_answer_is_lost_is_sent_again_unchanged() -> None:
    cluster = Cluster(a=1)
    catalog = catalog_of(cluster.port(0))
    cluster.lose_answers = 1
    record = catalog.begin(SaveRequest(step=20))
    assert record.id == "r0n0"
    cluster.lose_answers = 1
    catalog.ack(record, CheckpointAck(digest="d", size_bytes=1))
    cluster.lose_answers = 1
    catalog.seal(
        record, CheckpointSeal(manifest_digest="m", size_bytes=1, model_hash="", part_digests=("d",))
    )
    assert cluster.answers.count(pb.SealCheckpointRequest) == 2
    assert catalog.wait(record, _is_committed, timeout_s=LIMIT_S, cancelled=NEVER).latest


def test_without_any_coordinator_a_save_waits_its_time_and_no_longer() -> None:
    cluster = Cluster(a=1)
    cluster.down = True
    port = cluster.port(0)
    with pytest.raises(Unavailable):
        catalog_of(port, save_wait_s=0.6).begin(SaveRequest(step=20))
    assert len(port.timeouts) >= 2
    assert max(port.timeouts) <= 0.6


def test_saves_wait_beyond_their_limit_while_the_rank_outlasts_an_outage() -> None:
    cluster = Cluster(a=1)
    cluster.down = True
    catalog, looks = catalog_of(cluster.port(0), save_wait_s=0.3), itertools.count(1)

    def stands() -> bool:
        cluster.down = next(looks) < 3
        return True

    catalog.stands = stands
    record = catalog.begin(SaveRequest(step=20))
    cluster.down, catalog.stands = True, lambda: next(looks) < 7
    with pytest.raises(Unavailable):
        catalog.wait(record, _is_committed, timeout_s=0.0, cancelled=NEVER)
    with pytest.raises(Unavailable):
        catalog.begin(SaveRequest(step=21))
    assert next(looks) > 7


def test_coordinators_that_return_in_time_are_enough() -> None:
    cluster = Cluster(a=1)
    cluster.down = True
    catalog = catalog_of(cluster.port(0))

    def returns_at_the_third(request: object) -> None:
        if len(requests) == 3:
            cluster.down = False
        requests.append(request)

    requests: list[object] = []
    cluster.on_call = returns_at_the_third
    assert catalog.begin(SaveRequest(step=20)).state is CheckpointState.OPEN


def test_a_waiting_rank_learns_that_another_rank_aborted() -> None:
    cluster = Cluster(a=1, b=1)
    catalogs = [catalog_of(cluster.port(rank)) for rank in (0, 1)]
    records = [catalog.begin(SaveRequest(step=20)) for catalog in catalogs]
    given_up = catalogs[1].abort(records[1], "rank 1: disk full")
    assert given_up.state is CheckpointState.ABORTED
    with pytest.raises(CheckpointAborted, match="rank 1: disk full"):
        catalogs[0].wait(records[0], _is_committed, timeout_s=LIMIT_S, cancelled=NEVER)
    again = catalogs[0].begin(SaveRequest(step=20, replaces=records[0].id))
    assert (again.id, again.state) == ("r0n1", CheckpointState.OPEN)
    with pytest.raises(CheckpointAborted, match="took the place"):
        catalogs[1].wait(records[1], _is_committed, timeout_s=LIMIT_S, cancelled=NEVER)


def test_an_abort_that_comes_too_late_returns_the_commit() -> None:
    cluster = Cluster(a=1)
    catalog = catalog_of(cluster.port(0))
    record = saved(cluster, catalog, 20)
    assert catalog.abort(record, "late").state is CheckpointState.COMMITTED


def test_a_wait_ends_by_timeout_or_cancellation_and_names_the_missing_ranks() -> None:
    cluster = Cluster(a=1, b=1)
    catalog = catalog_of(cluster.port(0))
    record = catalog.begin(SaveRequest(step=20))
    catalog.ack(record, CheckpointAck(digest="d", size_bytes=1))
    with pytest.raises(Unavailable, match="1 of 2 ranks have not acked, among them 1"):
        catalog.wait(record, _is_committed, timeout_s=0.01, cancelled=NEVER)
    cancelled = threading.Event()
    cancelled.set()
    with pytest.raises(CheckpointAborted, match="cancelled"):
        catalog.wait(record, _is_committed, timeout_s=LIMIT_S, cancelled=cancelled)


def test_a_rank_of_an_ended_generation_saves_nothing() -> None:
    cluster = Cluster(a=1, b=1)
    catalog = catalog_of(cluster.port(0))
    record = catalog.begin(SaveRequest(step=20))
    cluster.next_world()
    with pytest.raises(CheckpointAborted):
        catalog.ack(record, CheckpointAck(digest="d", size_bytes=1))
    with pytest.raises(StaleGeneration):
        catalog.begin(SaveRequest(step=40))


@pytest.mark.parametrize("cleared", [False, True])
def test_a_late_rank_learns_that_the_attempt_was_aborted(cleared: bool) -> None:
    cluster = Cluster(a=1, b=1)
    catalogs = [catalog_of(cluster.port(rank)) for rank in (0, 1)]
    record = catalogs[0].begin(SaveRequest(step=20))
    late = catalogs[1].begin(SaveRequest(step=20))
    catalogs[0].abort(record, "rank 0: disk full")
    cluster.job.save(40)  # a newer commit removes the aborted attempt
    catalogs[0].delete(record)
    if cleared:
        cluster.call(pb.DeleteCheckpointRequest(step=20, attempt=record.id, finished=True))
        assert [c.step for c in catalogs[0].all()] == [40]
    with pytest.raises(CheckpointAborted, match="step 20"):
        catalogs[1].ack(late, CheckpointAck(digest="d", size_bytes=1))
    with pytest.raises(CheckpointAborted):
        catalogs[1].seal(
            late, CheckpointSeal(manifest_digest="m", size_bytes=1, model_hash="", part_digests=())
        )


def test_an_outdated_notification_changes_nothing() -> None:
    cluster = Cluster(a=1)
    catalog = catalog_of(cluster.port(0))
    record = saved(cluster, catalog, 20)
    old = pb.Checkpoint(
        attempt=record.id,
        step=20,
        generation=record.generation,
        state=pb.CHECKPOINT_STATE_OPEN,
        type=pb.CHECKPOINT_TYPE_FULL,
        mod_revision=1,
    )
    (observe,) = cluster.observers
    observe(old)
    assert catalog.wait(record, _is_committed, timeout_s=LIMIT_S, cancelled=NEVER).latest


def test_the_restore_point_needs_no_coordinator() -> None:
    cluster = Cluster(a=1)
    assert catalog_of(cluster.port(0)).restore_point() is None
    cluster.down = True
    point = RestorePoint(
        step=20, attempt="x", record_generation=3, path="file:///data/job/…", manifest_digest="m"
    )
    found = catalog_of(cluster.port(0, restore=point)).restore_point()
    assert found is not None
    assert (found.step, found.id, found.generation, found.manifest_digest) == (20, "x", 3, "m")


def test_a_deleted_step_is_marked_and_closing_stops_observing() -> None:
    cluster = Cluster(a=1)
    catalog = catalog_of(cluster.port(0))
    first = saved(cluster, catalog, 20)
    saved(cluster, catalog, 40)
    catalog.delete(first)
    assert [c.state for c in catalog.all()] == [CheckpointState.DELETING, CheckpointState.COMMITTED]
    assert catalog.latest() is not None
    catalog.close()
    assert cluster.observers == []
