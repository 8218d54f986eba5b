"""The environment variables of a rank's process."""

from __future__ import annotations

import json

from strata.agent.environment import Place, rank_environment
from strata.v1.worlds_pb2 import RestorePoint, World, WorldMember


def place(*, restore: RestorePoint | None = None) -> Place:
    return Place(
        job="gpt",
        worker_id="node-2",
        world=World(generation=5, size=12, members=2, restore=restore),
        member=WorldMember(worker_id="node-2", incarnation=99, group_rank=1, slots=8, first_rank=4),
        master_addr="192.0.2.1",
        master_port=4711,
        socket="/run/strata/s",
        endpoints="a:1,b:2",
        detect_s=2.5,
    )


def test_a_rank_environment_has_the_names_of_torch_and_strata() -> None:
    assert rank_environment(
        place(),
        local_rank=3,
        inherited={"PATH": "/bin"},
        restarts=2,
        stacks="/run/strata/1",
        restart="process",
    ) == {
        "PATH": "/bin",
        "OMP_NUM_THREADS": "1",
        "RANK": "7",
        "WORLD_SIZE": "12",
        "LOCAL_RANK": "3",
        "LOCAL_WORLD_SIZE": "8",
        "GROUP_RANK": "1",
        "GROUP_WORLD_SIZE": "2",
        "ROLE_RANK": "7",
        "ROLE_WORLD_SIZE": "12",
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "4711",
        "TORCHELASTIC_RUN_ID": "gpt",
        "TORCHELASTIC_RESTART_COUNT": "2",
        "GRPC_ENABLE_FORK_SUPPORT": "0",
        "STRATA_JOB": "gpt",
        "STRATA_WORKER_ID": "node-2",
        "STRATA_INCARNATION": "99",
        "STRATA_GENERATION": "5",
        "STRATA_SOCKET": "/run/strata/s",
        "STRATA_ENDPOINTS": "a:1,b:2",
        "STRATA_DETECT_S": "2.5",
        "STRATA_TRAIN_PREEMPT": "job",
        "STRATA_TRAIN_PREEMPT_GRACE_S": "25.0",
        "STRATA_STACKS": "/run/strata/1",
        "STRATA_RESTART": "process",
    }


def test_the_agents_own_settings_are_not_passed_to_its_ranks() -> None:
    inherited = {
        "STRATA_RUN_SLOTS": "8",
        "STRATA_RESTORE": "stale",
        "STRATA_AUTH_TOKEN_FILE": "t",
        "STRATA_INSECURE": "1",
        "STRATAGEM": "x",
        "STRATA_TRAIN_STORAGE": "/shared",
    }
    found = rank_environment(
        place(), local_rank=0, inherited=inherited, restarts=0, stacks="", restart="process"
    )
    assert "STRATA_RUN_SLOTS" not in found
    assert "STRATA_RESTORE" not in found
    assert "STRATA_AUTH_TOKEN_FILE" not in found  # the agent speaks to coordinators for its ranks
    assert found["STRATA_INSECURE"] == "1"
    assert found["STRATAGEM"] == "x"
    assert found["STRATA_TRAIN_STORAGE"] == "/shared"  # the training's own settings


def test_a_thread_count_set_by_the_user_is_kept() -> None:
    found = rank_environment(
        place(), local_rank=0, inherited={"OMP_NUM_THREADS": "4"}, restarts=0, stacks="", restart="process"
    )
    assert found["OMP_NUM_THREADS"] == "4"


def test_the_point_to_restore_from_is_json() -> None:
    point = RestorePoint(step=40, attempt="a1", record_generation=4, path="file:///c/x", manifest_digest="d")
    found = rank_environment(
        place(restore=point), local_rank=0, inherited={}, restarts=0, stacks="", restart="process"
    )
    assert json.loads(found["STRATA_RESTORE"]) == {
        "step": 40,
        "attempt": "a1",
        "record_generation": 4,
        "path": "file:///c/x",
        "manifest_digest": "d",
    }


def test_ranks_are_global_numbers() -> None:
    assert list(place().ranks) == [4, 5, 6, 7, 8, 9, 10, 11]
    assert place().generation == 5
