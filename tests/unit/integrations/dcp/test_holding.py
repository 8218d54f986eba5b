"""The reader lease of a load by DCP: which checkpoint the lease protects from deletion, and for how long."""

from __future__ import annotations

import gc
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from strata.client.checkpoints import reader_lease, upkeep
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointError, Unavailable
from strata.integrations.dcp import JsonLoadPlanner, StrataReader
from strata.v1 import checkpoints_pb2 as pb
from tests.unit.checkpoint.ports import Cluster, state_of
from tests.unit.integrations.dcp.test_dcp import a_state, flat, flip, load, save

LIMIT_S = 20

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def readers(cluster: Cluster) -> list[int]:
    """Return the step of each reader lease; a step with two readers occurs twice."""
    job = cluster.view()
    return [
        record.step
        for record in cluster.records()
        for _ in job.view.names(job.keys.readers(record.step, record.generation, record.attempt))
    ]


def renewing() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "strata-reader"]


class Watched(StrataReader):
    """Records the steps that have readers, when DCP reads the metadata and when it reads the tensors."""

    def __init__(self, cluster: Cluster, *args: Any, **more: Any) -> None:
        super().__init__(*args, client=cluster.port(0), **more)
        self.cluster = cluster
        self.seen: list[list[int]] = []

    def read_metadata(self) -> Metadata:
        found = super().read_metadata()
        self.seen.append(readers(self.cluster))
        return found

    def _read(self, *args: Any) -> None:
        self.seen.append(readers(self.cluster))
        super()._read(*args)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A job of one rank that has saved steps 1 and 2."""
    made = Cluster(n1=1)
    for step in (1, 2):
        save(tmp_path, a_state(step), step, client=made.port(0))
    return made


def test_retention_waits_for_a_load(cluster: Cluster, tmp_path: Path) -> None:
    class Slow(StrataReader):
        def read_data(self, plan: Any, planner: Any) -> Any:
            save(tmp_path, a_state(3), 3, client=cluster.port(0), keep_count=1)
            assert state_of(cluster, 1) is CheckpointState.COMMITTED
            return super().read_data(plan, planner)

    state = a_state(0)
    reader = Slow(tmp_path, step=1, client=cluster.port(0))
    dcp_load(state, storage_reader=reader, planner=JsonLoadPlanner())
    assert flat(state) == flat(a_state(1))
    save(tmp_path, a_state(4), 4, client=cluster.port(0), keep_count=1)
    assert [record.step for record in cluster.records()] == [4]


def test_a_reader_holds_a_lease_only_during_each_load(cluster: Cluster, tmp_path: Path) -> None:
    reader = Watched(cluster, tmp_path)
    for step in (1, 2):
        state = a_state(0)
        dcp_load(state, checkpoint_id=str(step), storage_reader=reader, planner=JsonLoadPlanner())
        assert flat(state) == flat(a_state(step))
        assert (readers(cluster), renewing()) == ([], [])
    assert reader.seen == [[1], [1], [2], [2]]
    assert cluster.answers.count(pb.OpenCheckpointRequest) == 2


def test_the_checkpoint_all_ranks_load_is_kept_not_the_one_found_here(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = StrataReader(tmp_path, step=1, client=cluster.port(0))
    other.read_metadata()
    assert other._found is not None
    chosen = other._found.checkpoint
    other.reset()

    class LiveReports(Watched):
        def prepare_global_plan(self, plans: Any) -> Any:
            for plan in super().prepare_global_plan(plans):
                object.__setattr__(plan, "storage_data", chosen)
                plans_made.append(plan)
            return plans_made

    plans_made: list[Any] = []
    reader, state = LiveReports(cluster, tmp_path, step=2), a_state(0)
    dcp_load(state, storage_reader=reader, planner=JsonLoadPlanner())
    assert flat(state) == flat(a_state(1))
    assert reader.seen == [[2], [1]]
    assert (readers(cluster), renewing()) == ([], [])


def test_a_failed_load_leaves_no_reader_lease(cluster: Cluster, tmp_path: Path) -> None:
    class Interrupted(Watched):
        def _read(self, *args: Any) -> None:
            super()._read(*args)
            raise KeyboardInterrupt

    interrupted = Interrupted(cluster, tmp_path, step=1)
    with pytest.raises(CheckpointException, match="KeyboardInterrupt"):
        dcp_load(a_state(0), storage_reader=interrupted, planner=JsonLoadPlanner())
    flip(tmp_path, 2)
    damaged = Watched(cluster, tmp_path, step=2, corrupt_wait_s=0.1)
    with pytest.raises(CheckpointException, match="step 2 is corrupt"):
        dcp_load(a_state(0), storage_reader=damaged, planner=JsonLoadPlanner())
    (document,) = tmp_path.glob("**/step-000000000001-*/rank-00000.json")
    document.write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="step 1 is corrupt"):
        StrataReader(tmp_path, step=1, client=cluster.port(0), corrupt_wait_s=0.1).read_metadata()
    assert (interrupted.seen, damaged.seen) == ([[1], [1]], [[2], [2]])
    assert (readers(cluster), renewing()) == ([], [])


def test_a_load_without_coordinators_takes_no_lease(tmp_path: Path) -> None:
    save(tmp_path, a_state(1), 1)
    reader = StrataReader(tmp_path)
    reader.read_metadata()
    assert renewing() == []


def test_a_load_continues_without_a_coordinator_and_retries_its_lease(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(upkeep, "ASK_S", 0.1)
    monkeypatch.setattr(reader_lease, "RENEW_S", 0.001)
    opened = threading.Event()

    class Waiting(StrataReader):
        def _read(self, *args: Any) -> None:
            cluster.on_call = on_request
            assert opened.wait(LIMIT_S)
            cluster.down = lost
            super()._read(*args)

    def away(request: object) -> None:
        if isinstance(request, pb.OpenCheckpointRequest):
            raise Unavailable("nobody is there")

    def on_request(request: object) -> None:
        if cluster.answers and cluster.answers[-1] is pb.OpenCheckpointRequest:
            opened.set()

    for lost in (False, True):
        cluster.on_call, state = away, a_state(0)
        reader = Waiting(tmp_path, step=2, client=cluster.port(0))
        dcp_load(state, storage_reader=reader, planner=JsonLoadPlanner())
        assert flat(state) == flat(a_state(2))
        assert "step 2 is read without a lease for now: nobody is there" in caplog.text
        assert lost or readers(cluster) == []
        assert renewing() == []
        opened.clear()


def marks(cluster: Cluster, step: int) -> None:
    """Mark a step for deletion just before its next reader is registered."""

    def on_call(request: object) -> None:
        if isinstance(request, pb.OpenCheckpointRequest):
            cluster.on_call = lambda request: None
            cluster.call(pb.DeleteCheckpointRequest(step=step, attempt=request.attempt))

    cluster.on_call = on_call


def test_a_checkpoint_marked_for_deletion_when_found_is_not_loaded(cluster: Cluster, tmp_path: Path) -> None:
    marks(cluster, 1)
    with pytest.raises(CheckpointException, match="step 1 is deleting"):
        load(tmp_path, a_state(0), step=1, client=cluster.port(0))
    with pytest.raises(CheckpointException, match="no checkpoint of step 1 is committed"):
        load(tmp_path, a_state(0), step=1, client=cluster.port(0))
    assert (readers(cluster), renewing()) == ([], [])


def closings(cluster: Cluster) -> threading.Event:
    closed = threading.Event()

    def on_request(request: object) -> None:
        if isinstance(request, pb.CloseCheckpointRequest):
            closed.set()

    cluster.on_call = on_request
    return closed


def test_a_found_but_unread_checkpoint_is_kept_as_long_as_its_reader(
    cluster: Cluster, tmp_path: Path
) -> None:
    closed = closings(cluster)
    reader = StrataReader(tmp_path, step=1, client=cluster.port(0))
    reader.read_metadata()
    assert readers(cluster) == [1]
    del reader
    gc.collect()
    assert closed.wait(LIMIT_S)
