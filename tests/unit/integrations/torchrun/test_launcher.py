"""Reading the stack of torch's launcher and agent, and a stack without them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from strata.integrations.torchrun.launcher import (
    Launch,
    RankFailure,
    Workers,
    find_failure,
    find_launch,
    find_workers,
)


@dataclass
class Config:
    nproc_per_node: Any = 4
    max_restarts: Any = 2
    role: str = "default"


@dataclass
class Spec:
    local_world_size: Any = 2
    role: str = "trainer"


@dataclass
class WorkerGroup:
    spec: object


@dataclass
class Failure:
    exitcode: int
    timestamp: int = 0


class GivesUpError(Exception):
    """Stands in for torch's ChildFailedError."""

    def __init__(self, failures: dict[int, Failure]) -> None:
        super().__init__("failed")
        self.failures = failures


def launch_agent(config: object) -> Launch | None:
    """Stand in for torch's `launch_agent`: only the names of the function and of its variable matter."""
    return find_launch()


def _rendezvous(worker_group: object) -> Workers | None:
    return find_workers()


def _invoke_run(run_result: object) -> RankFailure | None:
    return find_failure()


def test_the_launcher_s_configuration_is_found_by_name() -> None:
    assert launch_agent(Config()) == Launch(slots=4, max_restarts=2, role="default")


@pytest.mark.parametrize("config", [None, object(), Config(nproc_per_node=None), Config(max_restarts="many")])
def test_a_launcher_that_is_not_torch_s_yields_no_agent(config: object) -> None:
    assert launch_agent(config) is None


def test_an_agent_s_slots_and_role_are_read() -> None:
    assert _rendezvous(WorkerGroup(Spec())) == Workers(slots=2, role="trainer")


@pytest.mark.parametrize(
    "group", [None, object(), WorkerGroup(None), WorkerGroup(Spec(local_world_size=None))]
)
def test_an_agent_that_is_not_torch_s_yields_no_workers(group: object) -> None:
    assert _rendezvous(group) is None


def test_the_worker_that_failed_first_is_named() -> None:
    result = GivesUpError(
        {3: Failure(1, timestamp=20), 1: Failure(-9, timestamp=10), 2: Failure(1, timestamp=30)}
    )
    found = _invoke_run(result)
    assert found == RankFailure(rank=1, code=-9, reason="was ended by SIGKILL")


@pytest.mark.parametrize(
    ("code", "reason"), [(3, "exited with 3"), (-15, "was ended by SIGTERM"), (-99, "was ended by signal 99")]
)
def test_a_failure_is_described_in_words(code: int, reason: str) -> None:
    found = _invoke_run(GivesUpError({0: Failure(code)}))
    assert found is not None
    assert (found.code, found.reason) == (code, reason)


def test_a_failure_with_exit_code_0_is_reported_as_exit_code_1() -> None:
    found = _invoke_run(GivesUpError({0: Failure(0)}))
    assert found is not None
    assert found.code == 1


@pytest.mark.parametrize("result", [None, object(), GivesUpError({})])
def test_an_agent_whose_workers_did_not_fail_has_no_failure(result: object) -> None:
    assert _invoke_run(result) is None


def test_the_failure_is_read_from_the_exception_of_an_agent_that_gives_up() -> None:
    try:
        raise GivesUpError({5: Failure(7)})
    except GivesUpError:
        found = find_failure()
    assert found == RankFailure(rank=5, code=7, reason="exited with 7")
    assert find_failure() is None


def test_the_installed_torch_has_the_variables_that_strata_reads() -> None:
    """The installed torch has the variables that Strata looks for."""
    api = pytest.importorskip("torch.distributed.elastic.agent.server.api")
    launcher = pytest.importorskip("torch.distributed.launcher.api")
    assert "run_result" in api.SimpleElasticAgent._invoke_run.__code__.co_varnames
    assert "worker_group" in api.SimpleElasticAgent._rendezvous.__wrapped__.__code__.co_varnames
    assert {"local_world_size", "role"} <= set(api.WorkerSpec.__dataclass_fields__)
    assert "config" in launcher.launch_agent.__code__.co_varnames
    fields = launcher.LaunchConfig.__dataclass_fields__
    assert {"nproc_per_node", "max_restarts", "role"} <= set(fields)
