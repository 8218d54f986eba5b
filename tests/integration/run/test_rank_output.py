"""The output of `strata run` for people: ranks' lines with their rank, why a rank ended, and `strata logs`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_port
from strata.processes.children import Child
from tests.processes import LIMIT_S
from tests.terminals import Screen

ROOT = Path(__file__).resolve().parents[3]
STRATA = (sys.executable, "-m", "strata")

TALKS = """
import os, sys, time
rank = os.environ["RANK"]
print("hello of", rank)
print(sys.stdout.isatty(), "without an end", end="")
sys.stdout.flush()
printed = os.path.join(os.path.dirname(os.path.abspath(__file__)), "rank-0-printed")
if rank == "0":
    open(printed, "w").close()
if rank == "1":
    while not os.path.exists(printed):  # the end of rank 1 ends rank 0
        time.sleep(0.01)
    sys.stderr.write("cannot go on\\n")
    sys.exit(9)
"""
# a rank with children that use multiprocessing; rank 1 kills itself, as the kernel would if memory were short
KILLED = """
import multiprocessing, os, signal, sys, time

def child(queue):
    while True:
        queue.put(1)
        time.sleep(0.001)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    for _ in range(2):
        context.Process(target=child, args=(queue,), daemon=True).start()
    queue.get()
    print("last words of", os.environ["RANK"], file=sys.stderr)
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1000)
"""
FLOODS = """
import os, sys
open(sys.argv[1] + os.environ["RANK"], "w").write(str(os.getpid()))
while True:
    os.write(1, b"x" * 4096)
"""
GROWS = """
import os, sys, time
print("begins")
sys.stdout.flush()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
print("goes on")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    base = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return {**base, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path / "state")}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    return tmp_path / "train.py"


def run_words(
    cluster: LocalCluster, job: str, script: Path, *options: str, arguments: tuple[str, ...] = ()
) -> list[str]:
    return [
        *("run", "-e", cluster.endpoints, "--job", job, "--slots", "2", "--no-devices", "--no-warm"),
        *("--max-no-progress-generations", "1", *options, "--", sys.executable, str(script), *arguments),
    ]


