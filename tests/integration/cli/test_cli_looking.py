"""Read-only commands (jobs, datasets, watch, doctor) and shell completion."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from strata.client import CoordinatorClient, DatasetRegistry
from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_port
from tests.cluster_fixtures import Nodes, run_strata
from tests.processes import LIMIT_S, Record, Talker


def as_json(*words: str) -> Any:
    code, output = run_strata(*words, "--json")
    assert code == 0, output
    return json.loads(output)


@pytest.fixture
def registered(cluster: LocalCluster, job: str) -> str:
    """A job with a dataset and one member, which soon dies but stays in the job's records."""
    with (
        CoordinatorClient.connect(cluster.endpoints, job=job) as client,
        DatasetRegistry(cluster.endpoints, job=job) as datasets,
    ):
        client.register(worker_id="w-1", slots=2)
        datasets.register("pile", shards=8, uri="s3://data/{shard}")
        datasets.assignment("pile")
    return job


def test_jobs_are_listed_and_shown(cluster: LocalCluster, registered: str) -> None:
    where = ("--endpoints", cluster.endpoints)
    assert registered in [job["name"] for job in as_json("jobs", "list", *where)]
    shown = as_json("jobs", "show", registered, *where)
    assert shown["spec"]["max_no_progress_generations"] == 3
    code, output = run_strata("jobs", "show", registered, *where)
    assert code == 0
    assert f"job {registered}:" in output
    code, output = run_strata("jobs", "show", "nobody", *where)
    assert code == 4
    assert "no job nobody exists" in output


@pytest.mark.journey
def test_datasets_are_listed_and_shown(cluster: LocalCluster, registered: str) -> None:
    where = ("--endpoints", cluster.endpoints, "--job", registered)
    listed = as_json("datasets", *where)
    assert [(d["name"], d["shards"]) for d in listed["datasets"]] == [("pile", 8)]
    assert listed["cursors"] == [], "no checkpoint has a position yet"
    assert as_json("datasets", "pile", *where)["dataset"]["uri"] == "s3://data/{shard}"
    code, output = run_strata("datasets", "pile", *where)
    assert code == 0
    assert "dataset pile: 8 shards" in output
    code, output = run_strata("datasets", "none", *where)
    assert code == 4


def test_watch_prints_existing_keys_and_then_changes(
    cluster: LocalCluster, registered: str, nodes: Nodes, record: Record
) -> None:
    where = ("--endpoints", cluster.endpoints, "--job", registered)
    code, output = run_strata("watch", *where, "--once", "--json", "datasets/")
    assert code == 0
    (line,) = [each for each in map(json.loads, output.splitlines()) if each["key"] == "datasets/pile/spec"]
    assert line["value"]["shards"] == 8
    nodes.strata("watch", *where, "datasets/", name="watch")
    record.wait_line("datasets/pile/spec")
    with DatasetRegistry(cluster.endpoints, job=registered) as datasets:
        datasets.register("later", shards=3)
    assert '"shards":3' in record.wait_line("datasets/later/spec")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_tab_brings_commands_and_jobs(cluster: LocalCluster, registered: str, shell: str) -> None:
    def completed(line: str) -> str:
        env = {
            **os.environ,
            "STRATA_ENDPOINTS": cluster.endpoints,
            "_STRATA_COMPLETE": f"complete_{shell}",
            "COMP_WORDS": line,
            "COMP_CWORD": str(line.count(" ")),
            "_TYPER_COMPLETE_ARGS": line,
            "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        }
        return run_program(env)

    assert "status" in completed("strata st")
    assert registered in completed(f"strata jobs show {registered[:8]}")
    assert registered in completed(f"strata members --job {registered[:8]}")


def test_tab_without_a_cluster_brings_nothing_and_no_error() -> None:
    env = {
        **os.environ,
        "STRATA_ENDPOINTS": f"127.0.0.1:{free_port()}",
        "_STRATA_COMPLETE": "complete_bash",
        "COMP_WORDS": "strata jobs show x",
        "COMP_CWORD": "3",
    }
    assert run_program(env).strip() == ""


def run_program(env: dict[str, str]) -> str:
    """Run the command under the name `strata`, which shell completion needs."""
    record = Record()
    argv = [sys.executable, "-c", "import sys; sys.argv = ['strata']; import strata.cli; strata.cli.main()"]
    talker = Talker(argv, name="strata", record=record, env=env)
    assert talker.join(LIMIT_S) == 0
    talker.wait_quiet()
    return "\n".join(str(e.get("text", e)) for e in record.events)


# -- doctor


def found(*words: str) -> tuple[int, dict[str, dict[str, str]]]:
    code, output = run_strata("doctor", *words, "--json")
    return code, {finding["what"]: finding for finding in json.loads(output)}


@pytest.mark.journey
def test_doctor_passes_on_a_healthy_machine(cluster: LocalCluster, tmp_path: Path) -> None:
    member = cluster.etcd.endpoints[0].removeprefix("http://")
    code, findings = found("--endpoints", cluster.endpoints, "--etcd", member, "--storage", str(tmp_path))
    assert code == 0, findings
    assert not [f for f in findings.values() if f["level"] == "FAIL"]
    assert findings["storage"]["level"] == "OK"
    assert findings["coordinators"]["says"] == "3 of 3 ready"
    assert findings[f"etcd {member}"]["says"].startswith("3.5.")
    assert list(tmp_path.iterdir()) == [], "it leaves nothing"


def test_doctor_reports_each_error_with_a_hint(tmp_path: Path) -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    code, findings = found(
        *("--endpoints", nowhere, "--etcd", nowhere, "--storage", str(tmp_path / "absent")),
        *("--timeout-s", "0.5", "--tls-ca-file", str(tmp_path / "no.pem")),
    )
    assert code == 1
    for what in ("etcd", "storage", "tls"):
        assert findings[what]["level"] == "FAIL"
        assert findings[what]["hint"]
    code, output = run_strata("doctor", "--endpoints", nowhere, "--timeout-s", "0.5")
    assert code == 1
    assert "FAIL  coordinators" in output
    assert "Traceback" not in output
