"""`strata run --log-dir`: each rank's output in its own file, also for a prestarted (warm) process."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import NotFound
from tests.processes import LIMIT_S

CRASHES = """
import os, sys, time
import strata
client = strata.connect()
if client.generation == 1:
    print("last words of rank", client.rank, flush=True)
    client.barrier("here")
    if client.rank == 1:
        sys.exit(7)
client.progress(step=1, phase="waits here")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
client.close()
"""
SCRIPT = """
import os, sys, time
import strata
client = strata.connect()
print("out of rank", client.rank, flush=True)
print("err of rank", client.rank, file=sys.stderr, flush=True)
client.progress(step=1, phase="waits here")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
client.close()
"""


def environment(tmp_path: Path) -> dict[str, str]:
    """Return this process's environment, but with the links to output folders below the test's own folder."""
    return {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}


def evidence(client: CoordinatorClient, job: str) -> Any:
    """Return the status resource of rank 1 once it has both lines of output and a stack."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NotFound):
            found = client.resource(f"/jobs/{job}/ranks/1")
            if len(found["log"]) == 2 and "train.py" in found["stack"]:
                return found
        time.sleep(0.2)
    raise TimeoutError("nothing is shown of rank 1")


def crashed_rank(client: CoordinatorClient, job: str) -> Any:
    """Return the status resource of rank 1 once it runs in generation 2."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NotFound):
            found = client.resource(f"/jobs/{job}/ranks/1")
            if found["log_generation"] == 2:
                return found
        time.sleep(0.2)
    raise TimeoutError("nothing is shown of rank 1 in generation 2")


@pytest.mark.parametrize("warm", [True, False])
def test_each_rank_logs_to_its_own_file_whose_last_lines_are_shown(
    cluster: LocalCluster, tmp_path: Path, warm: bool
) -> None:
    script, stop, logs = tmp_path / "train.py", tmp_path / "stop", tmp_path / "logs"
    script.write_text(SCRIPT)
    job = f"logged-{warm}"
    command = [
        sys.executable,
        "-m",
        "strata",
        "run",
        f"--endpoints={cluster.endpoints}",
        f"--job={job}",
        "--slots=2",
    ]
    command += [
        f"--log-dir={logs}",
        *([] if warm else ["--no-warm"]),
        "--",
        sys.executable,
        str(script),
        str(stop),
    ]
    with (
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path)
        ) as running,
        CoordinatorClient.connect(cluster.endpoints, job=job) as client,
    ):
        try:
            seen = evidence(client, job)
            assert seen["log"] == ["out of rank 1", "err of rank 1"]
            assert "train.py" in seen["stack"]
            stop.touch()
            out, _err = running.communicate(timeout=LIMIT_S)
        finally:
            running.kill()
    assert running.returncode == 0
    assert "out of rank" not in out
    for rank in range(2):
        text = (logs / job / f"generation-000001-rank-{rank:05}.log").read_text()
        assert text == f"out of rank {rank}\nerr of rank {rank}\n"


def test_a_crashed_ranks_output_is_shown_beside_that_of_its_next_process(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    script, stop, logs = tmp_path / "train.py", tmp_path / "stop", tmp_path / "logs"
    script.write_text(CRASHES)
    job = "crashed-and-logged"
    command = [sys.executable, "-m", "strata", "run", f"--endpoints={cluster.endpoints}", f"--job={job}"]
    command += ["--slots=2", f"--log-dir={logs}", "--", sys.executable]
    with (
        subprocess.Popen(
            [*command, str(script), str(stop)], stderr=subprocess.DEVNULL, env=environment(tmp_path)
        ) as running,
        CoordinatorClient.connect(cluster.endpoints, job=job) as client,
    ):
        try:
            found = crashed_rank(client, job)
            assert (found["log_generation"], found["log"], found["log_ended"]) == (2, [], "")
            assert found["log_file"] == str(logs / job / "generation-000002-rank-00001.log")
            before = found["log_before"]
            assert (before["generation"], before["lines"]) == (1, ["last words of rank 1"])
            assert before["ended"].startswith("exited with 7")
            stop.touch()
            running.wait(LIMIT_S)
        finally:
            running.kill()
    assert running.returncode == 0
