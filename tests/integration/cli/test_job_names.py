"""A reused job name never silently runs nothing: other commands, other runs, and programs that cannot run."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, Job
from tests.cluster_fixtures import Nodes, run_strata
from tests.processes import Record, Talker

QUICK = ("--settle-s", "0.2")
SAYS = "import json, os\nprint(json.dumps({'event': 'start', 'rank': os.environ['RANK']}), flush=True)\n"
WAITS = f"{SAYS}import time\ntime.sleep(1000)\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SAYS)
    return path


def status(cluster: LocalCluster, nodes: Nodes) -> Job:
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        return client.job_status()


@pytest.mark.journey
def test_another_command_is_refused_while_the_job_trains(
    cluster: LocalCluster, nodes: Nodes, script: Path, record: Record
) -> None:
    script.write_text(WAITS)
    first = nodes.run_script(cluster.endpoints, script, "--lr", "1", node="a", options=QUICK)
    record.wait("start")
    other = nodes.run_script(cluster.endpoints, script, "--lr", "2", node="b", options=QUICK)
    assert other.join() == 4
    line = record.wait_line("error:")
    assert f"{script} --lr 1" in line
    assert f"{script} --lr 2" in line
    assert "--job" in record.wait_line("hint:")
    assert len(record.of("start")) == 1, "the first one was not disturbed"
    first.signal(15)
    first.join()

    again = nodes.run_script(cluster.endpoints, script, "--lr", "2", node="b", options=QUICK)
    record.wait("start", count=2)
    assert "--lr 1" in record.wait_one("job.phase", source="b")["reason"], "it goes on with the repaired line"
    again.signal(15)
    again.join()


@pytest.mark.journey
def test_another_run_under_a_finished_jobs_name_is_refused_without_new(
    cluster: LocalCluster, nodes: Nodes, script: Path, record: Record
) -> None:
    slurm = {"SLURM_JOB_ID": "4711"}
    first = nodes.run_script(cluster.endpoints, script, node="a", options=QUICK, env=slurm)
    assert first.join() == 0
    late = nodes.run_script(cluster.endpoints, script, node="b", options=QUICK, env=slurm)
    assert late.join() == 0, "the scheduler sees a finished job"
    record.wait_one("job.done_before", source="b")

    for env in ({"SLURM_JOB_ID": "4712"}, {}):
        nodes.record = other = Record()
        second = nodes.run_script(cluster.endpoints, script, node="a", options=QUICK, env=env)
        assert second.join() == 4
        line = other.wait_line("error:")
        assert re.search(rf"job {nodes.job} finished at \d\d:\d\d UTC on \d{{4}}-\d\d-\d\d", line), line
        hint = other.wait_line("hint:")
        assert "--new" in hint
        assert "--job" in hint
        assert other.of("start") == []
    nodes.record = other = Record()
    anew = nodes.run_script(cluster.endpoints, script, node="a", options=(*QUICK, "--new"))
    assert anew.join() == 0
    assert len(other.of("start")) == 1


@pytest.mark.journey
def test_a_script_that_is_missing_is_refused_before_anything_is_registered(
    cluster: LocalCluster, nodes: Nodes, script: Path, record: Record
) -> None:
    node = nodes.run_script(cluster.endpoints, script.with_name("trian.py"))
    assert node.join() == 2
    assert "trian.py" in record.wait_line("error:")
    with CoordinatorClient.connect(cluster.endpoints) as client:
        assert nodes.job not in {job.name for job in client.jobs()}


@pytest.mark.journey
def test_a_program_that_cannot_start_is_retried_once_and_runs_after_a_repair(
    cluster: LocalCluster, nodes: Nodes, script: Path, record: Record
) -> None:
    script.write_text(f"{SAYS}import trch\n")
    node = nodes.run_script(cluster.endpoints, script, options=QUICK)
    assert node.join() == 78
    assert len(record.of("start")) == 2, "one retry"
    why = "ModuleNotFoundError: No module named 'trch'"
    assert why in record.wait_one("job.ended")["reason"]
    assert (status(cluster, nodes).phase, why in status(cluster, nodes).phase_reason) == (
        JOB_PHASE_FAILED,
        True,
    )
    for words in (("status",), ("jobs", "show", nodes.job)):
        code, text = run_strata(*words, "-e", cluster.endpoints)
        assert code == 0
        assert why in " ".join(text.split())
    script.write_text(SAYS)
    repaired = nodes.run_script(cluster.endpoints, script, options=QUICK)
    assert repaired.join() == 0
    assert status(cluster, nodes).phase == JOB_PHASE_DONE
    assert len(record.of("start")) == 3


@pytest.mark.journey
def test_without_a_name_two_scripts_are_two_jobs(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path, record: Record
) -> None:
    named = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "train.py").write_text(SAYS)
        words = ("--log-format", "json", *QUICK, "--", "python", str(tmp_path / folder / "train.py"))
        node = nodes.strata("run", "-e", cluster.endpoints, *words, name=folder, env={"STRATA_JOB": None})
        assert node.join() == 0
        named.append(record.wait_one("job.named", source=folder)["job"])
    assert len(set(named)) == 2
    assert all(re.fullmatch(r"train-[0-9a-f]{6}", name) for name in named)
    several = nodes.strata("run", "-e", cluster.endpoints, "--min-workers", "2", "--", "true")
    assert several.join() == 2
    assert "--job" in record.wait_line("error:")


@pytest.mark.journey
def test_a_second_unnamed_run_on_a_host_is_refused_with_a_hint(
    cluster: LocalCluster, nodes: Nodes, script: Path, record: Record
) -> None:
    script.write_text(WAITS)

    def start(worker: str) -> Talker:
        words = ("--worker-id", worker, "--log-format", "json", *QUICK, "--", "python", str(script))
        return nodes.strata("run", "-e", cluster.endpoints, *words, name=worker, env={"STRATA_JOB": None})

    first = start("a")
    record.wait("start")
    assert start("b").join() == 4
    assert f"runs on {socket.gethostname()} already" in record.wait_line("error:")
    assert "--job" in record.wait_line("hint:")
    first.signal(15)
    first.join()
