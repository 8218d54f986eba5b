"""The examples of docs/client.md run as they stand, on real coordinators."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import strata
from strata.devcluster.local_cluster import LocalCluster

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "client.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
ENDPOINTS = "host1:50051,host2:50051,host3:50051"


def run(which: str, cluster: LocalCluster, job: str) -> list[str]:
    """Run the one example that contains `which` in its own process; return its output."""
    (block,) = [block for block in BLOCKS if which in block]
    assert ENDPOINTS in block
    code = block.replace(ENDPOINTS, cluster.endpoints).replace('"notes"', repr(job))
    done = subprocess.run(
        [sys.executable, "-c", "import strata\n" + code],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.journey
def test_the_example_of_one_rank_runs(cluster: LocalCluster, job: str) -> None:
    assert run("client.barrier(", cluster, job) == ["0 1 1"]


def test_the_examples_beside_a_member_run(cluster: LocalCluster, job: str) -> None:
    with strata.connect(cluster.endpoints, job=job, worker_id="w0"):
        status, world = run("cluster.heartbeat(", cluster, job)
        assert job in status
        assert world == "1 ['w0']"
        assert run("get_assigned_shards(", cluster, job) == [f"{i} /data/part-{i:03d}.bin" for i in range(64)]
