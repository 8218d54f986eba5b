"""Tensors that are equal on all ranks are written once per save, all others by each rank; every save decides again."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.client.checkpoints import exchange
from strata.client.checkpoints.manager import CheckpointInfo, CheckpointManager
from strata.core.checkpoints.lifecycle import COMPARE_BARRIER
from strata.core.kv.records import CheckpointState, CheckpointType
from strata.errors import CheckpointAborted, CheckpointError, StrataError
from tests.unit.checkpoint.ports import Cluster, state_of
from tests.unit.client.coordinated import managers
from tests.unit.core.rig import carry_out, leave, register

LIMIT_S = 20
AS_RANKS: dict[str, Any] = {"restore": True, "capture_rng": False}
LARGE = 3 * CHUNK_BYTES + 8


@pytest.fixture
def cluster() -> Cluster:
    return Cluster(a=1, b=1, c=1)


def state_of_rank(rank: int, *, seed: int = 0, differs: Sequence[str] = ()) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    state: dict[str, Any] = {
        "model": {
            "large": random.integers(0, 255, LARGE, np.uint8),
            "bias": random.random(100),
            "running_mean": random.random(10),
        },
        "optim": {"state": {0: random.integers(0, 255, LARGE, np.uint8)}, "lr": 0.1},
        "rank": rank,
    }
    for path in differs:
        group, name = path.split(".")
        state[group][name][-1] += rank + 1
    return state


def empty() -> dict[str, Any]:
    zeros = np.zeros(LARGE, np.uint8)
    model = {"large": zeros, "bias": np.zeros(100), "running_mean": np.zeros(10)}
    return {"model": model, "optim": {"state": {0: zeros.copy()}, "lr": 0.0}, "rank": -1}


def tensors_bytes(state: Mapping[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in (*state["model"].values(), *state["optim"]["state"].values()))


def save(
    ranks: Sequence[CheckpointManager],
    step: int,
    states: Sequence[Mapping[str, Any]],
    kind: CheckpointType = CheckpointType.FULL,
) -> int:
    """Save on every rank; return the total size in bytes of all ranks' images."""
    infos = [
        manager.save_state(states[rank], step, checkpoint_type=kind) for rank, manager in enumerate(ranks)
    ]
    for info in infos:
        info.wait(LIMIT_S)
    for manager in ranks:
        manager.wait_until_finished(LIMIT_S)
    return infos[0].size_bytes


def assert_restored(
    ranks: Sequence[CheckpointManager], step: int, states: Sequence[Mapping[str, Any]]
) -> None:
    for rank, manager in enumerate(ranks):
        here = empty()
        manager.restore(here, step=step)
        for group, name in (("model", "large"), ("model", "bias"), ("model", "running_mean")):
            assert np.array_equal(here[group][name], states[rank][group][name]), (rank, group, name)
        assert np.array_equal(here["optim"]["state"][0], states[rank]["optim"]["state"][0])
        assert (here["rank"], here["optim"]["lr"]) == (rank, 0.1)


@pytest.mark.parametrize("kind", [CheckpointType.FULL, CheckpointType.INCREMENTAL])
def test_tensors_may_be_equal_in_one_save_and_different_in_the_next(
    cluster: Cluster, tmp_path: Path, kind: CheckpointType
) -> None:
    differs = [[], ["model.large", "model.running_mean"], ["model.running_mean"], []]
    saved = [
        [state_of_rank(rank, seed=seed, differs=paths) for rank in range(3)]
        for seed, paths in zip([0, 0, 1, 1], differs, strict=True)
    ]
    once = tensors_bytes(saved[0][0])
    headers = 3 * 8192
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        for step, states in enumerate(saved, 1):
            size_bytes = save(ranks, step, states, kind)
            if kind is CheckpointType.FULL:
                more = sum(
                    2 * states[0]["model"][path.partition(".")[2]].nbytes for path in differs[step - 1]
                )
                assert once + more <= size_bytes <= once + more + headers
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        for step, states in enumerate(saved, 1):
            assert_restored(ranks, step, states)


