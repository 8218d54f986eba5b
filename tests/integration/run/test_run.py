"""`strata run` on a whole cluster: environment, exit codes, several nodes, refusals."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_ports
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED
from tests.cluster_fixtures import Nodes, run_strata
from tests.processes import LIMIT_S, Record

TWO = ("--min-workers", "2")


def test_a_rank_finds_its_place_in_the_environment(cluster: LocalCluster, nodes: Nodes) -> None:
    node = nodes.run(cluster.endpoints, "plain", options=("--slots", "2"), env={"MINE": "kept"})
    assert node.join() == 0
    starts = nodes.record.of("start")
    found = {e["env"]["RANK"]: e["env"] for e in starts}
    assert sorted(found) == ["0", "1"], "each rank ran once"
    for rank, env in found.items():
        expected = {
            "LOCAL_RANK": rank,
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "GROUP_RANK": "0",
            "GROUP_WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_RUN_ID": nodes.job,
            "STRATA_JOB": nodes.job,
            "STRATA_WORKER_ID": "node-1",
            "STRATA_GENERATION": "1",
            "STRATA_ENDPOINTS": cluster.endpoints,
            "GRPC_ENABLE_FORK_SUPPORT": "0",
            "MINE": "kept",
        }
        assert {name: env.get(name) for name in expected} == expected
        assert int(env["MASTER_PORT"]) > 0
        assert "STRATA_RESTORE" not in env
    assert found["0"]["STRATA_INCARNATION"] == found["1"]["STRATA_INCARNATION"]
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        assert client.job_status().phase == JOB_PHASE_DONE


@pytest.mark.journey
def test_two_nodes_on_one_host_share_a_job(cluster: LocalCluster, nodes: Nodes) -> None:
    options = (*TWO, "--run-id", "one")
    one = nodes.run(cluster.endpoints, "steps", "--steps", "3", node="a", options=(*options, "--slots", "2"))
    other = nodes.run(cluster.endpoints, "steps", "--steps", "3", node="b", options=options)
    assert (one.join(), other.join()) == (0, 0)
    starts = nodes.record.of("start")
    assert sorted(e["rank"] for e in starts) == [0, 1, 2]
    assert len({(e["worker"], e["rank"]) for e in starts}) == 3
    assert {e["worker"] for e in starts} == {"a", "b"}
    assert len(nodes.record.of("step", step=3)) == 3
    one.wait_quiet()
    other.wait_quiet()

    late = nodes.run(cluster.endpoints, "steps", "--steps", "3", node="c", options=options)
    assert late.join() == 0, "a scheduler that requeued it is not told of a failure"
    assert "is done" in nodes.record.wait_one("job.done_before", source="c")["reason"]


@pytest.mark.usefixtures("torch_installed")
@pytest.mark.journey
def test_an_ordinary_torch_script_runs_unchanged(cluster: LocalCluster, nodes: Nodes) -> None:
    one = nodes.run(cluster.endpoints, "allreduce", node="a", options=TWO)
    other = nodes.run(cluster.endpoints, "allreduce", node="b", options=TWO)
    assert (one.join(), other.join()) == (0, 0)
    sums = nodes.record.of("sum")
    assert sorted((e["rank"], e["value"], e["world"]) for e in sums) == [(0, 3.0, 2), (1, 3.0, 2)]


@pytest.mark.parametrize("word", ["--signal", "--exit"])
@pytest.mark.journey
def test_three_unsuccessful_generations_fail_the_job_for_good(
    cluster: LocalCluster, nodes: Nodes, word: str
) -> None:
    """Once with a process that is killed, and once with a process that fails by itself after its first step."""
    arguments = (word, "9") if word == "--signal" else (word, "7", "--step")
    status = 128 + signal.SIGKILL if word == "--signal" else 7
    node = nodes.run(
        cluster.endpoints,
        "plain",
        *arguments,
        "--only-rank=1",
        options=("--slots", "2", "--settle-s", "0.2"),
    )
    assert node.join() == 78, "not to be requeued"
    node.wait_quiet()
    assert nodes.record.wait_one("job.ended")["rank_status"] == status
    assert [e["generation"] for e in nodes.record.of("start", rank=1)] == [1, 2, 3]
    counts = [e["env"]["TORCHELASTIC_RESTART_COUNT"] for e in nodes.record.of("start", rank=1)]
    assert counts == ["0", "1", "2"]
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        assert client.job_status().phase == JOB_PHASE_FAILED

    again = nodes.run(cluster.endpoints, "plain", *arguments, "--only-rank=1", node="late")
    assert again.join() == 78, "a job that failed takes no more members"
    assert "--resume" in nodes.record.wait_line("hint:")


def test_the_last_of_the_allowed_generations_fails_the_job(cluster: LocalCluster, nodes: Nodes) -> None:
    options = ("--settle-s", "0.2", "--max-generations", "2", "--max-no-progress-generations", "9")
    node = nodes.run(cluster.endpoints, "plain", "--signal", "9", options=options)
    assert node.join() == 78
    ended = nodes.record.wait_one("job.ended")
    assert (ended["phase"], ended["rank_status"]) == ("failed", 137)
    assert "2" in ended["reason"]
    assert [e["generation"] for e in nodes.record.of("start")] == [1, 2]


@pytest.mark.journey
def test_a_failed_job_runs_again_with_resume(cluster: LocalCluster, nodes: Nodes) -> None:
    quick = ("--settle-s", "0.2")
    failed = nodes.run(cluster.endpoints, "plain", "--signal", "9", options=quick)
    assert failed.join() == 78
    resumed = nodes.run(cluster.endpoints, "plain", options=(*quick, "--resume"))
    assert resumed.join() == 0


@pytest.mark.slow
def test_a_resumed_job_reports_how_many_members_it_waits_for(cluster: LocalCluster, nodes: Nodes) -> None:
    two = ("--settle-s", "0.2", "--min-workers", "2")
    for node in [nodes.run(cluster.endpoints, "plain", node=name, options=two) for name in "ab"]:
        assert node.join() == 0
    first = nodes.run(cluster.endpoints, "plain", node="a", options=(*two, "--resume"))
    assert nodes.record.wait_one("world.waiting")["reason"] == "waits: 1 of at least 2 members are here"
    second = nodes.run(cluster.endpoints, "plain", node="b", options=(*two, "--resume"))
    assert (first.join(), second.join()) == (0, 0)


def test_a_finished_job_restarts_at_step_0_and_keeps_its_checkpoints(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    for options in (), ("--new",):
        words = ("--storage", str(tmp_path), "--steps", "12")
        node = nodes.run(cluster.endpoints, "stopping", *words, options=("--settle-s", "0.2", *options))
        assert node.join() == 0
    assert [e["step"] for e in record.of("start")] == [0, 0]
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        steps = [(one.step, one.generation) for one in client.checkpoints()]
        assert client.latest_checkpoint().generation == 2
    assert {(12, 1), (12, 2)} <= set(steps)


def test_a_name_in_use_is_refused(cluster: LocalCluster, nodes: Nodes, record: Record) -> None:
    nodes.run(cluster.endpoints, "plain", "--wait", options=("--slots", "2"))
    record.wait("start", count=2)
    second = nodes.run(cluster.endpoints, "plain")
    assert second.join() == 4
    assert nodes.job in record.wait_line("error:") or "node-1" in record.wait_line("error:")
    assert len(record.of("start")) == 2, "the first one was not disturbed"


@pytest.mark.parametrize("command", ["no-such-program", "/no/such/program"])
def test_a_command_that_does_not_exist_is_a_usage_error(
    cluster: LocalCluster, nodes: Nodes, command: str
) -> None:
    node = nodes.strata("run", "--endpoints", cluster.endpoints, "--job", nodes.job, "--", command)
    assert node.join() == 2
    assert command in nodes.record.wait_line("error:")
    with CoordinatorClient.connect(cluster.endpoints) as client:
        assert nodes.job not in {job.name for job in client.jobs()}, "nobody joined"


@pytest.mark.parametrize(
    "words",
    [
        ("run",),
        ("run", "--slots", "0", "--", "true"),
        ("run", "--slots", "many", "--", "true"),
        ("run", "--endpoints", "host:port", "--", "true"),
        ("run", "--min-workers", "3", "--max-workers", "2", "--", "true"),
        ("run", "--job", "../x", "--", "true"),
        ("run", "--no-such-option", "--", "true"),
    ],
    ids=" ".join,
)
@pytest.mark.journey
def test_wrong_usage_exits_with_2_without_a_traceback(words: tuple[str, ...]) -> None:
    code, output = run_strata(*words)
    assert code == 2, output
    assert "Traceback" not in output


def test_the_two_dashes_may_be_left_out(cluster: LocalCluster, nodes: Nodes) -> None:
    script = "import json, sys; print(json.dumps({'event': 'argv', 'argv': sys.argv[1:]}))"
    node = nodes.strata(
        "run", "-e", cluster.endpoints, "--job", nodes.job, sys.executable, "-c", script, "--epochs", "3"
    )
    assert node.join() == 0
    assert nodes.record.wait_one("argv")["argv"] == ["--epochs", "3"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_agent_without_coordinators_waits_logs_why_and_stops_on_a_signal(
    nodes: Nodes, number: signal.Signals
) -> None:
    endpoints = ",".join(f"127.0.0.1:{port}" for port in free_ports(2))
    node = nodes.run(endpoints, "plain")
    waiting = nodes.record.wait_one("session.disconnected", level="warning")
    assert "127.0.0.1" in waiting["reason"]
    assert waiting["hint"]
    node.signal(number)
    assert node.join(10.0) == (75 if number == signal.SIGTERM else 128 + number)
    assert nodes.record.of("start") == []
    assert "Traceback" not in json.dumps(nodes.record.events)


def test_a_node_that_waits_joins_once_coordinators_come(
    nodes: Nodes, etcd_binary: object, tmp_path: Path
) -> None:
    ports = free_ports(1)
    node = nodes.run(f"127.0.0.1:{ports[0]}", "plain")
    nodes.record.wait_one("session.disconnected")
    with LocalCluster.start(tmp_path / "c", etcd_members=1, coordinators=1, ports=ports, fsync=False):
        assert node.join(LIMIT_S) == 0


def test_a_temporary_folder_too_long_for_a_socket_is_named(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    node = nodes.run(cluster.endpoints, "plain", env={"TMPDIR": str(deep)})
    assert node.join() == 2
    assert str(deep) in nodes.record.wait_line("error:")
    assert "TMPDIR" in nodes.record.wait_line("hint:")
