"""The programs and commands of docs/frameworks/adopt.md run unchanged, on files of torch, of DCP and of safetensors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from tests.docs.test_training_page import run

torch: Any = pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "frameworks" / "adopt.md").read_text()
FENCE = re.compile(r"^```(?:python|sh)\n(.*?)^```", re.MULTILINE | re.DOTALL)

OBJECTS = """
import torch
import strata
from strata import CheckpointManager
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
opt = torch.optim.AdamW(net.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader([torch.ones(4) * i for i in range(16)], batch_size=4)
loss_of = lambda out: out.pow(2).mean()
"""
TRAINED = "print(run.step, net[0].weight.flatten().tolist(), opt.state_dict()['state'][0]['step'].item())\n"


def block(which: str) -> str:
    """Return the page's program or commands that contain `which`."""
    (found,) = [block for block in FENCE.findall(PAGE) if which in block]
    return str(found)


def shell(commands: str, folder: Path) -> None:
    """Run commands of the page in `folder`, up to the first that fails."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-ec", commands],
        check=False,
        capture_output=True,
        text=True,
        timeout=150,
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def their_model() -> Any:
    """Return a model that another program has trained by one step, and its optimizer."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    opt = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.ones(4)).sum().backward()
    opt.step()
    return net, opt


def rows(weight: Any) -> list[float]:
    return list(map(float, weight.detach().flatten()))


def test_a_training_comes_from_a_torch_file_and_leaves_into_one(tmp_path: Path) -> None:
    net, opt = their_model()
    torch.save({"model": net.state_dict(), "optim": opt.state_dict(), "epoch": 3}, tmp_path / "last.pt")
    program = OBJECTS + block("torch.load(") + TRAINED
    printed = run(program, tmp_path)
    assert printed.startswith("8 ["), "epochs 3 and 4, of 4 steps each"
    assert printed.endswith("] 9.0\n"), "Adam counts on"
    assert run(program, tmp_path) == printed, "a restart takes the checkpoint, not the file"

    shell(block("export latest weights.pt"), tmp_path)
    state, weights = torch.load(tmp_path / "leave.pt"), torch.load(tmp_path / "weights.pt")
    assert state.keys() == {"model", "optim", "strata"}
    assert weights.keys() == net.state_dict().keys()
    assert str(rows(weights["0.weight"])) in printed
    assert torch.equal(state["model"]["0.weight"], weights["0.weight"])

    shell(block("checkpoints import"), tmp_path)
    shown = "print(net[0].weight.flatten().tolist(), opt.state_dict()['state'][0]['step'].item())\n"
    assert run(OBJECTS + block('CheckpointManager("imported")') + shown, tmp_path) == (
        f"{rows(net[0].weight)} 1.0\n"
    )
    refused = OBJECTS + "strata.init(model=net, optim=opt, storage_path='imported')\n"
    with pytest.raises(AssertionError, match="strata is not in the checkpoint"):
        run(refused, tmp_path)


def test_a_training_comes_from_a_dcp_folder_and_leaves_into_one(tmp_path: Path) -> None:
    dcp: Any = import_module("torch.distributed.checkpoint")  # takes a second
    net, opt = their_model()
    model, optim = import_module("torch.distributed.checkpoint.state_dict").get_state_dict(net, opt)
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "dcp")
    trains = "run.step_done(); run.close()\n"
    printed = run(OBJECTS + block("dcp.load(") + trains + TRAINED, tmp_path)
    assert printed == f"1 {rows(net[0].weight)} 1.0\n"

    shell(block("torch_to_dcp"), tmp_path)
    for weight in model.values():
        weight.zero_()
    dcp.load({"model": model}, checkpoint_id=tmp_path / "dcp-out")
    assert printed == f"1 {rows(net[0].weight)} 1.0\n"


def test_a_training_comes_from_a_folder_of_safetensors_shards_and_leaves_as_one_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file  # noqa: PLC0415  # imports torch

    net, _ = their_model()
    weights, hf = net.state_dict(), tmp_path / "hf"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps({"model_type": "two-layers"}))
    for number, layer in enumerate("01", start=1):
        shard = {name: weight for name, weight in weights.items() if name.startswith(layer)}
        save_file(shard, hf / f"model-0000{number}-of-00002.safetensors")
    trains = "net[0].weight.data.add_(1)\nrun.step_done(4)\nrun.close()\n"
    printed = run(OBJECTS + block('Path("hf")') + trains + "print(net[0].weight.tolist())", tmp_path)
    shell(block("cp hf/config.json"), tmp_path)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "two-layers"}
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    assert torch.equal(exported["0.weight"], weights["0.weight"] + 1)
    assert printed == f"{exported['0.weight'].tolist()}\n"

    save_file({f"_orig_mod.{name}": one for name, one in exported.items()}, tmp_path / "compiled.safetensors")
    run(block("removeprefix("), tmp_path)
    again = load_file(tmp_path / "out" / "model.safetensors")
    assert again.keys() == weights.keys()
    assert all(torch.equal(again[name], one) for name, one in exported.items())
