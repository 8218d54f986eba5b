"""The examples train, and go on after kills and other faults."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from strata.checkpoint.format.marker import NAME as MARKER
from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import ROOT, Nodes, StartCluster
from tests.polling import until
from tests.processes import Record
from tests.torchrun_agents import agent

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.timeout(600)
"""The limit only ends a test that hangs: the tests wait for progress."""
SLOW_S = 90.0
"""Time without events of an agent and its worker, which both import torch, on a busy machine."""


@pytest.fixture(scope="module")
def cluster(start_module_cluster: StartCluster) -> LocalCluster:
    """A cluster with a long detection time, so that no rank counts as frozen on a busy machine."""
    return start_module_cluster(detect_s=20.0)


def saving(folder: Path, *, every: int) -> dict[str, str | None]:
    """Return the environment that sets a rank's storage and save interval."""
    return {"STRATA_TRAIN_STORAGE": str(folder), "STRATA_TRAIN_SAVE_EVERY_STEPS": str(every)}


@pytest.mark.usefixtures("torch_installed")
@pytest.mark.journey
def test_a_plain_script_with_three_changed_lines_resumes_after_a_kill(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    node = nodes.run_script(
        cluster.endpoints,
        EXAMPLES / "three_lines" / "train.py",
        options=("--slots", "2"),
        env={**saving(tmp_path, every=10), "EPOCHS": "12"},
    )
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job, timeout_s=SLOW_S) as client:
        record.wait("rank.started", count=2, generation=1)
        trained = client.call_until(
            GetJobRequest(job=nodes.job), lambda answer: bool(answer.job.latest_step >= 20)
        )
        assert trained.job.latest_step >= 20
        victim = record.wait_one("rank.started", generation=1, rank=0)
        os.kill(victim["pid"], signal.SIGKILL)
        assert node.join() == 0
        assert client.job_status().latest_step == 12 * 30, "every step of every epoch, once"
    assert len(record.of("rank.started")) == 4, "one kill, one more generation"
    loss = float(record.wait_line("loss ").split("loss ")[1].split()[0])
    assert loss < 0.01
    node.wait_quiet()


@pytest.mark.slow
@pytest.mark.usefixtures("jax_installed")
def test_three_jax_processes_resume_after_process_0_is_killed(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    script = EXAMPLES / "jax" / "train.py"
    three = [
        nodes.run_script(
            cluster.endpoints,
            script,
            "--steps=150",
            node=name,
            options=("--min-workers", "3"),
            env=saving(tmp_path, every=5),
        )
        for name in "abc"
    ]
    starts = {e["rank"]: e for e in record.wait("start", count=3, generation=1)}
    assert {e["devices"] for e in starts.values()} == {3}, "all three are one JAX"
    record.wait("step", count=3, step=30)
    until(lambda: list(tmp_path.rglob(MARKER)), "nothing was committed", limit_s=SLOW_S)
    os.kill(starts[0]["pid"], signal.SIGKILL)
    again = record.wait("start", count=3, generation=2)
    (restored,) = {e["step"] for e in again}
    assert restored > 0
    assert restored % 5 == 0
    assert [node.join() for node in three] == [0, 0, 0]
    assert {e["step"] for e in record.of("end")} == {150}
    losses = {e["step"]: e["loss"] for e in record.of("step", rank=1)}
    assert sorted(losses) == list(range(1, 151)), "no step was left out"
    assert losses[1] > 1.0
    assert losses[150] < 0.01
    before = {e["step"]: e["loss"] for e in record.of("step", rank=1, generation=1)}
    repeated = {step: loss for step, loss in before.items() if step > restored}
    assert all(losses[step] == pytest.approx(loss, rel=1e-3) for step, loss in repeated.items())
    for node in three:
        node.wait_quiet()


@pytest.mark.slow
@pytest.mark.usefixtures("torch_installed")
def test_a_small_gpt_learns_under_torchrun_while_rank_0_is_killed(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    pair = [
        agent(
            nodes,
            cluster.endpoints,
            tmp_path,
            str(EXAMPLES / "chargpt" / "train"),
            *("--epochs=1", "--batch=16"),
            name=name,
            nnodes="2",
            env=saving(tmp_path / "checkpoints", every=10),
        )
        for name in "ab"
    ]
    starts = {e["rank"]: e for e in record.wait("start", count=2, generation=1, limit_s=SLOW_S)}
    assert {e["worker"] for e in starts.values()} == {"a", "b"}
    record.wait("step", count=2, step=30, limit_s=SLOW_S)
    until(lambda: list(tmp_path.rglob(MARKER)), "nothing was committed", limit_s=SLOW_S)
    os.kill(starts[0]["pid"], signal.SIGKILL)
    again = record.wait("start", count=2, generation=2, limit_s=SLOW_S)
    (restored,) = {e["step"] for e in again}
    assert restored >= 10
    assert [one.join(SLOW_S) for one in pair] == [0, 0]
    (last,) = {e["step"] for e in record.of("end")}
    trained = {e["step"] for e in record.of("step", rank=1)}
    assert trained == set(range(1, last + 1)), "no step was left out"
    (test_loss,) = {e["test_loss"] for e in record.of("epoch")}
    assert test_loss < 3.2, "a guess at random has ln(97) = 4.6"
    assert len(record.wait_one("written")["text"]) == 200
    for one in pair:
        one.wait_quiet()
    assert not [e["text"] for e in record.of("line") if "exit barrier" in e["text"]], "they leave together"
