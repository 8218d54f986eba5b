"""The examples of docs/training.md run unchanged, in a standalone process."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import strata
from strata.config import TrainingConfig, settings
from strata.data.sampler import ElasticSampler

pytestmark = pytest.mark.timeout(180)

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "training.md").read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)

TORCH = """
import torch
def make_net(): return torch.nn.Linear(4, 2)
def make_optim(net): return torch.optim.SGD(net.parameters(), lr=0.1)
net = make_net()
opt = make_optim(net)
sched = torch.optim.lr_scheduler.StepLR(opt, 10)
data = [(torch.ones(4) * i) for i in range(64)]
loader = torch.utils.data.DataLoader(data, batch_size=4)
loss_of = lambda out: out.pow(2).mean()
"""
NUMPY = """
import numpy as np
import strata
weights = np.zeros(3)
images = np.ones((960, 3))
def gradient(weights, batch=images): return (weights - batch).mean(0)
"""


SHARDS = """
from types import SimpleNamespace
run = strata.init(state={"weights": weights})
registry = SimpleNamespace(get_assigned_shards=lambda **_: [SimpleNamespace(index=index) for index in (3, 5)])
def read(shard, after):
    for done in range(after + 8, 25, 8):
        print("read", shard.index, done)
        yield done, images[done - 8 : done]
"""


def block(which: str) -> str:
    (found,) = [block for block in BLOCKS if which in block]
    return found


def run(code: str, folder: Path) -> str:
    env = {
        k: v for k, v in os.environ.items() if not k.startswith("STRATA_") and k not in {"RANK", "WORLD_SIZE"}
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), "STRATA_TRAIN_SAVE_EVERY_STEPS": "2"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_examples_with_torch_run(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    first = block("three changed lines")
    lines = first.splitlines()[:3]
    called = "run = strata.init(model=net, optim=opt, sched=sched, data=loader)"
    design = (
        "import strata                                   # three changed lines",
        called + "   # joins, initialises the process group if absent, restores",
        "for batch in run.steps(loader, accumulate=4):                       # position, cadence, barriers, preemption",
    )
    assert tuple(lines) == design, "the promised lines, verbatim"
    code = f"{TORCH}\n{first}\nrun.close()\nprint(run.step, run.checkpoints.all_steps())\n"
    later = block("def main(orchestrator)").replace("        ...", "        print('again', run.step)")
    printed = run(f"{code}\n{later}", tmp_path)
    assert printed.splitlines() == ["4 [2, 4]"], (
        "16 batches, 4 a step; the second run finds its epoch finished"
    )


def test_the_examples_without_torch_run(tmp_path: Path) -> None:
    code = NUMPY + block("while run.step <") + "print(run.step, weights.round(3).tolist())\n"
    assert run(code, tmp_path) == "100 [1.0, 1.0, 1.0]\n"
    code = NUMPY + block("ElasticSampler(") + "print(run.step, run.goodput().ratio > 0)\n"
    other = tmp_path / "other"
    other.mkdir()
    assert run(code, other) == "10 True\n"
    shards = NUMPY + SHARDS + block("run.cursors(")
    code = shards.replace(
        "\nrun.close()", "\n        if run.step == 4: break\n    if run.step == 4: break\nrun.close()"
    )
    (tmp_path / "shards").mkdir()
    assert run(code, tmp_path / "shards") == "read 3 8\nread 3 16\nread 3 24\nread 5 8\n"
    assert run(shards, tmp_path / "shards") == "read 5 16\nread 5 24\n"
    virtual = (
        TORCH
        + "import strata\n"
        + block("virtual_ranks=12").replace("data=loader,", "data=loader, storage_path='virtual',")
    )
    assert run(virtual + "print(run.step)\n", tmp_path) == "2\n", "64 samples in global batches of 48"
    assert "TrainingOrchestrator(" in block("min_workers=2")
    assert (
        run("import strata\n" + block("min_workers=2") + "print(orchestrator.config.keep_count)\n", tmp_path)
        == "3\n"
    )


def test_every_setting_is_named() -> None:
    names = {entry.toml.removeprefix("train.") for entry in settings(TrainingConfig)}
    table = {
        name for row in re.findall(r"^\| .*$", PAGE, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    }
    assert names <= table


@pytest.mark.parametrize("name", inspect.signature(strata.init).parameters)
def test_every_argument_of_init_is_explained(name: str) -> None:
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert re.search(rf"`(?:strata\.init\()?{name}(?:=[^`]*)?`", prose), (
        f"no text of the page says what {name} does"
    )


def test_the_page_states_the_scale_of_a_weighted_loss() -> None:
    assert "Log the loss without the weight" in PAGE
    assert "about a quarter with `accumulate=4`" in PAGE
    whole, halved = (
        [piece.weight for piece in ElasticSampler(62, global_batch=31, most=most).pieces(0, size, done=0)]
        for most, size in ((8, 1), (8, 2))
    )
    assert whole[:4] == pytest.approx([0.25] * 4, rel=0.15)
    assert whole[:2] != halved[:2], "the scale changes with the world"


def test_steps_read_the_data_of_init_and_its_state_is_saved_and_restored(tmp_path: Path) -> None:
    code = f"""
import strata
for _ in range(2):
    own = {{"seen": 0}}
    run = strata.init(data=[1, 2, 3], state=own, storage_path={str(tmp_path / "root")!r})
    print(own["seen"], end=" ")
    for number in run.steps():
        own["seen"] += number
    run.close()
    print(own["seen"])
"""
    assert run(code, tmp_path) == "0 6\n6 6\n"
