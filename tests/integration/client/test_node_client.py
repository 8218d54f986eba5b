"""The unary API from another language: Node.js members train, save, lose a member and go on."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

import strata
from strata import CheckpointManager, CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.conftest import need
from tests.processes import Record

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = ROOT / "tests" / "integration" / "node_client"
INSTALLED = ROOT / ".strata" / "node"
"""A folder that git ignores, so each clone fetches the packages once."""
pytestmark = pytest.mark.timeout(240)  # the first run in a clone fetches packages
PAGE = (ROOT / "docs" / "api.md").read_text()


@pytest.fixture(scope="module")
def node() -> dict[str, str]:
    """The environment in which a Node.js program finds its packages."""
    found = shutil.which("node") is not None and shutil.which("npm") is not None
    need("node", found, "install nodejs and npm")
    wanted = (PROGRAM / "package.json").read_text()
    mark = INSTALLED / "installed.json"
    if not mark.exists() or mark.read_text() != wanted:
        INSTALLED.mkdir(parents=True, exist_ok=True)
        (INSTALLED / "package.json").write_text(wanted)
        done = subprocess.run(
            [
                "npm",
                "install",
                "--omit=dev",
                "--no-audit",
                "--no-fund",
                "--no-package-lock",
                "--ignore-scripts",
            ],
            cwd=INSTALLED,
            capture_output=True,
            text=True,
            timeout=150,
            check=False,
        )
        need("node", done.returncode == 0, f"npm could not fetch the packages: {done.stderr[-500:]}")
        mark.write_text(wanted)
    return {"NODE_PATH": str(INSTALLED / "node_modules")}


@pytest.mark.slow
def test_three_members_meet_save_and_lose_one(
    cluster: LocalCluster, nodes: Nodes, record: Record, job: str, node: dict[str, str], tmp_path: Path
) -> None:
    root = tmp_path / "saves"
    talkers = [
        nodes.start(
            *(
                "node",
                str(PROGRAM / "member.js"),
                cluster.endpoints,
                job,
                name,
                str(root),
                str(ROOT / "proto"),
            ),
            name=name,
            env=node,
        )
        for name in ("n0", "n1", "n2")
    ]
    record.wait("saved", count=3, state="CHECKPOINT_STATE_COMMITTED", step=10)
    ranks = {event["worker"]: event["rank"] for event in record.wait("world", count=3, size=3)}
    for round_ in (1, 2):
        brought = {str(rank): f"{worker} in round {round_}" for worker, rank in ranks.items()}
        assert [event["payloads"] for event in record.of("met", round=round_)] == [brought] * 3
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        served = {member.worker_id: member.served_by for member in client.members()}
        latest = client.latest_checkpoint()
        assert (latest.step, dict(latest.metadata)) == (10, {"writer": "node"})
    victim = record.wait_one("idle")
    next(talker for talker in talkers if talker.name == victim["worker"]).signal(signal.SIGKILL)
    record.wait("left", count=2)

    errors = {event["what"]: event for event in record.of("error")}
    assert (errors["unknown job"]["status"], errors["unknown job"]["code"]) == ("NOT_FOUND", "NOT_FOUND")
    assert "first member" in errors["unknown job"]["hint"]
    assert errors["another's rank"]["status"] == "FAILED_PRECONDITION"
    assert errors["another's rank"]["code"] == "REFUSED"
    assert errors["a death"]["status"] == errors["an old generation"]["status"] == "ABORTED"
    assert errors["a death"]["code"] in {"BARRIER_BROKEN", "STALE_GENERATION"}
    assert errors["an old generation"]["code"] == "STALE_GENERATION"
    after = record.of("world", size=2)
    assert {event["restore"] for event in after} == {10}, "the next world begins where they saved"
    assert record.of("heartbeat_failed") == []
    assert set(served) == {"n0", "n1", "n2"}

    restores(cluster, job, root)


def restores(cluster: LocalCluster, job: str, root: Path) -> None:
    """The Python library restores the checkpoint of the Node.js members and verifies every byte."""
    one = strata.connect(cluster.endpoints, job=job, worker_id="p0", min_workers=1)
    with one as client, CheckpointManager(str(root), client=client) as checkpoints:
        weights = np.zeros(1000, np.float32)
        state: dict[str, object] = {"weights": weights, "step": 0}
        found = checkpoints.restore(state)
        assert found is not None
        assert found.step == state["step"] == 10
        assert np.array_equal(weights, np.arange(1000, dtype=np.float32))


@pytest.mark.journey
def test_the_member_example_of_the_page_runs_unchanged(
    cluster: LocalCluster, job: str, node: dict[str, str], nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    (block,) = re.findall(r"^```js\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (expected,) = re.findall(r"^It prints:\n\n```text\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    endpoints = "host1:50051,host2:50051,host3:50051"
    assert endpoints in block
    program = tmp_path / "member.js"
    program.write_text(block.replace(endpoints, cluster.endpoints).replace('"notes"', f'"{job}"'))
    talker = nodes.start("node", str(program), name="page", env=node, cwd=ROOT)
    assert talker.join() == 0
    assert [event["text"] for event in record.of("line")] == expected.splitlines()
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        assert client.job_status().phase_reason == "all 1 ranks are done"
