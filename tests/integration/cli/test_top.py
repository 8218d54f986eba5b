"""`strata top` and the status line of `strata run`, with a training on a real cluster."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strata.devcluster.local_cluster import LocalCluster
from strata.devcluster.ports import free_port
from tests.cluster_fixtures import StartCluster, run_strata
from tests.terminals import Screen

TRAINING = """
import time
import strata

state = {"weight": 1.0}
run = strata.init(state=state, total_steps=10_000, seed=1)
with run:
    while run.step < 10_000:
        run.report(loss=10_000 / (run.step + 1))
        run.step_done(samples=8)
        print(f"a line of rank {run.world.rank} after step {run.step}", flush=True)
        time.sleep(0.02)
"""


def strata(*words: str) -> list[str]:
    return [sys.executable, "-m", "strata", *words]


@pytest.fixture
def training(cluster: LocalCluster, job: str, tmp_path: Path) -> Iterator[Screen]:
    """A training on its own terminal."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING)
    command = strata("run", "-e", cluster.endpoints, "--job", job, "--slots", "2", "--")
    env = {"STRATA_TRAIN_STORAGE": str(tmp_path / "checkpoints"), "STRATA_TRAIN_SAVE_EVERY_STEPS": "50"}
    with Screen([*command, sys.executable, str(script)], columns=110, env=env) as screen:
        yield screen


@pytest.mark.journey
@pytest.mark.slow
def test_top_shows_a_training_that_runs_on_a_terminal(
    cluster: LocalCluster, training: Screen, job: str
) -> None:
    where = ("-e", cluster.endpoints)
    training.wait_for("of 10,000")
    training.wait_for("steps/s")
    training.wait_for("loss ")
    training.wait_for("saved ")

    def looked() -> Any:
        code, output = run_strata("top", *where, "--job", job, "--json")
        assert code == 0, output
        return json.loads(output)

    found = looked()
    assert found["job"]["summary"]["progress"]["target_step"] == 10_000
    assert found["ranks"]["size"] == 2
    deadline = time.monotonic() + 10
    while not found["history"]["series"]["reported.loss"]["values"]:  # the chart lags by one second
        assert time.monotonic() < deadline, found["history"]
        found = looked()
    code, output = run_strata("top", *where, "--json")
    assert code == 0, output
    assert job in {each["name"] for each in json.loads(output)["jobs"]}

    code, output = run_strata("top", *where, "--job", job)
    assert code == 0, output
    assert "\x1b" not in output
    assert output.startswith(f"{job}  running  gen"), "the rest is cut off at 80 columns"
    assert re.search(r"^step +[0-9,]+ of 10,000 .* ETA ", output, re.MULTILINE)
    assert re.search(r"^saved +step ", output, re.MULTILINE)
    assert re.search(r"^ +1  ", output, re.MULTILINE)

    os.kill(training.pid, signal.SIGTERM)
    assert training.ended() == 75
    assert training.is_restored()
    drawn = re.sub(r"\x1b7(?:(?!\x1b8).)*\x1b8", "", training.raw, flags=re.DOTALL)
    words = re.sub(r"\x1b(?:\[[0-9;]*[A-Za-z]|D)", "", drawn)
    assert "of 10,000" not in words, "the status line, in the lines of others"
    steps = [int(step) for step in re.findall(r"a line of rank 0 after step (\d+)", words)]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.parametrize("words", [("top",), ("top", "--json"), ("top", "--once")], ids=" ".join)
def test_top_without_coordinators_exits_with_3(words: tuple[str, ...]) -> None:
    code, output = run_strata(*words, "--endpoints", f"127.0.0.1:{free_port()}", "--timeout-s", "1")
    assert code == 3, output
    assert "error: " in output
    assert "Traceback" not in output


def test_top_of_a_job_that_does_not_exist_names_it(cluster: LocalCluster) -> None:
    code, output = run_strata("top", "-e", cluster.endpoints, "--job", "never-begun")
    assert code == 4, output
    assert "never-begun" in output
    assert "Traceback" not in output


@pytest.mark.slow
def test_top_fails_over_to_another_replica_and_shows_the_age_of_its_data(start_cluster: StartCluster) -> None:
    cluster = start_cluster(coordinators=2)
    with Screen(strata("top", "-e", cluster.endpoints), columns=120) as top:
        top.wait_for("via coordinator-")
        first = re.findall(r"via (coordinator-\d)", top.text)[-1]
        serving = {each.name: each for each in cluster.coordinators}
        serving.pop(first).child.kill()
        (other,) = serving.values()
        top.wait_for(f"via {other.name}")
        other.child.kill()
        top.forget()
        top.wait_for("s old")
        top.wait_for("no coordinator answered")
        assert top.text.count("cluster ") > 0
        top.press("q")
        assert top.ended() == 0
        assert top.is_restored()
