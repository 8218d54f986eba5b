"""`strata.init` on a whole cluster: a training continues from exactly the saved step, in a world of any size."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from strata.client import CoordinatorClient
from strata.core.health.goodput import GOODPUT_KEY, goodput_text
from strata.devcluster.local_cluster import LocalCluster
from strata.training.save.cadence import PRIOR_S
from strata.v1.checkpoints_pb2 import CHECKPOINT_TYPE_INCREMENTAL
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import RANKS, Nodes
from tests.processes import LIMIT_S, Event, Record, Talker
from tests.ranks.training import GLOBAL_BATCH, LENGTH

pytestmark = pytest.mark.timeout(180)

STEPS = LENGTH // GLOBAL_BATCH
GROWN_EPOCHS = 8
"""Long enough for a second node to start meanwhile, even on a busy machine."""
FROZEN = 500_000
"""Count of 8-byte numbers in each rank's frozen state."""


def check_samples(record: Record, *, epochs: int) -> None:
    """Assert that each epoch uses each sample once, and that a step has the same samples in every world."""
    by_step: dict[int, list[int]] = {}
    for event in record.of("step"):
        step, samples = event["step"], event["samples"]
        assert by_step.setdefault(step, samples) == samples, f"step {step} had other samples in another world"
    assert sorted(by_step) == list(range(1, epochs * STEPS + 1))
    for epoch in range(epochs):
        used = [i for step in range(epoch * STEPS + 1, (epoch + 1) * STEPS + 1) for i in by_step[step]]
        assert sorted(used) == list(range(LENGTH))
    assert {e["sum"] for e in record.of("end")} == {epochs * sum(range(LENGTH))}


def assert_common_step(begun: Iterable[Event]) -> None:
    """Assert that all ranks went on from the same saved step. The step depends on how soon saves are committed."""
    (step,) = {e["step"] for e in begun}
    assert step % 10 == 0


