"""A standalone process and its agent: a child process that holds the session and ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import RANKS
from tests.polling import until
from tests.processes import LIMIT_S, wait_exit

pytestmark = pytest.mark.timeout(60)
SCRIPT = str(RANKS / "standalone.py")
END_S = 1.0
"""An agent ends within this time after its process."""
NOISE_S = 1.0
"""Additional seconds on a busy machine."""


class Programs:
    """Starts standalone processes of one job."""

    def __init__(self, cluster: LocalCluster, job: str, storage: Path) -> None:
        self._environment = {
            **os.environ,
            "STRATA_ENDPOINTS": cluster.endpoints,
            "STRATA_JOB": job,
        }
        self._job = job
        self._storage = storage
        self._started: list[subprocess.Popen[str]] = []

    def start(self, mode: str, *before: str, **environment: str) -> subprocess.Popen[str]:
        started = subprocess.Popen(
            [*before, sys.executable, SCRIPT, mode, str(self._storage)],
            env={**self._environment, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(started)
        return started

    def standbys(self) -> list[str]:
        """Return the standby members of the job."""
        with CoordinatorClient.connect(self._environment["STRATA_ENDPOINTS"], job=self._job) as client:
            return list(client.job_status().standbys)

    def end(self) -> None:
        for one in self._started:
            one.kill()
            one.communicate()


@pytest.fixture
def programs(cluster: LocalCluster, job: str, tmp_path: Path) -> Iterator[Programs]:
    these = Programs(cluster, job, tmp_path / "storage")
    yield these
    these.end()


def received(process: subprocess.Popen[str], event: str) -> dict[str, Any]:
    """Return the process's next event of that kind."""
    assert process.stdout is not None
    for line in process.stdout:
        found: dict[str, Any] = json.loads(line)
        if found["event"] == event:
            return found
    raise AssertionError(process.communicate()[1])


@pytest.mark.journey
def test_a_training_imports_no_grpc_and_leaves_nothing_behind(programs: Programs, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = programs.start("train", TMPDIR=str(temporary))
    trained = received(process, "trained")
    assert (trained["step"], trained["grpc"]) == (2, False)
    (agent,) = trained["agents"]
    out, errors = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out, errors) == (0, "", "")
    assert wait_exit(agent, END_S + NOISE_S)
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("how", ["SIGKILL", "os._exit", "exec", "hang in exit", "close all"])
def test_an_agent_ends_with_its_process_however_that_ends(
    how: str, programs: Programs, tmp_path: Path
) -> None:
    process = programs.start("dies")
    (agent,) = received(process, "joined")["agents"]
    assert process.stdin is not None
    if how == "SIGKILL":
        process.kill()
    else:
        process.stdin.write(f"{how}\n")
        process.stdin.flush()
    assert ended(agent, END_S + NOISE_S)
    if how in {"SIGKILL", "os._exit"}:
        began = time.monotonic()
        process.communicate(timeout=LIMIT_S)
        assert time.monotonic() - began < END_S, "the agent holds none of its pipes"


