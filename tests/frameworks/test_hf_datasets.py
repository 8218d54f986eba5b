"""A real `datasets.Dataset` under `run.steps`: a killed training continues with exactly the samples that remain."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster_fixtures import ROOT

datasets = pytest.importorskip("datasets")
pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

SAVED, KILLED = 4, 6  # two epochs of 30 samples, in steps of 4: the last step of an epoch has 2
PROGRAM = """
import datasets, json, os, signal, strata, sys, torch

workers, fingerprint, killed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dataset = datasets.Dataset.from_dict({"number": list(range(30))}).with_format("torch")
if fingerprint:
    dataset.fingerprint = fingerprint
net = torch.nn.Linear(1, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
loader = torch.utils.data.DataLoader(dataset, batch_size=4, shuffle=True, num_workers=workers)
run = strata.init(model=net, optim=opt, data=loader, storage_path="checkpoints", save_every_steps=4)
for epoch in range(2):
    for batch in run.steps():
        net(batch["number"][:, None].float()).mean().backward()
        opt.step()
        opt.zero_grad()
        print(json.dumps([run.step + 1, epoch, batch["number"].tolist()]), flush=True)
        if run.step + 1 == killed:
            run.checkpoints.wait_until_finished()
            os.kill(os.getpid(), signal.SIGKILL)
run.close()
"""
Step = tuple[int, int, tuple[int, ...]]


def train(
    folder: Path, *, workers: int = 0, fingerprint: str = "", killed: int = 0, code: int = 0
) -> tuple[list[Step], str]:
    """Train in a process of its own, which is killed in step `killed`; return the steps and the error output."""
    folder.mkdir(exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(workers), fingerprint, str(killed)],
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
        cwd=folder,
        env={**env, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == code, done.stderr
    steps = [json.loads(line) for line in done.stdout.splitlines()]
    return [(step, epoch, tuple(samples)) for step, epoch, samples in steps], done.stderr


@pytest.mark.parametrize("workers", [0, 2])
def test_a_killed_training_continues_with_the_remaining_samples(tmp_path: Path, workers: int) -> None:
    undisturbed, _ = train(tmp_path / "undisturbed")
    for epoch in range(2):
        samples = [sample for _, of, each in undisturbed if of == epoch for sample in each]
        assert sorted(samples) == list(range(30)), "each sample once an epoch"
    before, _ = train(tmp_path / "killed", workers=workers, killed=KILLED, code=-signal.SIGKILL)
    after, _ = train(tmp_path / "killed", workers=workers)
    assert before == undisturbed[:KILLED]
    assert after == undisturbed[SAVED:], "from the checkpoint on, in the middle of the epoch"


def test_a_fingerprint_that_the_program_sets_is_compared(tmp_path: Path) -> None:
    dataset = datasets.Dataset.from_dict({"number": [1]})
    assert not hasattr(dataset, "fingerprint"), "datasets has only a private one, which Strata does not read"
    dataset.fingerprint = "v1"
    derived = (
        dataset.select([0]),
        dataset.shuffle(seed=1),
        dataset.map(lambda row: {"twice": 2 * row["number"]}),
    )
    assert not any(hasattr(each, "fingerprint") for each in derived)
    train(tmp_path, fingerprint="v1", killed=KILLED, code=-signal.SIGKILL)
    _, error = train(tmp_path, fingerprint="v2", code=1)
    assert "DatasetMismatch" in error
    assert "its fingerprint is v2, and was v1" in error
    assert train(tmp_path, fingerprint="v1")[0][0][0] == SAVED + 1
