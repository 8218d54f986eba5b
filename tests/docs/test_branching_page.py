"""The commands and programs of docs/branching.md run unchanged: a stage is evaluated while its job trains, and forked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import ROOT, Nodes
from tests.docs.test_training_page import run
from tests.processes import Record

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PAGE = (ROOT / "docs" / "branching.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
(SCRIPT,) = (text for language, text in BLOCKS if language == "python")
COMMANDS = [line for language, text in BLOCKS if language == "sh" for line in text.splitlines()]
NET = "import safetensors.torch, torch, strata\nnet = torch.nn.Linear(4, 1)\n"
SLOW_S = 120.0
"""Time without events of a rank that imports torch, on a busy machine."""
STEP = "\n        opt.step()\n"
WAITS = """
        import os, time
        while run.step == 28 and not os.path.exists("go"):
            time.sleep(0.05)
"""
"""Keeps the parent in the middle of a step until its stage is evaluated."""

SAYS = "print('begins at', run.step, flush=True)\nfor epoch"


def inline(begin: str) -> str:
    """Return the page's statement in running text that begins like this."""
    (found,) = re.findall(rf"`({re.escape(begin)}[^`]*)`", PAGE)
    return str(found)


class Terminal:
    """Types the page's commands in one folder, for this test's job in place of `gpt`."""

    def __init__(self, cluster: LocalCluster, nodes: Nodes, folder: Path) -> None:
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
        self.env = {"PATH": path, "PYTHONPATH": str(ROOT), "STRATA_ENDPOINTS": cluster.endpoints}
        self.env |= {"STRATA_LOG_FORMAT": "json", "COLUMNS": "160"}
        self.nodes = nodes
        self.folder = folder

    def argv(self, part: str) -> list[str]:
        (line,) = (line for line in COMMANDS if part in line)
        return shlex.split(re.sub(r"\bgpt\b", self.nodes.job, line))

    def does(self, part: str, *, code: int = 0) -> str:
        """Run the page's command that contains `part` to its end; return its output."""
        done = subprocess.run(
            self.argv(part),
            check=False,
            capture_output=True,
            text=True,
            timeout=SLOW_S,
            cwd=self.folder,
            env={**os.environ, **self.env},
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout


def test_a_stage_is_evaluated_while_its_job_trains_and_forked_into_a_branch(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    terminal = Terminal(cluster, nodes, tmp_path)
    assert SCRIPT.count(STEP) == 1
    (tmp_path / "train.py").write_text(SCRIPT.replace(STEP, WAITS + STEP).replace("for epoch", SAYS))
    begins = ("strata", "run", "--job", nodes.job, "--", "python", "train.py")
    parent = nodes.start(*begins, name="parent", env=terminal.env, cwd=tmp_path)
    record.wait("rank.started", limit_s=SLOW_S)
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job, timeout_s=SLOW_S) as client:
        client.call_until(GetJobRequest(job=nodes.job), lambda answer: bool(answer.job.latest_step >= 24))
        assert "step 16 is warmup" in terminal.does("checkpoints tag")
        terminal.does("checkpoints pin")
        terminal.does("checkpoints export")
        assert run(NET + inline("net.load_state_dict(") + "\nprint(len(net.weight))", tmp_path) == "1\n"
        assert parent.child.poll() is None, "it trains meanwhile"
        (tmp_path / "go").touch()
        assert parent.join(SLOW_S) == 0
        assert client.job_status().world.generation == 1, "nothing disturbed it"
        kept = [checkpoint.step for checkpoint in client.checkpoints()]
    assert kept == [16, 24, 48, 56, 64], "the tagged one, the pinned one, and the three newest"

    terminal.does("checkpoints fork")
    branch = nodes.start(*terminal.argv("strata run"), name="branch", env=terminal.env, cwd=tmp_path)
    assert branch.join(SLOW_S) == 0
    record.wait_line("begins at 16")
    shown = terminal.does("checkpoints show")
    assert re.search(r"strata\.config\.lr +0\.01", shown)
    assert re.search(r"optim\.param_groups\.0\.lr +0\.01", shown), "it trained with its own rate"
    assert re.search(r"strata\.step +16 became 64", terminal.does("checkpoints diff"))
    verified = terminal.does("verify-run", code=1)
    assert "step 48, the first, differs" in verified
    assert "model.weight: float32[1, 4]" in verified
    assert re.search(r"samples +13 +0", verified), "the same samples"


def test_a_program_restores_a_step_of_a_root_without_coordinators_while_it_is_used(tmp_path: Path) -> None:
    script = SCRIPT.replace("parse_args()", "parse_args([])").replace(STEP, f"{STEP}        evaluate()\n")
    restores = inline("strata.CheckpointManager(")
    evaluates = f"""
import subprocess, sys
def evaluate():
    if run.step == 17:
        run.checkpoints.wait_until_finished()
        subprocess.run([sys.executable, "-c", {NET + f"print({restores}.step)"!r}], check=True)
"""
    printed = run(evaluates + script + "print(run.step, run.checkpoints.all_steps())\n", tmp_path)
    assert printed.splitlines() == ["16", "64 [48, 56, 64]"]
