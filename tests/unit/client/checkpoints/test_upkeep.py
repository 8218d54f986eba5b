"""Upkeep of a job's checkpoints by ranks, besides their own saves: retention policy, maintenance tasks, readers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.storage.local_storage import LocalStorage
from strata.client.checkpoints.maintenance import Maintenance
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.checkpoints.references import Keep
from strata.core.checkpoints.retention_plan import retention
from strata.core.kv.records import CheckpointState
from strata.errors import PermissionDenied, Refused, StrataError, Unauthenticated, Unavailable
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.retention_pb2 import SetRetentionRequest
from tests.unit.checkpoint.ports import Cluster, state_of
from tests.unit.client.coordinated import LIMIT_S, manager, managers, save
from tests.unit.core.rig import carry_out, leave, register


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=1)


# -- the retention policy ---------------------------------------------------------------------


def test_retention_rules_are_sent_to_the_coordinator_and_unretained_steps_removed(
    cluster: Cluster, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "keep_count": 1,
        "keep_every_steps": 40,
        "keep_best": 1,
        "best_metric": "loss",
    }
    with manager(cluster, tmp_path, **settings) as ckpt:
        save(ckpt, 10, metadata={"loss": "0.1"})
        save(ckpt, 20, 40, 60, 80, 90, metadata={"loss": "0.5"})
        assert ckpt.all_steps() == [10, 40, 80, 90]
    assert len(list(tmp_path.glob("job/step-*"))) == 4
    held = retention(cluster.view())
    assert held is not None
    assert (held.record.who, held.record.keep.metric) == ("rank 0", "loss")
    assert cluster.answers.count(SetRetentionRequest) == 1


def test_without_a_rule_the_policy_of_the_job_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20)
    assert SetRetentionRequest not in cluster.answers


def test_a_policy_holds_from_the_start_and_an_unlimited_one_replaces_an_older_limit(
    cluster: Cluster, tmp_path: Path
) -> None:
    for keep_count, rules in ((2, Keep(latest=2)), (0, Keep())):
        manager(cluster, tmp_path, keep_count=keep_count).close()
        held = retention(cluster.view())
        assert held is not None
        assert held.record.keep == rules, "before anything was saved"
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20, 30)
        assert ckpt.all_steps() == [10, 20, 30]


def no_policy(why: StrataError) -> Callable[[object], None]:
    """Return a hook that refuses every retention policy with `why`."""

    def on_call(request: object) -> None:
        if isinstance(request, SetRetentionRequest):
            raise why

    return on_call


@pytest.mark.parametrize(
    "why", [Unavailable("nobody is there"), Refused("generation 2 does not exist yet; 1 is current")]
)
def test_a_policy_that_is_rejected_for_now_is_sent_again_later(
    cluster: Cluster, tmp_path: Path, why: StrataError
) -> None:
    """A refused policy fails no save. The second case occurs after etcd was restored from a backup."""

    cluster.on_call = no_policy(why)
    with manager(cluster, tmp_path, keep_count=1) as ckpt:
        save(ckpt, 10)
        cluster.on_call = lambda request: None
        save(ckpt, 20)
        assert ckpt.all_steps() == [20]


@pytest.mark.parametrize(
    "why", [PermissionDenied("role trainer may not SetRetention"), Unauthenticated("who is it?")]
)
def test_a_policy_without_permission_is_an_error_for_its_caller(
    cluster: Cluster, tmp_path: Path, why: StrataError
) -> None:
    """No later attempt can succeed, and without the policy no checkpoint would ever be deleted."""

    cluster.on_call = no_policy(why)
    ckpt = manager(cluster, tmp_path, keep_count=1)
    info = ckpt.save_state({"w": np.ones(3)}, 10)
    with pytest.raises(type(why), match=why.message):
        ckpt.wait_until_finished(LIMIT_S)
    assert info.committed
    cluster.on_call = lambda request: None
    save(ckpt, 20)
    assert ckpt.all_steps() == [20], "once it may be set it is"
    ckpt.close()


def test_rank_0_of_a_generation_that_is_over_does_not_hand_its_rules_over(
    cluster: Cluster, tmp_path: Path
) -> None:
    frozen, leave_off = cluster.port(0), Unavailable("frozen")

    def nobody(request: object) -> None:
        if isinstance(request, SetRetentionRequest):
            raise leave_off

    cluster.on_call = nobody
    with CheckpointManager(tmp_path, client=frozen, keep_count=1) as old:
        save(old, 10)
        cluster.on_call = lambda request: None
        leave(cluster.job.store, "a")
        register(cluster.job.store, "a")
        cluster.job.close()
        carry_out(cluster.job.store, cluster.job.epoch, settled=True)
        with manager(cluster, tmp_path, keep_count=5) as new:
            save(new, 20)
            old.delete(10)  # and removes its bytes, with a pass like the one after a commit
    held = retention(cluster.view())
    assert held is not None
    assert held.record.keep == Keep(latest=5)


def test_the_same_rules_hold_without_coordinators(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep_count=2, keep_every_steps=40) as ckpt:
        for step in (20, 40, 60, 80, 100, 110):
            ckpt.save(b"x", step)
        ckpt.wait_until_finished(LIMIT_S)
        assert ckpt.all_steps() == [40, 80, 100, 110]


# -- maintenance tasks ------------------------------------------------------------------------


def test_a_save_that_storage_has_as_committed_is_adopted_and_not_cleared(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The keyspace is older than the storage, because etcd was restored from a backup."""
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10)
        (entry,) = cluster.view().checkpoints()
        forgotten = dataclasses.replace(
            entry.record, state=CheckpointState.ABORTED, manifest_digest="", size_bytes=0, reason="lost"
        )
        save(ckpt, 20)
        cluster.job.store.put(entry.key, forgotten)
        keys, where = cluster.view().keys, (10, entry.record.generation, entry.record.attempt)
        for key in (keys.ack(*where, 0), keys.seal(*where)):
            cluster.job.store.delete(key)
        save(ckpt, 30)
        assert state_of(cluster, 10) is CheckpointState.COMMITTED
        assert ckpt.restore({"w": np.zeros(4)}, step=10) is not None


