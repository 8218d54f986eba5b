"""The workloads' choices must depend only on the seed, and be the same in all ranks of a generation."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from strata_chaos.history import History
from strata_chaos.workloads import barriers, checkpoints, churn, training, watches
from strata_chaos.workloads.barriers import Step, step_of
from strata_chaos.workloads.program import Options, Workload, parse

WORKLOADS = [each.WORKLOAD for each in (barriers, checkpoints, churn, training, watches)]


def options(*, seed: int = 1, client: int = 0) -> Options:
    return Options(
        endpoints="a:1",
        job="j",
        history=Path("/run/h.jsonl"),
        seed=seed,
        clients=4,
        storage=Path("/run/s"),
        client=client,
    )


def plan(of: Options, generation: int = 1, world_size: int = 4) -> list[Step]:
    return [step_of(of, generation, index, world_size) for index in range(1, 200)]


def test_all_ranks_of_a_generation_follow_one_plan() -> None:
    assert plan(options(client=0)) == plan(options(client=3))


def test_another_seed_and_another_generation_have_other_plans() -> None:
    assert plan(options(seed=1)) != plan(options(seed=2))
    assert plan(options(), generation=1) != plan(options(), generation=2)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_plan_uses_ranks_of_its_world_and_each_name_has_one_set_of_ranks(world_size: int) -> None:
    ranks_of: dict[str, tuple[int, ...]] = {}
    for step in plan(options(), world_size=world_size):
        assert set(step.ranks) <= set(range(world_size))
        assert step.slow is None or step.slow in step.ranks
        assert ranks_of.setdefault(step.name, step.ranks) == step.ranks


def test_a_plan_has_full_partial_slow_and_short_deadline_barriers() -> None:
    kinds = {step.name.split("-")[0] for step in plan(options())}
    assert kinds == {"all", "some", "slow", "short"}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_every_workload_takes_the_same_arguments(workload: Workload) -> None:
    words = ["--endpoints", "a:1", "--job", "j", "--history", "h.jsonl", "--seed", "5", "--clients", "2"]
    found = parse(workload, words)
    assert (found.endpoints, found.job, found.seed, found.clients) == ("a:1", "j", 5, 2)
    assert found.history.is_absolute()
    assert found.storage == found.history.with_name("storage-j")


@pytest.mark.slow  # a signal does not interrupt a call that waits for coordinators: 10 s
def test_a_workload_without_a_cluster_waits_and_exits_with_0_on_sigterm(tmp_path: Path) -> None:
    history = tmp_path / "h.jsonl"
    command = [sys.executable, "-m", "strata_chaos.workloads.barriers", "--endpoints", "127.0.0.1:1"]
    process = subprocess.Popen([*command, "--job", "j", "--history", str(history)])
    try:
        while not (history.exists() and history.stat().st_size):
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(50) == 0
    finally:
        process.kill()
    first, *_ = History(history)
    assert first.op == "workload.started"


SIGNALLED_ALL_THE_TIME = """
import signal
from strata_chaos.workloads.program import Stop
stop = Stop()
signal.signal(signal.SIGALRM, lambda *_: stop.set())
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.00005)
for _ in range(20_000):
    stop.wait(0.0001)
    stop = Stop()
signal.setitimer(signal.ITIMER_REAL, 0)
"""


def test_a_signal_at_any_moment_of_a_wait_does_not_block_for_ever() -> None:
    """A `threading.Event` can block here: its `set` waits for the lock that the interrupted `wait` holds."""
    subprocess.run([sys.executable, "-c", SIGNALLED_ALL_THE_TIME], check=True, timeout=40)