def ended(pid: int, limit_s: float) -> bool:
    """Return True if the process ends within the limit. A zombie counts as ended, even if not reaped."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_signals_to_the_group_spare_the_agent(programs: Programs) -> None:
    process = programs.start("hold")
    (agent,) = received(process, "joined")["agents"]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(agent, number)
    assert os.getsid(agent) == agent
    time.sleep(0.3)
    assert not ended(agent, 0.1)
    assert process.poll() is None


def test_a_rank_whose_agent_died_raises_stale_incarnation(programs: Programs) -> None:
    process = programs.start("hold")
    (agent,) = received(process, "joined")["agents"]
    os.kill(agent, signal.SIGKILL)
    assert received(process, "raised")["kind"] == "StaleIncarnation"
    process.communicate(timeout=LIMIT_S)


@pytest.mark.parametrize("mode", ["step", "hang"])
def test_a_training_ends_with_its_agent_whatever_its_main_thread_does(mode: str, programs: Programs) -> None:
    process = programs.start(mode)
    (agent,) = received(process, "steps" if mode == "step" else "hangs")["agents"]
    began = time.monotonic()
    os.kill(agent, signal.SIGKILL)
    assert process.wait(LIMIT_S) == 1
    assert time.monotonic() - began < END_S + NOISE_S


def test_a_frozen_process_is_lost_and_another_takes_its_name(programs: Programs) -> None:
    frozen = programs.start("step", STRATA_WORKER_ID="w")
    (agent,) = received(frozen, "steps")["agents"]
    frozen.send_signal(signal.SIGSTOP)
    assert ended(agent, LIMIT_S), "it leaves, and ends"
    other = programs.start("train", STRATA_WORKER_ID="w")
    received(other, "trained")
    frozen.send_signal(signal.SIGCONT)
    assert frozen.wait(LIMIT_S) == 1
    assert "this process was removed from the job" in frozen.communicate()[1]
    assert other.wait(LIMIT_S) == 0


def test_a_process_that_is_stopped_for_a_moment_stays(programs: Programs) -> None:
    process = programs.start("hold")
    received(process, "joined")
    process.send_signal(signal.SIGSTOP)
    time.sleep(1.0)
    process.send_signal(signal.SIGCONT)
    time.sleep(2.0)
    assert process.poll() is None


def test_at_the_end_of_its_generation_a_client_rejoins(programs: Programs) -> None:
    client, lost = (programs.start("hold", LEAST="2") for _ in range(2))
    received(client, "joined")
    received(lost, "joined")
    lost.kill()
    assert received(client, "raised")["kind"] == "StaleGeneration"
    other = programs.start("hold", LEAST="2")
    assert received(client, "rejoined")["generation"] == received(other, "joined")["generation"]


@pytest.mark.parametrize("mode", ["step", "hang"])
def test_at_the_end_of_its_generation_a_training_ends_with_75(mode: str, programs: Programs) -> None:
    trainer, lost = programs.start(mode, LEAST="2"), programs.start("step", LEAST="2")
    received(trainer, "steps" if mode == "step" else "hangs")
    received(lost, "steps")
    lost.kill()
    assert trainer.wait(LIMIT_S) == 75
    assert "start it under `strata run` to have it restarted" in trainer.communicate()[1]


def test_a_training_that_cannot_restart_is_not_ended_by_a_newcomer(programs: Programs) -> None:
    one_or_two = {"LEAST": "1", "MOST": "2"}
    first = programs.start("step", **one_or_two)
    received(first, "steps")
    second = programs.start("step", **one_or_two)
    until(programs.standbys, "the second one did not come", limit_s=LIMIT_S)
    time.sleep(4.0)  # longer than the members' settle time
    assert (first.poll(), second.poll()) == (None, None)
    first.kill()
    assert received(second, "steps")["generation"] == 2, "it stood by"


def test_in_a_notebook_the_error_is_raised_and_the_process_lives_on(programs: Programs) -> None:
    process = programs.start("notebook")
    (agent,) = received(process, "steps")["agents"]
    os.kill(agent, signal.SIGKILL)
    assert received(process, "raised") == {"event": "raised", "kind": "StaleIncarnation", "pid": process.pid}
    (other,) = received(process, "steps")["agents"]
    assert other != agent


def test_a_standalone_process_supports_spawned_but_not_forked_children(programs: Programs) -> None:
    process = programs.start("children")
    forked = received(process, "forked")
    assert "was forked from" in forked["printed"]
    assert received(process, "child")["rank"] == 0
    children = received(process, "children")
    assert (children["spawned"], children["shell"], children["same"]) == (0, 0, True)
    assert process.wait(LIMIT_S) == 0


def test_a_process_in_another_pid_namespace_has_its_agent_there(programs: Programs) -> None:
    process = programs.start("train", "unshare", "-Urpf", "--mount-proc")
    assert received(process, "trained")["step"] == 2
    assert process.wait(LIMIT_S) == 0
