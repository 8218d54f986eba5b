"""`CheckpointManager` with coordinators, reduced to the catalog's decisions."""

from __future__ import annotations

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.checkpoint.copies.far_copy import Replica
from strata.checkpoint.format.marker import NAME as MARKER
from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.checkpoints.manager import CheckpointManager
from strata.client.checkpoints.tiers import TIER, CopyReports
from strata.core.kv.records import CheckpointState, CheckpointType, TierState
from strata.errors import (
    CheckpointAborted,
    CheckpointCorrupt,
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    Conflict,
    PermissionDenied,
    QuotaExceeded,
    Refused,
    StaleGeneration,
    StorageError,
    StrataError,
    Unavailable,
)
from strata.v1 import checkpoints_pb2 as pb
from tests.unit.checkpoint.ports import Cluster, Port, state_of
from tests.unit.client.coordinated import LIMIT_S, managers
from tests.unit.core.rig import JOB

if TYPE_CHECKING:
    from strata.client.checkpoints.catalog import CoordinatedCatalog


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=1, b=1)


def save(managers: list[CheckpointManager], step: int, **state: Any) -> None:
    infos = [m.save_state({"rank": rank, **state}, step) for rank, m in enumerate(managers)]
    for info in infos:
        info.wait(LIMIT_S)
    for manager in managers:
        manager.wait_until_finished(LIMIT_S)


def folders(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("job/step-*"))