def ended(words: list[str], env: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a command on pipes to its end."""
    return subprocess.run(
        [*STRATA, *words], env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def test_on_a_pipe_ranks_lines_have_their_rank_and_stratas_own_are_plain_text_on_stderr(
    cluster: LocalCluster, job: str, script: Path, environment: dict[str, str]
) -> None:
    script.write_text(TALKS)
    run = ended(run_words(cluster, job, script), environment)
    assert run.returncode == 78
    for rank in (0, 1):
        assert f"[rank {rank}] hello of {rank}\n" in run.stdout
        assert f"[rank {rank}] False without an end" in run.stdout
    assert not re.search(r"^(?!\[rank \d\] )", run.stdout, re.MULTILINE), "nothing else is on stdout"
    assert "[rank 1] cannot go on\n" in run.stderr
    printed = re.search(
        r"rank\.ended rank=1 pid=\d+ code=9 reason='exited with 9'\n    cannot go on\n", run.stderr
    )
    assert printed, run.stderr
    assert "\x1b" not in run.stderr + run.stdout
    assert '{"' not in run.stderr


def test_without_a_prefix_ranks_write_to_the_output_of_the_command(
    cluster: LocalCluster, job: str, script: Path, environment: dict[str, str]
) -> None:
    script.write_text(TALKS)
    run = ended(run_words(cluster, job, script, "--no-prefix"), environment)
    assert run.stdout.count("hello of") == 2
    assert "[rank" not in run.stdout
    assert "\ncannot go on\n" in run.stderr


def test_on_a_terminal_of_80_columns_prefixes_have_colours_and_lines_come_at_once(
    cluster: LocalCluster, job: str, script: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    script.write_text(GROWS)
    words = run_words(cluster, job, script, arguments=(str(tmp_path / "go"),))
    with Screen([*STRATA, *words], columns=80, env={**environment, "PYTHONUNBUFFERED": None}) as screen:
        for rank in (0, 1):
            screen.wait_for(f"[rank {rank}] begins")
        assert "\x1b[36m[rank 0]\x1b[0m begins" in screen.raw
        (tmp_path / "go").touch()
        assert screen.ended() == 0
        assert "[rank 1] goes on" in screen.text
        assert "job.ended phase=done" in screen.text
        assert re.search(r"^\d\d:\d\d:\d\dZ \[info\] rank.ended rank=1 ", screen.text, re.MULTILINE)
        assert screen.is_restored()


@pytest.mark.parametrize("context", ["fork", "spawn"])
def test_a_killed_rank_reports_its_signal_and_last_lines_without_a_traceback(
    cluster: LocalCluster, job: str, script: Path, environment: dict[str, str], context: str
) -> None:
    script.write_text(KILLED)
    run = ended(run_words(cluster, job, script, arguments=(context,)), environment)
    assert run.returncode == 78
    assert re.search(r"rank\.ended rank=1 .*was ended by SIGKILL'\n    last words of 1\n", run.stderr), (
        run.stderr
    )
    assert "Traceback" not in run.stdout + run.stderr
    assert "resource_tracker" not in run.stdout + run.stderr


def test_ranks_that_wait_for_a_reader_end_with_an_agent_that_is_killed(
    cluster: LocalCluster, job: str, script: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    script.write_text(FLOODS)
    words = run_words(cluster, job, script, arguments=(str(tmp_path / "pid"),))
    ours, theirs = os.pipe()  # no process reads this pipe
    agent = Child.start([*STRATA, *words], env=environment, stdout=theirs, stderr=subprocess.DEVNULL)
    os.close(theirs)
    try:
        pids = [_pid(tmp_path / f"pid{rank}") for rank in (0, 1)]
        time.sleep(1.0)  # until every pipe is full
        agent.send_signal(signal.SIGKILL)
        agent.join(LIMIT_S)
        deadline = time.monotonic() + LIMIT_S
        while any(Path(f"/proc/{pid}/cmdline").exists() for pid in pids):
            assert time.monotonic() < deadline, "a rank outlives its agent"
            time.sleep(0.05)
    finally:
        agent.kill()
        agent.join(LIMIT_S)
        os.close(ours)


def _pid(file: Path) -> int:
    deadline = time.monotonic() + LIMIT_S
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < deadline, "the rank did not start"
        time.sleep(0.05)
    return int(file.read_text())


def test_logs_shows_and_follows_the_files_of_ranks_and_needs_no_coordinator(
    cluster: LocalCluster, job: str, script: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    script.write_text(GROWS)
    options = (f"--log-dir={tmp_path / 'logs'}", "--tee")
    words = run_words(cluster, job, script, *options, arguments=(str(tmp_path / "go"),))
    running = subprocess.Popen(
        [*STRATA, *words],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        files = [tmp_path / "logs" / job / f"generation-000001-rank-{rank:05}.log" for rank in (0, 1)]
        deadline = time.monotonic() + LIMIT_S
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < deadline, "no rank has written"
            time.sleep(0.05)
        following = subprocess.Popen(
            [*STRATA, "logs", job, "--follow"], env=environment, stdout=subprocess.PIPE, text=True
        )
        try:
            assert following.stdout is not None
            first = {following.stdout.readline() for _ in range(2)}
            assert first == {"[rank 0] begins\n", "[rank 1] begins\n"}
            (tmp_path / "go").touch()
            assert {following.stdout.readline() for _ in range(2)} == {
                "[rank 0] goes on\n",
                "[rank 1] goes on\n",
            }
            following.send_signal(signal.SIGINT)
            assert following.wait(LIMIT_S) == 130
        finally:
            following.kill()
            following.communicate()
        out, _ = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
        running.communicate()
    assert "[rank 1] goes on\n" in out, "--tee shows it, too"
    assert ended(["logs", job, "--rank", "1", "--lines", "1"], environment).stdout == "goes on\n"
    unknown = ended(["logs", "nobody"], environment)
    assert unknown.returncode == 4
    assert "pass --log-dir DIR to strata run" in unknown.stderr


@pytest.mark.slow
def test_a_node_without_coordinators_logs_that_every_ten_seconds_and_exits_with_3(
    environment: dict[str, str],
) -> None:
    endpoints = f"127.0.0.1:{free_port()}"
    words = ["run", "-e", endpoints, "--job", "j", "--no-devices", "--timeout-s", "11", "--", "true"]
    run = ended(words, environment)
    assert run.returncode == 3
    assert f"coordinators.unreachable endpoints={endpoints} reason=" in run.stderr
    error, hint = run.stderr.splitlines()[-2:]
    assert error.startswith(f"error: no coordinator at {endpoints} has accepted this node within 11 s: ")
    assert "Connection refused" in error
    assert "strata doctor" in hint