def test_ranks_share_the_writing_of_equal_tensors_and_hash_them_once(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        save(ranks, 1, [state_of_rank(rank) for rank in range(3)])
    images = [path.stat().st_size for path in sorted(tmp_path.glob("job/step-*/*.safetensors"))]
    assert sum(images) <= 1.02 * tensors_bytes(state_of_rank(0))
    assert max(images) <= 3 * CHUNK_BYTES + 8192
    messages = [message for message in cluster.rounds.messages if message]
    assert len(messages) == 3
    assert max(map(len, messages)) <= 64, "one digest, where all is equal"


def test_bytes_and_parts_of_a_state_are_written_once_too(cluster: Cluster, tmp_path: Path) -> None:
    states = [state_of_rank(rank) for rank in range(3)]
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        size_bytes = save(ranks, 1, states, CheckpointType.MODEL_ONLY)
        assert size_bytes <= 1.02 * (LARGE + 880) + 3 * 4096
        infos = [manager.save(b"weights" * 1000, 2) for manager in ranks]
        assert infos[0].wait(LIMIT_S).size_bytes <= 7000 + 3 * 4096
        for info in infos:
            info.wait(LIMIT_S)
        infos = [manager.save(b"of rank %d" % rank, 3) for rank, manager in enumerate(ranks)]
        for info in infos:
            info.wait(LIMIT_S)
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        for rank, manager in enumerate(ranks):
            assert manager.load_bytes(2) == b"weights" * 1000
            assert manager.load_bytes(3) == b"of rank %d" % rank


def test_a_rank_beyond_the_saving_world_restores_the_equal_tensors(cluster: Cluster, tmp_path: Path) -> None:
    states = [state_of_rank(rank, differs=["model.running_mean"]) for rank in range(3)]
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        save(ranks, 1, states)
    job = cluster.job
    leave(job.store, "b")
    register(job.store, "b", slots=2)
    job.close()
    carry_out(job.store, job.epoch, settled=True)
    with managers(cluster, tmp_path, **AS_RANKS, ranks=4) as ranks:
        here = empty()
        del here["model"]["running_mean"], here["rank"]
        with pytest.raises(CheckpointError, match=r"model\.running_mean differs between the 3 ranks"):
            ranks[3].restore(here)
        ranks[3].restore(here, of_rank_0={"model.running_mean"})
        assert np.array_equal(here["model"]["large"], states[0]["model"]["large"])


def test_the_trainer_does_not_wait_for_other_ranks(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        begun = time.monotonic()
        infos = [ranks[0].save_state(state_of_rank(0), 1)]
        assert infos[0].staged
        assert time.monotonic() - begun < LIMIT_S / 2
        time.sleep(0.1)
        infos += [manager.save_state(state_of_rank(rank), 1) for rank, manager in enumerate(ranks) if rank]
        for info in infos:
            info.wait(LIMIT_S)
        assert info.compared_s > 0


def test_a_rank_that_cannot_save_frees_those_that_wait_to_compare(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        infos = [manager.save_state(state_of_rank(rank), 1) for rank, manager in enumerate(ranks[:2])]
        with pytest.raises(CheckpointError, match="which cannot be saved"):
            ranks[2].save_state({"bad": object()}, 1)
        for info in infos:
            with pytest.raises(CheckpointAborted, match="rank 2"):
                info.wait(LIMIT_S)
        assert state_of(cluster, 1) is CheckpointState.ABORTED
        states = [state_of_rank(rank) for rank in range(3)]
        assert save(ranks, 1, states) <= 1.02 * tensors_bytes(states[0]), "the same step again"
        assert save(ranks, 2, states) <= 1.02 * tensors_bytes(states[0])


def test_a_save_is_cancelled_while_it_waits_to_compare(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        infos = [manager.save_state(state_of_rank(rank), 1) for rank, manager in enumerate(ranks[:2])]
        infos[0].cancel()
        for info in infos:
            with pytest.raises(CheckpointAborted):
                info.wait(LIMIT_S)
        with pytest.raises(StrataError):
            ranks[2].save_state(state_of_rank(2), 1).wait(LIMIT_S)
        states = [state_of_rank(rank) for rank in range(3)]
        assert save(ranks, 2, states) <= 1.02 * tensors_bytes(states[0])


def test_a_rank_that_does_not_compare_is_named(cluster: Cluster, tmp_path: Path) -> None:
    with managers(cluster, tmp_path, **AS_RANKS, each={1: {"replicated": False}}) as ranks:
        infos = [manager.save_state(state_of_rank(rank), 1) for rank, manager in enumerate(ranks)]
        errors = []
        for info in infos:
            with pytest.raises(StrataError) as raised:
                info.wait(LIMIT_S)
            errors.append(str(raised.value))
    assert any("ranks 1 saved step 1 without comparing" in error for error in errors), errors
    assert state_of(cluster, 1) is CheckpointState.ABORTED


@pytest.mark.parametrize("settings", [{"replicated": False}, {"low_memory": True}])
def test_without_comparison_each_rank_writes_its_own_tensors(
    cluster: Cluster, tmp_path: Path, settings: dict[str, Any]
) -> None:
    states = [state_of_rank(rank) for rank in range(3)]
    sizes: list[CheckpointInfo] = []
    with managers(cluster, tmp_path, **AS_RANKS, **settings) as ranks:
        threads = [
            threading.Thread(
                target=lambda r=rank: sizes.append(ranks[r].save_state(states[r], 1).wait(LIMIT_S))
            )
            for rank in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sizes[0].size_bytes >= 3 * tensors_bytes(states[0])
        assert not any(key[0] == COMPARE_BARRIER for key in cluster.rounds.arrived)
    with managers(cluster, tmp_path, **AS_RANKS) as ranks:
        assert_restored(ranks, 1, states)


def test_tensors_that_are_declared_replicated_must_be_equal(cluster: Cluster, tmp_path: Path) -> None:
    states = [state_of_rank(rank, differs=["model.bias"]) for rank in range(3)]
    with managers(cluster, tmp_path, **AS_RANKS, replicated=["optim"]) as ranks:
        assert save(ranks, 1, states) <= 1.02 * tensors_bytes(states[0])
        infos = [
            manager.save_state(states[rank], 2, replicated=["model"]) for rank, manager in enumerate(ranks)
        ]
        with pytest.raises(CheckpointError, match=r"model\.bias differs between rank 0 and rank 1"):
            infos[0].wait(LIMIT_S)
        for info in infos[1:]:
            with pytest.raises(StrataError):
                info.wait(LIMIT_S)


def test_a_plan_that_differs_between_ranks_is_never_committed(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a message were altered in transit, one rank would consider a tensor equal, and the other ranks would not."""
    states = [state_of_rank(rank, differs=["model.large"]) for rank in range(3)]
    original = exchange.RankExchange.__call__

    def lying(self: Any, record: Any, stage: int, message: bytes, **more: Any) -> Sequence[bytes]:
        answers = original(self, record, stage, message, **more)
        return [message] * len(answers) if stage == 0 and self._port.rank == 1 else answers

    monkeypatch.setattr(exchange.RankExchange, "__call__", lying)
    with managers(cluster, tmp_path, **AS_RANKS, commit_timeout_s=3) as ranks:
        infos = [manager.save_state(states[rank], 1) for rank, manager in enumerate(ranks)]
        for info in infos:
            with pytest.raises(StrataError):
                info.wait(LIMIT_S)
    assert state_of(cluster, 1) is CheckpointState.ABORTED
