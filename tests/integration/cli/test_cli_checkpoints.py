"""`strata checkpoints` against coordinators: show, keep, export, fork, delete."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import Record
from tests.unit.cli.in_process import run_command


class Commands:
    """Runs `strata checkpoints` for one job."""

    def __init__(self, endpoints: str, job: str) -> None:
        self._where = ("--endpoints", endpoints, "--job", job)

    def run(self, *words: object, code: int = 0) -> str:
        return run_command("checkpoints", *words, *self._where, code=code)

    def values(self, *words: object, code: int = 0) -> Any:
        return json.loads(self.run(*words, "--json", code=code))


@pytest.mark.journey
def test_the_checkpoints_commands_work_on_a_jobs_checkpoints(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    storage = tmp_path / "storage"
    nodes.run(cluster.endpoints, "saving", "--storage", str(storage), "--steps", "20")
    assert nodes.talkers[0].join() == 0
    commands = Commands(cluster.endpoints, nodes.job)
    listed = commands.values("list")
    assert [(c["step"], c["state"], c["latest"]) for c in listed] == [
        (5, "committed", False),
        (10, "committed", False),
        (15, "committed", False),
        (20, "committed", True),
    ]
    assert {"mod_revision", "tags", "tiers"} <= listed[0].keys(), "with all that the catalog says"

    assert "progress.step" in commands.run("show", 10)
    assert [v["path"] for v in commands.values("diff", 5, 10)["values"]] == ["progress.step"]
    image = Path(listed[2]["path"].removeprefix("file://")) / "rank-00000.safetensors"
    image.write_bytes(image.read_bytes()[:-1] + b"?")
    output = commands.run("verify", "--all", code=1)
    assert output.count(": good") == 3
    assert "step 15, generation 1: CORRUPT" in output

    commands.run("pin", 5, "--why", "the first")
    commands.run("tag", 10, "best")
    assert "is pinned" in commands.run("delete", 5, "--yes", code=4)
    assert "best" in commands.run("delete", "best", "--yes", code=4)
    assert "latest" in commands.run("delete", 20, "--yes", code=4)
    assert commands.values("show", "best")["tags"] == ["best"]
    out = tmp_path / "best.safetensors"
    commands.run("export", "best", out)
    assert np.all(load_file(out)["sum"] == 55)

    commands.run("unpin", 5)
    commands.run("delete", 5, "--yes")
    assert not list(storage.glob("*/step-*05-*")), "its files are gone"
    assert [c["step"] for c in commands.values("list")] == [10, 15, 20], "and so is its record"
    commands.run("untag", "best")
    assert "nothing to remove" in commands.run("gc")
    assert "keep_count" in commands.run("gc", "--keep-count", 1, code=2)

    fork = f"{nodes.job}-fork"
    commands.run("fork", 20, "--to", fork)
    other = Commands(cluster.endpoints, fork)
    (forked,) = other.values("list")
    assert (forked["step"], forked["generation"], forked["origin_job"]) == (20, 0, nodes.job)
    assert "good" in other.run("verify"), "a fork is verified where its source lies"
    assert "it was forked already" in commands.run("fork", 10, "--to", fork, code=4)


@pytest.mark.journey
def test_a_file_becomes_the_checkpoint_that_a_job_begins_from(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    save_file({"w": np.arange(5.0)}, tmp_path / "theirs.safetensors")
    program = (sys.executable, "-m", "strata", "checkpoints", "import", str(tmp_path / "theirs.safetensors"))
    where = ("--endpoints", cluster.endpoints, "--job", nodes.job)
    node = nodes.strata("run", *where, "--", *program, "--step", "7", "--storage", str(tmp_path / "storage"))
    assert node.join() == 0
    commands = Commands(cluster.endpoints, nodes.job)
    (imported,) = commands.values("list")
    assert (imported["step"], imported["latest"]) == (7, True)
    assert imported["metadata"] == {"imported_from": "theirs.safetensors"}
    fork = f"{nodes.job}-begins"
    commands.run("fork", "latest", "--to", fork)
    assert [c["step"] for c in Commands(cluster.endpoints, fork).values("list")] == [7]
