"""Malformed configuration raises one error at once, which names the file or the setting."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from strata.config import (
    CoordinatorConfig,
    HealthConfig,
    RunConfig,
    TrainingConfig,
    load,
    read_file,
    split_address,
)
from strata.config.scheduler import allocation
from strata.errors import ConfigError
from tests.cluster_fixtures import run_strata
from tests.unit.documents.hostile import put_shape


@pytest.mark.parametrize(
    ("config", "text", "says"),
    [
        (RunConfig, "[run]\nslots = inf", "run.slots in .*strata.toml: a whole number is needed, not inf"),
        (RunConfig, "[run]\nslots = -inf", "run.slots"),
        (RunConfig, "[run]\nslots = nan", "run.slots"),
        (RunConfig, f"[run]\nslots = 0x{'f' * 100_000}", "run.slots .*a number of 400000 bits is too large"),
        (RunConfig, f"[run]\nslots = {'9' * 5000}", "is not TOML: Exceeds the limit"),
        (RunConfig, "[run]\nsettle_s = inf", "run.settle_s in .*: a finite number"),
        (RunConfig, "[run]\nsettle_s = 1e300", "run.settle_s in .*: 1e.300 is too large"),
        (RunConfig, f"[run]\nsettle_s = 0x{'f' * 1000}", "run.settle_s"),
        (RunConfig, "[run]\nstall_limits = ['step=1e300']", "no limit of a phase"),
        (
            CoordinatorConfig,
            "[coordinator]\nmax_jobs = inf",
            "coordinator.max_jobs in .*: a whole number is needed",
        ),
        (
            CoordinatorConfig,
            "[coordinator]\nmax_jobs = 9223372036854775808",
            "coordinator.max_jobs in .*: .* too large",
        ),
        (CoordinatorConfig, f"[coordinator]\nlisten = 'h:{'9' * 5000}'", "is not a port"),
        (CoordinatorConfig, "[tls]\nca_file = '~nobody-at-all/x'", "tls.ca_file in .*home directory"),
        (TrainingConfig, "[train]\nsave_every_s = inf", "train.save_every_s"),
        (RunConfig, "a = " + "[" * 100_000, "is not TOML: it is nested more than 16 deep"),
        (RunConfig, "a." * 50_000 + "b = 1", "is not TOML: a key has more than 32 parts"),
        (RunConfig, "#" * 300_000, "is not TOML: .*at most 262144|at most 262144 are read"),
    ],
)
def test_an_invalid_value_in_a_config_file_is_an_error_that_names_it(
    tmp_path: Path, config: Any, text: str, says: str
) -> None:
    path = tmp_path / "strata.toml"
    path.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=says) as caught:
        config.load(flags={}, env={}, path=path)
    assert len(caught.value.message) < 500
    assert time.process_time() - began < 5


@pytest.mark.timeout(20)
@pytest.mark.parametrize("shape", ["fifo", "zero", "sparse", "socket", "loop", "folder"])
def test_a_config_path_that_is_not_a_readable_file_is_an_error_that_names_it(
    tmp_path: Path, shape: str
) -> None:
    path = tmp_path / "strata.toml"
    put_shape(path, shape)
    with pytest.raises(ConfigError, match=f"cannot read {path}: ") as caught:
        read_file(path)
    assert caught.value.hint


@pytest.mark.parametrize("value", ["inf", "1e999", "9" * 5000, "1e300", "nan"])
def test_an_invalid_number_in_the_environment_is_an_error_that_names_it(value: str) -> None:
    for name in ("STRATA_RUN_SLOTS", "STRATA_RUN_SETTLE_S"):
        with pytest.raises(ConfigError, match=name):
            RunConfig.load(flags={}, env={name: value})
    with pytest.raises(ConfigError):
        RunConfig.load(flags={"slots": float("inf")}, env={})


def test_numbers_within_reason_are_taken() -> None:
    found = load(
        HealthConfig, env={"STRATA_RUN_STALL_FACTOR": "1e6", "STRATA_RUN_STALL_LIMITS": "step=86400"}
    )
    assert found.phase_limits_s() == {"step": 86400}
    config = CoordinatorConfig.load(
        flags={}, env={"STRATA_ETCD_QUOTA_BYTES": str(2**40), "STRATA_MAX_JOBS": "1e3"[:1]}
    )
    assert (config.etcd.quota_bytes, config.max_jobs) == (2**40, 1)
    assert RunConfig.load(flags={}, env={}, path=None).slots == 1


def test_ports_and_scheduler_positions_have_a_bounded_length() -> None:
    with pytest.raises(ConfigError, match="not a port"):
        split_address("listen", f"host:{'9' * 5000}")
    with pytest.raises(ConfigError, match="SLURM_NODEID"):
        allocation({"SLURM_JOB_ID": "1", "SLURM_NODEID": "9" * 5000})


@pytest.mark.parametrize("command", ["run", "coordinator"])
def test_a_command_ends_at_once_with_the_code_of_a_wrong_configuration(tmp_path: Path, command: str) -> None:
    words = ("--", "true") if command == "run" else ()
    for shape in ("fifo", "zero"):
        path = tmp_path / f"{shape}.toml"
        put_shape(path, shape)
        code, output = run_strata(command, "--config", str(path), *words, env=None)
        assert code == 2, output
        assert "Traceback" not in output
        assert f"cannot read {path}: it is no regular file" in output.replace("\n", " ")
