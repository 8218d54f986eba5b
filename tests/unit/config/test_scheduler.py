"""The identity of a member that Slurm or Kubernetes started."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.config import RunConfig
from strata.config.scheduler import allocation, run_identity
from strata.errors import ConfigError

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "3",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "8",
    "SLURM_STEP_NUM_TASKS": "8",
}
INDEXED = {"JOB_COMPLETION_INDEX": "12", "HOSTNAME": "gpt-small-12"}


def loaded(env: dict[str, str], path: Path | None = None, **flags: int) -> RunConfig:
    return RunConfig.load(flags=flags, env=env, path=path)


def test_slurm_sets_the_job_the_member_and_the_number_of_workers() -> None:
    config = loaded(SLURM)
    assert (config.job, config.worker_id) == ("slurm-4711", "node-3")
    assert (config.min_workers, config.max_workers) == (8, 8)


def test_a_requeued_slurm_job_is_the_same_one() -> None:
    first, again = allocation(SLURM), allocation({**SLURM, "SLURM_RESTART_COUNT": "2"})
    assert first is not None
    assert again is not None
    assert (first.restarts, again.restarts) == (0, 2)
    assert first.defaults() == again.defaults()


@pytest.mark.parametrize(
    ("changes", "worker", "members"),
    [
        ({"SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "16"}, "node-3-1", 16),
        ({"SLURM_STEP_NUM_TASKS": ""}, "node-3", 8),
        ({"SLURM_STEP_NUM_TASKS": "", "SLURM_NNODES": "", "SLURM_NODEID": ""}, "node-0", 1),
    ],
    ids=["two a node", "no step", "no more than the id"],
)
def test_other_slurm_launches_give_worker_and_member_count(
    changes: dict[str, str], worker: str, members: int
) -> None:
    config = loaded({**SLURM, **changes})
    assert (config.worker_id, config.min_workers) == (worker, members)


@pytest.mark.parametrize("host", ["gpt-small-12", "gpt-small-12-x7k2p"])
def test_a_pod_of_an_indexed_job_has_its_job_and_its_index(host: str) -> None:
    config = loaded({**INDEXED, "HOSTNAME": host})
    assert (config.job, config.worker_id) == ("gpt-small", "pod-12")
    assert (config.min_workers, config.max_workers) == (1, 0), "which only the user knows"


@pytest.mark.parametrize("env", [{}, {"SLURM_NODEID": "3"}, {**INDEXED, "HOSTNAME": "elsewhere"}])
def test_outside_a_scheduler_nothing_is_guessed(env: dict[str, str]) -> None:
    assert allocation(env) is None
    assert (loaded(env).job, loaded(env).run_id) == ("", "")


def test_a_requeued_slurm_job_is_the_same_run() -> None:
    assert loaded(SLURM).run_id == loaded({**SLURM, "SLURM_RESTART_COUNT": "2"}).run_id == "slurm-4711"


def test_a_pod_takes_its_run_id_from_the_environment_of_the_manifest() -> None:
    assert loaded(INDEXED).run_id == ""
    assert loaded({**INDEXED, "STRATA_RUN_ID": "8f3c"}).run_id == "8f3c"
    assert loaded({**SLURM, "STRATA_RUN_ID": "8f3c"}).run_id == "8f3c", "what a person says counts more"


def test_explicit_settings_override_those_of_the_scheduler(tmp_path: Path) -> None:
    file = tmp_path / "strata.toml"
    file.write_text('job = "of-file"\n[run]\nmin_workers = 2\n')
    config = loaded({**SLURM, "STRATA_WORKER_ID": "of-env"}, path=file, max_workers=5)
    assert (config.job, config.worker_id) == ("of-file", "of-env")
    assert (config.min_workers, config.max_workers) == (2, 5)


@pytest.mark.parametrize("flags", [{"min_workers": 9}, {"max_workers": 4}])
def test_a_count_that_contradicts_the_scheduler_s_is_refused(flags: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="below") as refused:
        RunConfig.load(flags=flags, env=SLURM)
    assert "Slurm" in refused.value.hint
    assert loaded(SLURM, min_workers=4).max_workers == 8, "an elastic job within the allocation"


@pytest.mark.parametrize("name", ["SLURM_NODEID", "SLURM_NNODES"])
def test_a_variable_that_is_not_a_number_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        loaded({**SLURM, "SLURM_STEP_NUM_TASKS": "", name: "many"})


@pytest.mark.parametrize(
    ("env", "identity"),
    [
        ({}, ""),
        ({"TORCHELASTIC_RUN_ID": "0b6f"}, ""),
        ({"TORCHELASTIC_RUN_ID": "0b6f", "SLURM_JOB_ID": "4711"}, "slurm-4711"),
        ({"STRATA_RUN_ID": "8f3c", "SLURM_JOB_ID": "4711"}, "8f3c"),
    ],
)
def test_a_member_without_an_agent_knows_its_run_by_its_environment(
    env: dict[str, str], identity: str
) -> None:
    assert run_identity(env) == identity