@pytest.mark.journey
def test_a_training_survives_a_killed_rank_and_a_growing_world(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    arguments = ("--storage", str(tmp_path), "--epochs", str(GROWN_EPOCHS))
    options = ("--min-workers", "1", "--max-workers", "2", "--slots", "2", "--settle-s", "0.5")
    env = {"STRATA_TRAIN_KEEP_COUNT": "0"}
    nodes.run(cluster.endpoints, "training", *arguments, node="a", options=options, env=env)
    victim = record.wait("begun", generation=1, count=2)[0]
    record.wait("step", step=15, generation=1, count=2)
    os.kill(victim["pid"], signal.SIGKILL)
    again = record.wait("begun", generation=2, count=2)
    assert_common_step(again)
    record.wait("step", step=25, generation=2, count=2)
    nodes.run(cluster.endpoints, "training", *arguments, node="b", options=options, env=env)
    grown = record.wait("begun", generation=3, count=4)
    assert {e["world"] for e in grown} == {4}
    trained = max(e["step"] for e in record.of("step", generation=2))
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        why = {each.world.generation: each.world.reason for each in client.generations()}
    skipped = [e["text"] for e in record.of("line") if "SKIPPED" in e["text"]]
    assert {e["step"] for e in grown} == {trained}, (
        f"no step is done twice, whatever was saved before: {why}; {skipped}"
    )
    (failure_s,) = (e["failure_s"] for e in grown if e["rank"] == 0)
    assert failure_s == pytest.approx(PRIOR_S / 2, rel=0.01), "the history has one failure by now"
    assert [node.join() for node in nodes.talkers] == [0, 0]
    check_samples(record, epochs=GROWN_EPOCHS)
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        latest = client.latest_checkpoint()
        recovery = client.recovery(worker_id="a")
    assert latest.step == GROWN_EPOCHS * STEPS
    account = goodput_text(latest.metadata[GOODPUT_KEY])
    assert all(part in account for part in ("lost", "start")), account
    # generation 3 began from a checkpoint of two ranks, so its other two ranks have no part of their own in it
    assert recovery.step == recovery.checkpoint.step == grown[0]["step"]
    parts = {part.rank: part.manifest for part in recovery.rank_recoveries}
    assert sorted(parts) == list(recovery.ranks) == [0, 1]
    assert all(Path(urlsplit(uri).path).exists() for uri in parts.values())


def test_ranks_resume_from_an_incremental_checkpoint(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    """The first save is a Full.

    Later saves contain only changed state, so they do not contain the ranks' frozen state.
    """
    arguments = ("--storage", str(tmp_path), "--frozen", str(FROZEN), "--epochs", "4")
    for node in ("a", "b"):
        nodes.run(
            cluster.endpoints,
            *("training", *arguments),
            node=node,
            options=("--min-workers", "2"),
            env={"STRATA_TRAIN_FULL_EVERY": "1000", "STRATA_TRAIN_KEEP_COUNT": "0"},
        )
    first = {e["rank"]: e for e in record.wait("begun", generation=1, count=2)}
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job, timeout_s=LIMIT_S) as client:
        client.call_until(GetJobRequest(job=nodes.job), lambda answer: bool(answer.job.latest_step >= 20))
        os.kill(first[1]["pid"], signal.SIGKILL)
        second = {e["rank"]: e for e in record.wait("begun", generation=2, count=2)}
        assert_common_step(second.values())
        restored = client.recovery(worker_id="b").checkpoint
    assert restored.step == second[0]["step"] >= 20
    assert (restored.type, restored.base_step > 0) == (CHECKPOINT_TYPE_INCREMENTAL, True)
    assert restored.size_bytes < FROZEN * 8, "what is frozen was not written again"
    for rank in (0, 1):
        assert second[rank]["frozen"] == [first[rank]["pid"]], "each found what its rank had"
    assert [node.join() for node in nodes.talkers] == [0, 0]
    check_samples(record, epochs=4)


def start_standalone(
    nodes: Nodes,
    cluster: LocalCluster,
    storage: Path,
    worker: str,
    *more: str,
    env: Mapping[str, str | None] | None = None,
) -> Talker:
    given = ("--endpoints", cluster.endpoints, "--job", nodes.job, "--worker-id", worker)
    script = (sys.executable, str(RANKS / "training.py"), "--storage", str(storage), "--min-workers", "2")
    return nodes.start(*script, *given, *more, name=worker, env=env)


def test_a_standalone_training_with_a_hung_main_thread_exits_with_75(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    """After a restart the process continues from the last save."""
    a = start_standalone(nodes, cluster, tmp_path, "a", "--hang-at", "16")
    b = start_standalone(nodes, cluster, tmp_path, "b")
    first = {e["worker"]: e for e in record.wait("begun", generation=1, count=2)}
    record.wait_one("hangs", generation=1)
    os.kill(first["b"]["pid"], signal.SIGKILL)
    assert (b.join(), a.join()) == (-signal.SIGKILL, 75)
    again = [start_standalone(nodes, cluster, tmp_path, name) for name in ("a", "b")]
    (generation,) = {e["generation"] for e in record.wait("end", count=2)}
    assert_common_step(record.of("begun", generation=generation))
    assert [trainer.join() for trainer in again] == [0, 0]
    late = start_standalone(nodes, cluster, tmp_path, "a")
    assert late.join() == 0, "the job is done: who is begun again has nothing to do"
    assert late.child.pid not in {e["pid"] for e in record.of("begun")}
    other = start_standalone(nodes, cluster, tmp_path, "a", env={"STRATA_RUN_ID": "another"})
    assert other.join() == 4, "it has nothing to do with the run that finished"
    assert f"job {nodes.job} finished at" in record.wait_line("finished at")
    check_samples(record, epochs=2)


def test_a_standalone_process_frozen_past_its_jobs_end_exits_1_and_does_not_rerun(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    """A standby finishes the job without it."""
    more = ("--min-workers", "1", "--max-workers", "2")
    frozen = start_standalone(nodes, cluster, tmp_path, "frozen", *more, "--epochs", str(10**6))
    record.wait("step", step=15, count=1)
    os.kill(frozen.child.pid, signal.SIGSTOP)
    other = start_standalone(nodes, cluster, tmp_path, "other", *more)
    assert other.join() == 0
    os.kill(frozen.child.pid, signal.SIGCONT)
    assert frozen.join() == 1
    assert start_standalone(nodes, cluster, tmp_path, "frozen", *more).join() == 0
    assert {e["worker"] for e in record.of("begun")} == {"frozen", "other"}


def test_surviving_ranks_restart_in_process(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    options = ("--min-workers", "2", "--restart", "in_process", "--restart-grace-s", "10")
    for node in ("a", "b"):
        nodes.run(cluster.endpoints, "training", "--storage", str(tmp_path), node=node, options=options)
    first = {e["worker"]: e for e in record.wait("begun", generation=1, count=2)}
    record.wait("step", step=15, generation=1, count=2)
    os.kill(first["b"]["pid"], signal.SIGKILL)
    second = {e["worker"]: e for e in record.wait("begun", generation=2, count=2)}
    assert second["a"]["pid"] == first["a"]["pid"]
    assert second["b"]["pid"] != first["b"]["pid"]
    assert_common_step(second.values())
    assert [node.join() for node in nodes.talkers] == [0, 0]
    check_samples(record, epochs=2)


@pytest.mark.slow
@pytest.mark.usefixtures("torch_installed")
def test_a_process_group_ends_and_begins_in_the_same_process(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    options = ("--min-workers", "2", "--restart", "in_process", "--restart-grace-s", "20")
    for node in ("a", "b"):
        nodes.run(cluster.endpoints, "moving", "--storage", str(tmp_path), node=node, options=options)
    first = {e["worker"]: e for e in record.wait("begun", generation=1, count=2)}
    record.wait("step", step=15, generation=1, count=2)
    os.kill(first["b"]["pid"], signal.SIGKILL)
    second = {e["worker"]: e for e in record.wait("begun", generation=2, count=2)}
    assert second["a"]["pid"] == first["a"]["pid"], "its collective broke, and it went on"
    assert_common_step(second.values())
    assert [node.join() for node in nodes.talkers] == [0, 0]
    ends = record.of("end")
    assert [e["step"] for e in ends] == [90, 90]
    assert ends[0]["weight"] == ends[1]["weight"]


@pytest.mark.journey
def test_hosts_without_a_common_storage_train_no_step(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import numpy as np\n"
        "import strata\n"
        "run = strata.init(state={'sum': np.zeros(1)}, save_every_steps=10)\n"
        "print('TRAINS', run.world.rank, flush=True)\n"
        "for _ in range(20):\n"
        "    run.step_done(1)\n"
        "run.close()\n"
    )
    options = ("--min-workers", "2", "--max-workers", "2", "--slots", "1")
    for name in ("a", "b"):  # each node has its own disk
        env = {"STRATA_TRAIN_STORAGE": str(tmp_path / name)}
        nodes.run_script(cluster.endpoints, script, node=name, options=options, env=env)
    line = nodes.record.wait_line("rank 1 sees another storage at")
    assert "one storage root that they share" in line
    assert [node.join() for node in nodes.talkers] == [78, 78], "the job failed, and a restart would not help"
    assert not [e for e in nodes.record.of("line") if "TRAINS" in e["text"]]
