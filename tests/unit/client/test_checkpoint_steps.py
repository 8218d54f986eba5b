"""What a loop asks of a `CheckpointManager` about one step: whether to save it, to delete it, which is best."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import Message

from strata.client.checkpoints import CheckpointManager, CheckpointManagerConfig
from strata.core.checkpoints import decide_pin
from strata.core.records import CheckpointType
from strata.errors import CheckpointNotFound, ConfigError, InvalidArgument, Refused
from tests.unit.checkpoint.ports import Cluster
from tests.unit.client import coordinated

LIMIT_S = 20


def save(manager: CheckpointManager, *steps: int, **more: Any) -> None:
    for step in steps:
        manager.save_state({"w": np.full(1000, float(step)), "stays": np.ones(200_000)}, step, **more).wait(
            LIMIT_S
        )
    manager.wait_until_finished(LIMIT_S)


def folders(root: Path) -> list[int]:
    return sorted(int(path.name.split("-")[1]) for path in root.glob("**/step-*"))


# -- delete -----------------------------------------------------------------------------------


def test_a_deleted_step_is_gone_with_its_bytes(manager: CheckpointManager, tmp_path: Path) -> None:
    save(manager, 1, 2, 3)
    manager.delete(2)
    assert (manager.all_steps(), folders(tmp_path)) == ([1, 3], [1, 3])
    with pytest.raises(CheckpointNotFound, match=r"no checkpoint of step 2 .* there are \[1, 3\]"):
        manager.delete(2)
    with pytest.raises(InvalidArgument):
        manager.delete(-1)


def test_what_is_needed_is_not_deleted(manager: CheckpointManager, tmp_path: Path) -> None:
    save(manager, 1)
    with pytest.raises(Refused, match="step 1 is the newest"):
        manager.delete(1)
    save(manager, 2, checkpoint_type=CheckpointType.INCREMENTAL)
    with pytest.raises(Refused, match="step 1 is used by"):
        manager.delete(1)
    assert (manager.all_steps(), folders(tmp_path)) == ([1, 2], [1, 2])


def test_coordinators_judge_a_deletion_and_this_host_removes_the_bytes(tmp_path: Path) -> None:
    cluster = Cluster(a=1)
    with coordinated.manager(cluster, tmp_path) as manager:
        coordinated.save(manager, 1, 2, 3)
        pinned = next(c for c in manager.all_checkpoints() if c.step == 1)
        cluster.job.store.settle(lambda job: decide_pin(job, step=1, attempt=pinned.id, who="me", why="mine"))
        for step, why in ((1, "pinned"), (3, "latest")):
            with pytest.raises(Refused, match=why):
                manager.delete(step)
        manager.delete(2)
        assert (manager.all_steps(), folders(tmp_path)) == ([1, 3], [1, 3])


# -- best -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 1)])
def test_the_best_step_is_that_of_the_metric(tmp_path: Path, mode: str, best: int) -> None:
    with CheckpointManager(
        tmp_path, keep_count=9, keep_best=2, best_metric="loss", best_mode=mode
    ) as manager:
        assert manager.best_step() is None
        for step, loss in ((1, "0.9"), (2, "0.5"), (3, "0.1"), (4, "nan"), (5, "")):
            save(manager, step, metadata={"loss": loss})
        save(manager, 6)
        assert manager.best_step() == best


def test_without_a_metric_there_is_no_best_step(manager: CheckpointManager) -> None:
    save(manager, 1, metadata={"loss": "1"})
    assert manager.best_step() is None


# -- when to save -----------------------------------------------------------------------------


def test_a_step_is_due_once_and_by_the_interval(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_interval_steps=4) as manager:
        assert [step for step in range(1, 10) if manager.should_save(step)] == [*range(1, 10)], (
            "none is there yet"
        )
        save(manager, 1)
        assert [step for step in range(10) if manager.should_save(step)] == [4, 8]
        save(manager, 4)
        assert [step for step in range(10) if manager.should_save(step)] == [8]
    with CheckpointManager(tmp_path) as again:
        assert [step for step in range(8) if again.should_save(step)] == [5, 6, 7]
        again.restore({"w": np.zeros(1000)}, 1)
        assert again.should_save(2), "what follows was given up"
        assert not again.reached_preemption(2)
    with pytest.raises(ConfigError, match="save_interval_steps must be at least 1"):
        CheckpointManagerConfig(save_interval_steps=0)


def test_ranks_agree_on_what_is_due_whatever_is_committed_meanwhile(tmp_path: Path) -> None:
    cluster = Cluster(a=1)
    with coordinated.manager(cluster, tmp_path) as manager:
        coordinated.save(manager, 1, 2)
        point = cluster.restore_point()
        coordinated.save(manager, 3)
    with CheckpointManager(tmp_path, client=cluster.port(0, restore=point)) as manager:
        assert manager.latest_step() == 3
        assert [step for step in range(5) if manager.should_save(step)] == [3, 4]


def test_a_save_is_in_progress_until_it_is_committed(tmp_path: Path) -> None:
    cluster = Cluster(a=1)
    with coordinated.manager(cluster, tmp_path) as manager:
        assert not manager.is_saving_in_progress()
        held = threading.Event()

        def hold(_request: Message) -> None:
            held.wait(LIMIT_S)

        cluster.on_call = hold
        info = manager.save_state({"w": np.ones(4)}, 1)
        assert manager.is_saving_in_progress()
        held.set()
        info.wait(LIMIT_S)
        manager.wait_until_finished(LIMIT_S)
        assert not manager.is_saving_in_progress()


# -- the original names -----------------------------------------------------------------------


def test_a_configuration_may_be_given_by_its_other_names_and_in_the_first_place(tmp_path: Path) -> None:
    config = CheckpointManagerConfig(storage_backend="local", checkpoint_dir=str(tmp_path), keep_count=5)
    with CheckpointManager(config, keep_count=2) as manager:
        assert (manager.directory, manager.config.keep_count) == (tmp_path, 2)
    with pytest.raises(ConfigError, match="two configurations"):
        CheckpointManager(config, config=config)
    with pytest.raises(ConfigError, match="storage_path is 'a', and checkpoint_dir is 'b'"):
        CheckpointManagerConfig(storage_path="a", checkpoint_dir="b")
    with pytest.raises(ConfigError, match="storage_type is 'nfs'"):
        CheckpointManagerConfig(checkpoint_dir="a", storage_backend="nfs")