def test_all_ranks_commit_together(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as ranks:
        infos = [m.save_state({"w": np.full(2, i)}, 20, epoch=1) for i, m in enumerate(ranks)]
        assert not any(info.wait(LIMIT_S).error for info in infos)
        assert infos[0].path == infos[1].path
        (folder,) = folders(tmp_path)
        assert infos[0].path == f"{(tmp_path / 'job').as_uri()}/{folder}"
        files = sorted(path.name for path in (tmp_path / "job" / folder).iterdir())
        assert files == [
            MARKER,
            "manifest.json",
            "rank-00000.json",
            "rank-00000.safetensors",
            "rank-00001.json",
            "rank-00001.safetensors",
        ]
        (record,) = cluster.records()
        assert (record.state, record.epoch) == (CheckpointState.COMMITTED, 1)
        assert record.size_bytes == infos[0].size_bytes
        assert ranks[1].latest_step() == 20
        assert ranks[0].all_steps() == [20]


def test_each_rank_restores_its_own_state_from_the_restore_point(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as ranks:
        save(ranks, 20, w=np.ones(2))
    cluster.next_world()
    with managers(cluster, tmp_path, restore=True) as ranks:
        for rank, manager in enumerate(ranks):
            state: dict[str, Any] = {"rank": None, "w": np.zeros(2)}
            found = manager.restore(state)
            assert found is not None
            assert (found.step, state["rank"], state["w"].sum()) == (20, rank, 2)
        save(ranks, 40)


def test_a_world_starts_from_its_restore_point_not_from_the_newest_on_disk(
    cluster: Cluster, tmp_path: Path
) -> None:
    with managers(cluster, tmp_path) as ranks:
        save(ranks, 20)
    with managers(cluster, tmp_path) as ranks:
        assert ranks[0].restore({"rank": None}) is None


def test_a_restore_from_the_wrong_storage_path_names_the_right_one(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path / "one") as ranks:
        save(ranks, 20)
    with (
        managers(cluster, tmp_path / "other", restore=True) as ranks,
        pytest.raises(CheckpointNotFound, match=r"was saved to file:.*/one/job/step-"),
    ):
        ranks[0].restore({"rank": None})


def test_a_restoring_rank_writes_the_missing_marker_of_a_commit(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as ranks:
        save(ranks, 20)
    (marker,) = tmp_path.glob(f"job/*/{MARKER}")
    written = marker.read_bytes()
    marker.unlink()
    with managers(cluster, tmp_path, restore=True) as ranks:
        ranks[1].restore({"rank": None})
    assert marker.read_bytes() == written


def test_a_failure_of_one_rank_fails_the_save_of_all_and_the_next_works(
    cluster: Cluster, tmp_path: Path
) -> None:
    def full(info: object) -> None:
        raise StorageError("disk full")

    with managers(cluster, tmp_path) as ranks:
        infos = [
            m.save_state({"w": np.ones(1)}, 20, progress=full if rank else None)
            for rank, m in enumerate(ranks)
        ]
        with pytest.raises(CheckpointAborted, match="rank 1: disk full"):
            infos[0].wait(LIMIT_S)
        with pytest.raises(StorageError):
            infos[1].wait(LIMIT_S)
        assert ranks[0].latest_step() is None
        save(ranks, 20)
        save(ranks, 40)
        assert ranks[0].all_steps() == [20, 40]


def test_a_rank_that_does_not_come_is_named(cluster: Cluster, tmp_path: Path) -> None:
    with (
        managers(cluster, tmp_path, commit_timeout_s=0.3, save_grace_s=0) as ranks,
        pytest.raises(Unavailable, match=r"ranks \[1\] are late"),
    ):
        ranks[0].save_state({"a": 1}, 20).wait(LIMIT_S)
    assert state_of(cluster, 20) is CheckpointState.ABORTED


# -- another number of ranks ------------------------------------------------------------------


def test_each_ranks_text_at_a_key_is_read_from_the_manifests_alone(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as ranks:
        infos = [
            manager.save_state({"own": {"text": f"of {rank}", "w": np.zeros(3)}}, 20)
            for rank, manager in enumerate(ranks)
        ]
        for info in infos:
            info.wait(LIMIT_S)
        (checkpoint,) = ranks[1].all_checkpoints()
        assert ranks[1].texts_of_ranks(checkpoint, "own", "text") == {0: "of 0", 1: "of 1"}
        assert ranks[1].texts_of_ranks(checkpoint, "own", "w") == {}
        assert ranks[1].texts_of_ranks(checkpoint, "gone", "text") == {}


def test_additional_ranks_take_over_the_values_of_rank_0_below_a_path(
    cluster: Cluster, tmp_path: Path
) -> None:
    with managers(cluster, tmp_path) as ranks:
        for info in [
            manager.save_state({"own": {"loader": {"at": rank, "seen": [rank]}}}, 20)
            for rank, manager in enumerate(ranks)
        ]:
            info.wait(LIMIT_S)
    point = cluster.restore_point()
    with CheckpointManager(tmp_path, client=Cluster(a=1, b=1, c=1).port(2, restore=point)) as manager:
        state: dict[str, Any] = {"own": {}}
        with pytest.raises(CheckpointError, match=r"own\.loader\.at differs between the 2 ranks"):
            manager.restore(state, of_rank_0={"own.load", "loader"})
        manager.restore(state, of_rank_0={"own.loader"})
        assert state == {"own": {"loader": {"at": 0, "seen": [0]}}}


# -- corruption and going back ----------------------------------------------------------------


def test_one_rank_alone_does_not_fall_back(cluster: Cluster, tmp_path: Path) -> None:
    """The other ranks would restore another step: one restore point holds for all ranks of a world."""
    with managers(cluster, tmp_path) as ranks:
        save(ranks, 20, w=np.ones(4))
        save(ranks, 40, w=np.ones(4))
    image = max(tmp_path.glob("job/*/rank-00001.safetensors"))
    copy = image.read_bytes()
    image.write_bytes(copy[:-1] + b"?")
    with managers(cluster, tmp_path, restore=True, corrupt_wait_s=0.1) as ranks:
        with pytest.raises(CheckpointCorrupt, match="rank-00001") as error:
            ranks[1].restore({"w": np.zeros(4)})
        assert "from a copy" in error.value.hint
        assert "a job of another name" in error.value.hint
        assert ranks[0].restore({"w": np.zeros(4)}) is not None
    image.write_bytes(copy)
    with managers(cluster, tmp_path, restore=True) as ranks:
        assert ranks[1].restore({"w": np.zeros(4)}) is not None, "the hint's first way out"
    other = Cluster(a=1).port(0)
    other.job = "other"
    with CheckpointManager(tmp_path, client=other) as manager:
        assert manager.restore({"w": np.zeros(4)}) is None, "the hint's second way out"
        save([manager], 10)


def test_going_back_by_hand_stops_saving_in_this_generation(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as ranks:
        save(ranks, 20)
        save(ranks, 40)
        state: dict[str, Any] = {"rank": None}
        assert ranks[0].restore(state, step=20) is not None
        with pytest.raises(CheckpointError, match="restored by hand"):
            ranks[0].save_state(state, 60)


def test_loading_a_partial_checkpoint_does_not_stop_saves(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as ranks:
        for info in [m.save_state({"model": np.ones(2)}, 20, 0, "model_only") for m in ranks]:
            info.wait(LIMIT_S)
        assert cluster.restore_point() is None, "no world begins from a part"
        state = {"model": np.zeros(2)}
        for manager in ranks:
            manager.restore(state, step=20)
        assert state["model"].tolist() == [1, 1]
        save(ranks, 40)


# -- retention --------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [True, False], ids=["its slot was taken again", "another step was saved"])
@pytest.mark.parametrize("marked", [True, False])
def test_leftovers_of_an_aborted_save_are_removed_unless_storage_has_its_marker(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, marked: bool, again: bool
) -> None:
    def full(info: object) -> None:
        raise StorageError("disk full")

    with managers(cluster, tmp_path) as ranks:
        for info in [m.save_state({"w": np.ones(1)}, 20, progress=full) for m in ranks]:
            with pytest.raises((StorageError, CheckpointAborted)):
                info.wait(LIMIT_S)
        left = tmp_path / "job" / cluster.records()[0].path.rpartition("/")[2]
        left.mkdir(exist_ok=True)
        (left / (MARKER if marked else "rank-00000.json")).write_text("of an attempt before")
        save(ranks, 20 if again else 40)
    assert left.exists() is marked
    assert ("is marked as committed" in caplog.text) is marked
    assert (CheckpointState.ABORTED in {r.state for r in cluster.records()}) is (marked and not again)
    assert len(folders(tmp_path)) == 1 + marked


# -- ownership of a storage root --------------------------------------------------------------


def test_a_root_is_of_one_mode_and_a_jobs_folder_of_one_cluster(cluster: Cluster, tmp_path: Path) -> None:
    port: Port = cluster.port(0)
    CheckpointManager(tmp_path, client=port).close()
    with pytest.raises(ConfigError, match="names coordinated"):
        CheckpointManager(tmp_path)
    port.uid = "uid-2"
    with pytest.raises(ConfigError, match="uid-1/job"):
        CheckpointManager(tmp_path, client=port)
    alone = tmp_path / "alone"
    with CheckpointManager(alone) as manager:
        manager.save(b"x", 1)
    with pytest.raises(ConfigError, match="names standalone"):
        CheckpointManager(alone, client=port)
    port.uid = ""
    with pytest.raises(ConfigError, match="does not know its cluster"):
        CheckpointManager(tmp_path, client=port)


def test_a_synchronous_save_returns_when_all_ranks_have_it(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path) as (one, other):
        arrived = threading.Event()
        done: list[bool] = []

        def first() -> None:
            arrived.set()
            done.append(one.save_state({"a": 1}, 20, sync=True).committed)

        thread = threading.Thread(target=first)
        thread.start()
        assert arrived.wait(LIMIT_S)
        assert not cluster.records(), "nothing is begun before all are there"
        assert other.save_state({"a": 1}, 20, sync=True).committed
        thread.join(LIMIT_S)
        assert done == [True]
        assert one.latest_step() == other.latest_step() == 20


# -- a second storage -------------------------------------------------------------------------


def test_a_copy_becomes_a_tier_of_the_record_and_outlives_the_first_storage(
    cluster: Cluster, tmp_path: Path
) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    with managers(cluster, near, replica_path=far) as both:
        save(both, 10, weights=np.arange(4.0))
        for manager in both:
            manager.wait_until_replicated(LIMIT_S)
    (record,) = cluster.records()
    assert {name: (tier.state, tier.shared) for name, tier in record.tiers.items()}["replica"] == (
        TierState.PRESENT,
        True,
    )
    assert record.tiers["replica"].path.startswith(far.as_uri())
    shutil.rmtree(near)
    with managers(cluster, near, restore=True, replica_path=far) as both:
        for rank, manager in enumerate(both):
            state: dict[str, Any] = {"rank": -1, "weights": np.zeros(4)}
            assert manager.restore(state) is not None
            assert state["rank"] == rank
            assert list(state["weights"]) == [0.0, 1.0, 2.0, 3.0]


def test_a_checkpoint_that_is_being_deleted_is_not_copied(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path / "near", replica_path=tmp_path / "far", keep_count=1) as both:
        refused = threading.Event()

        def refuse(request: Message) -> None:
            if isinstance(request, pb.ReportCopyRequest) and request.step == 10:
                refused.set()
                raise Refused("step 10 is deleting, and is not copied any more")

        cluster.on_call = refuse
        save(both, 10, weights=np.arange(4.0))
        save(both, 20, weights=np.arange(4.0))
        for manager in both:
            manager.wait_until_replicated(LIMIT_S)
    assert refused.is_set()
    assert not list((tmp_path / "far").glob("job/step-000000000010-*"))
    assert len(list((tmp_path / "far").glob("job/step-000000000020-*/COMMIT"))) == 1


# -- copies that the coordinators reject: the caller gets the error, and the checkpoint never counts as copied


FROZEN = np.arange(4096.0)
REPLICA = Replica(folder="job/step-20", attempt="x20", manifest_digest="m", step=20)


def incremental(both: list[Any], step: int, become: CheckpointType) -> list[CheckpointInfo]:
    """Save on all ranks as incremental; each checkpoint must end with the type `become`."""
    state = {"frozen": FROZEN, "w": np.full(4, float(step))}
    infos = [manager.save_state(state, step, 0, "incremental") for manager in both]
    for info in infos:
        info.wait(LIMIT_S)
    assert {info.checkpoint_type for info in infos} == {become}
    return infos


@pytest.mark.parametrize("when", ["begun", "sealed"])
def test_an_incremental_whose_base_left_the_tier_fails_to_copy(
    cluster: Cluster, tmp_path: Path, when: str
) -> None:
    with managers(cluster, tmp_path / "near", replica_path=tmp_path / "far") as both:
        incremental(both, 10, CheckpointType.FULL)
        for manager in both:
            manager.wait_until_replicated(LIMIT_S)

        def leave(request: Message) -> None:
            if isinstance(request, pb.ReportCopyRequest) and request.step == 20 and getattr(request, when):
                base = next(r for r in cluster.records() if r.step == 10)
                removed = replace(base.tiers[TIER], state=TierState.REMOVED)
                tiers = {**base.tiers, TIER: removed}
                cluster.job.store.put(JOB.checkpoint(10, base.generation), replace(base, tiers=tiers))

        cluster.on_call = leave
        infos = incremental(both, 20, CheckpointType.INCREMENTAL)
        for manager, info in zip(both, infos, strict=True):
            with pytest.raises(CheckpointError, match="step 10, which step 20 needs, is removed on replica"):
                manager.wait_until_replicated(LIMIT_S)
            assert not info.replicated
        if when == "begun":
            assert not list((tmp_path / "far").glob("job/step-000000000020-*/*")), "nobody would remove it"
        incremental(both, 30, CheckpointType.FULL)
        incremental(both, 40, CheckpointType.INCREMENTAL)
        for manager in both:
            manager.wait_until_replicated(LIMIT_S)
    found = {record.step: TIER in record.tiers for record in cluster.records()}
    assert found == {10: True, 20: False, 30: True, 40: True}


class Refusing:
    def __init__(self, error: StrataError) -> None:
        self.error = error

    def report_copy(self, **copy: Any) -> None:
        raise self.error


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (Refused("step 20 is deleting"), Refused),
        (CheckpointNotFound("no attempt x20"), CheckpointNotFound),
        (StaleGeneration("generation 1 has ended"), StaleGeneration),
        (QuotaExceeded("etcd has no space left"), Unavailable),
        (Conflict("what lies there has digest a"), CheckpointError),
        (PermissionDenied("not for you"), CheckpointError),
    ],
)
def test_a_copy_report_raises_refused_only_if_the_copy_is_not_needed(
    error: StrataError, reported: type[StrataError]
) -> None:
    report = CopyReports(cast("CoordinatedCatalog", Refusing(error)), root="s3://far")
    with pytest.raises(reported, match=error.message) as raised:
        report(REPLICA, begun=True)
    assert isinstance(raised.value, Refused) == (reported in {Refused, StaleGeneration})
