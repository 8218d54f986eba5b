"""Every command against a live cluster, and against none."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import strata
from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_port
from tests.cluster_fixtures import Nodes, run_strata
from tests.processes import LIMIT_S, Record

READING = (
    "status",
    "members",
    "barriers",
    "checkpoints list",
    "datasets",
    "watch",
    "jobs list",
    "jobs show x",
)
COMMANDS = ("dev", "coordinator", "run", "doctor", "jobs show", *READING[:-1])


def output_as_json(*words: str) -> Any:
    code, output = run_strata(*words, "--json")
    assert code == 0, output
    return json.loads(output)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.journey
def test_every_command_has_help_with_an_example(command: str) -> None:
    code, output = run_strata(*command.split(), "--help", env={**os.environ, "COLUMNS": "200"})
    assert code == 0
    assert f"Usage: python -m strata {command}" in output
    assert f"Example: strata {command}" in output


def test_strata_without_a_command_lists_all_commands() -> None:
    code, output = run_strata()
    assert code == 2
    assert all(command.split()[0] in output for command in COMMANDS)
    code, output = run_strata("--version")
    assert code == 0
    assert output.strip() == f"strata {strata.__version__}"


@pytest.mark.parametrize("command", READING)
def test_a_command_without_coordinators_exits_with_3_and_a_hint(command: str) -> None:
    where = ("--endpoints", f"127.0.0.1:{free_port()}", "--timeout-s", "1")
    code, output = run_strata(*command.split(), *where)
    assert code == 3, output
    assert "error: " in output
    assert "hint: " in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    "words",
    [("status", "--no-such"), ("members", "--endpoints", "a:b"), ("barriers", "extra"), ("no-such-command",)],
    ids=" ".join,
)
def test_wrong_usage_exits_with_2(words: tuple[str, ...]) -> None:
    code, output = run_strata(*words)
    assert code == 2, output
    assert "Traceback" not in output


def test_a_job_that_does_not_exist_is_named(cluster: LocalCluster) -> None:
    for command in ("members", "barriers", "checkpoints list"):
        code, output = run_strata(*command.split(), "-e", cluster.endpoints, "--job", "never-begun")
        assert code == 4, output
        assert "never-begun" in output
        assert "Traceback" not in output


@pytest.mark.journey
def test_status_commands_show_a_running_job(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    where = ("-e", cluster.endpoints)
    until, meet = tmp_path / "until", tmp_path / "meet"
    options = ("--min-workers", "2", "--slots", "2")
    steps = ("steps", "--no-barrier", "--meet", str(meet), "--until", str(until))
    a = nodes.run(cluster.endpoints, *steps, node="a", options=options)
    nodes.run(cluster.endpoints, *steps, node="b", options=options, env={"STEPS_WAITS": "1"})
    record.wait("step", count=2, step=3, source="a")

    status = output_as_json("status", *where)
    assert {r["replica"] for r in status["replicas"]} == {c.name for c in cluster.coordinators}
    assert {r["version"] for r in status["replicas"]} == {strata.__version__}
    assert sum(r["leader"] for r in status["replicas"]) == 1
    assert all(r["ready"] for r in status["replicas"])
    assert [m["healthy"] for m in status["etcd"]] == [True]
    code, text = run_strata("status", *where)
    assert code == 0
    assert nodes.job in text
    assert "running" in text

    members = output_as_json("members", *where, "--job", nodes.job)
    assert {m["worker_id"]: m["slots"] for m in members} == {"a": 2, "b": 2}
    code, text = run_strata("members", *where, "--job", nodes.job)
    assert code == 0
    assert f"job {nodes.job}: generation 1, 4 ranks" in text
    assert "train" in text

    meet.touch()
    arriving = record.wait("arriving", count=2)
    ranks = sorted(e["rank"] for e in arriving)
    others = sorted({0, 1, 2, 3} - set(ranks))
    opened: list[dict[str, Any]] = []
    while not opened or opened[0]["arrived"] < 2:
        opened = [
            b for b in output_as_json("barriers", *where, "--job", nodes.job)["open"] if b["name"] == "meet"
        ]
    assert (opened[0]["arrived"], opened[0]["expected"], opened[0]["missing"]) == (2, 4, others)
    code, text = run_strata("barriers", *where, "--job", nodes.job)
    assert code == 0
    assert "2 of 4" in text
    assert "strata.join" in text, "the barrier at which the generation began"

    assert output_as_json("checkpoints", "list", *where, "--job", nodes.job) == []
    code, text = run_strata("checkpoints", "list", *where, "--job", nodes.job)
    assert code == 0
    assert "no checkpoint yet" in text
    assert a.child.poll() is None


def test_the_members_of_a_finished_job_are_done(cluster: LocalCluster, nodes: Nodes) -> None:
    where = ("-e", cluster.endpoints, "--job", nodes.job)
    words = ("--endpoints", cluster.endpoints, "--job", nodes.job, "--worker-id", "a", "--slots", "2")
    assert nodes.strata("run", *words, "--", sys.executable, "-c", "").join(LIMIT_S) == 0
    code, text = run_strata("members", *where)
    assert code == 0
    assert re.search(r"^a +- +0-1 +- +done ", text, re.MULTILINE), text
    assert output_as_json("members", *where) == [], "it lists who is there"


def test_endpoints_and_job_come_from_the_environment(cluster: LocalCluster) -> None:
    env = {**os.environ, "STRATA_ENDPOINTS": cluster.endpoints, "STRATA_JOB": "of-the-environment"}
    code, output = run_strata("status", env=env)
    assert code == 0
    assert "leader" in output
    code, output = run_strata("members", env=env)
    assert "of-the-environment" in output


def test_flags_override_the_environment_which_overrides_the_file(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    file = tmp_path / "strata.toml"
    listed = ", ".join(f'"{endpoint}"' for endpoint in cluster.endpoints.split(","))
    file.write_text(f'endpoints = [{listed}]\njob = "of-the-file"\n')
    bare = {k: v for k, v in os.environ.items() if not k.startswith("STRATA_")}
    words, env = ("members", "--config", str(file)), {**bare, "STRATA_JOB": "of-the-environment"}
    assert "of-the-file" in run_strata(*words, env=bare)[1]
    assert "of-the-environment" in run_strata(*words, env=env)[1]
    assert "of-the-flag" in run_strata(*words, "--job", "of-the-flag", env=env)[1]
    nowhere = run_strata(*words, "--endpoints", f"127.0.0.1:{free_port()}", "--timeout-s", "0.5", env=env)
    assert nowhere[0] == 3
    file.write_text("endpoint = 1\n")
    code, output = run_strata(*words, env=env)
    assert (code, "there is no setting endpoint" in output) == (2, True)


def test_a_coordinator_reports_invalid_settings() -> None:
    for words, part in (
        (("--listen", "nonsense"), "listen"),
        (("--detect-s", "0.01"), "detect_s"),
        (("--listen", "0.0.0.0:50051", "--advertise", "192.0.2.1:50051"), "insecure"),
    ):
        code, output = run_strata("coordinator", "--etcd", "127.0.0.1:1", *words)
        assert code == 2, output
        assert part in output
        assert "Traceback" not in output
