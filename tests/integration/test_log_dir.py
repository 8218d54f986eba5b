"""`strata run --log-dir`: each rank's output in a file of its own, also of a process that had imported before."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from strata.client import CoordinatorClient
from strata.errors import NotFound
from strata.launch.local_cluster import LocalCluster
from tests.processes import LIMIT_S

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


def evidence(client: CoordinatorClient, job: str) -> Any:
    """Return what is shown of rank 1, once it has written both lines and its stack is known."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(NotFound):
            found = client.resource(f"/jobs/{job}/ranks/1")
            if len(found["log"]) == 2 and "train.py" in found["stack"]:
                return found
        time.sleep(0.2)
    raise TimeoutError("nothing is shown of rank 1")


@pytest.mark.parametrize("warm", [True, False])
def test_each_rank_writes_into_its_own_file_and_a_look_shows_its_end(
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
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running,
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