def test_a_host_leaves_checkpoints_in_other_storages_alone(cluster: Cluster, tmp_path: Path) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20)
    elsewhere = LocalStorage(tmp_path / "other", nonce=lambda: "n")
    attempt = cluster.records()[0].attempt
    cluster.call(pb.DeleteCheckpointRequest(step=10, attempt=attempt))
    Maintenance(cluster.port(0).call, job="job", host="h", storages=[elsewhere]).collect_garbage()
    assert state_of(cluster, 10) is CheckpointState.DELETING
    assert len(list(tmp_path.glob("job/step-*"))) == 2


def test_another_host_checks_a_corruption_report_and_clears_it(tmp_path: Path) -> None:
    cluster = Cluster(a=1, b=1)
    with managers(cluster, tmp_path) as ranks:
        for info in [m.save_state({"w": np.full(4, 10.0)}, 10) for m in ranks]:
            info.wait(LIMIT_S)
    (record,) = cluster.records()
    cluster.call(pb.ReportDamageRequest(step=10, attempt=record.attempt, host="host-a", reason="a bit"))
    storage = LocalStorage(tmp_path, nonce=lambda: "n")
    Maintenance(cluster.port(1).call, job="job", host="host-b", storages=[storage]).look()
    assert state_of(cluster, 10) is CheckpointState.COMMITTED
    answer = cluster.call(pb.GetCheckpointRequest(step=10, attempt=record.attempt))
    assert not answer.checkpoint.suspected


# -- readers ----------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [10, None])
def test_a_second_restore_of_the_restore_point_opens_it_as_a_reader(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int | None
) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10)
    with manager(cluster, tmp_path, restores=True) as ckpt:
        ckpt.restore({"w": np.zeros(4)})
        assert pb.OpenCheckpointRequest not in cluster.answers
        save(ckpt, 20)
        seen: list[list[str]] = []
        exists = LocalStorage.exists
        record = cluster.records()[0]
        readers = cluster.view().keys.readers(10, record.generation, record.attempt)

        def look(storage: LocalStorage, name: str) -> bool:
            seen.append(cluster.view().view.names(readers))
            return exists(storage, name)

        monkeypatch.setattr(LocalStorage, "exists", look)
        ckpt.restore({"w": np.zeros(4)}, step=step)
        assert [len(names) for names in seen] == [1] * len(seen) != []
        assert cluster.view().view.names(readers) == []


def test_a_restore_by_step_opens_a_reader_and_a_restore_at_the_start_needs_none(
    cluster: Cluster, tmp_path: Path
) -> None:
    with manager(cluster, tmp_path) as ckpt:
        save(ckpt, 10, 20)
    record = cluster.records()[0]
    readers = cluster.view().keys.readers(10, record.generation, record.attempt)
    seen: list[list[str]] = []

    def look(request: object) -> None:
        if isinstance(request, pb.CloseCheckpointRequest):
            seen.append(cluster.view().view.names(readers))

    cluster.on_call = look
    with manager(cluster, tmp_path, restores=True) as ckpt:
        assert ckpt.restore({"w": np.zeros(4)}) is not None
        assert pb.OpenCheckpointRequest not in cluster.answers
        assert ckpt.restore({"w": np.zeros(4)}, step=10) is not None
    assert [len(names) for names in seen] == [1]
    assert cluster.view().view.names(readers) == []
