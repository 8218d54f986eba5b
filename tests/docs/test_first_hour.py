"""The README's first hour, in a fresh virtual environment with the wheel: a new user's commands and their output."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.client import CoordinatorClient
from strata.devcluster.etcd_binary import find_etcd
from strata.devcluster.ports import free_ports
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, GetJobRequest
from tests.processes import Record, Talker

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS: list[str] = [
    line
    for block in re.findall(
        r"^```sh\n(.*?)^```", README[README.index("## Use it") :], re.MULTILINE | re.DOTALL
    )
    for line in block.splitlines()
]
INSTALL_S = 600.0
"""Allows for a slow network and a slow disk."""
STEPS = 20 * 22
"""Epochs times the steps of each: 3 ranks, 16 samples a rank of 1024."""

TRAIN = '''
"""An ordinary DistributedDataParallel script: which of two moons a point belongs to."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 20


def moons(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    angle = torch.rand(samples, generator=generator) * torch.pi
    label = torch.arange(samples) % 2
    x = torch.where(label == 0, angle.cos(), 1 - angle.cos())
    y = torch.where(label == 0, angle.sin(), 0.5 - angle.sin())
    return TensorDataset(torch.stack((x, y), dim=1), label)


def main() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    loader = DataLoader(moons(1024), batch_size=16, shuffle=True)
    dist.init_process_group()
    model = DistributedDataParallel(net)
    for _ in range(EPOCHS):
        for inputs, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
    print(f"trained, loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


main()
'''
CHANGE = (
    ("import torch\n", "import strata\nimport torch\n"),
    ("    dist.init_process_group()\n", "    run = strata.init(model=net, optim=optimizer)\n"),
    ("in loader:", "in run.steps(loader):"),
    ("    dist.destroy_process_group()\n", "    run.close()\n"),
)
"""The changes that the README makes to that script."""
TALKS = (
    ("optim=optimizer)\n", "optim=optimizer)\n    print('begins at', run.step, flush=True)\n"),
    ("optimizer.step()\n", "optimizer.step()\n            time.sleep(0.01)\n            say(run)\n"),
    ("import torch\n", "import time\nimport torch\n"),
    ("EPOCHS = 20\n", "EPOCHS = 20\n\n\ndef say(run):\n    print('step', run.step + 1, flush=True)\n"),
)
"""Changes for the test alone: a slower pace, so that processes can be killed, and output to wait for."""


def train_script() -> str:
    script = TRAIN.lstrip()
    for before, after in (*CHANGE, *TALKS):
        assert before in script
        script = script.replace(before, after, 1)
    return script


class User:
    """The user who types the README's commands, in a folder and an environment of her own."""

    def __init__(self, folder: Path, record: Record) -> None:
        self.folder = folder
        self.record = record
        self.talkers: list[Talker] = []
        self.env = {
            name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "STRATA_"))
        }
        self.env["PATH"] = os.pathsep.join((str(folder / "venv" / "bin"), self.env["PATH"]))
        self.env["VIRTUAL_ENV"] = str(folder / "venv")

    def types(self, line: str, *, name: str, **changes: str) -> Talker:
        """Start a command; `changes` are the parts of the command that differ in this test."""
        for before, after in changes.items():
            assert before in line, f"the README's {line!r} has no {before!r}"
            line = line.replace(before, after)
        talker = Talker(
            ["bash", "-c", f"exec {line}"], name=name, record=self.record, env=self.env, cwd=self.folder
        )
        self.talkers.append(talker)
        return talker

    def does(self, argv: list[str]) -> None:
        """Run a command to its end, allowing it much time."""
        it = subprocess.run(
            argv,
            check=False,
            timeout=INSTALL_S,
            env=self.env,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
        )
        assert it.returncode == 0, f"{argv}: {it.stdout.decode()}{it.stderr.decode()}"

    def end(self) -> None:
        for talker in reversed(self.talkers):
            talker.child.kill()
            talker.join()


@pytest.fixture
def user(tmp_path: Path, record: Record) -> Iterator[User]:
    it = User(tmp_path, record)
    yield it
    it.end()


def install(user: User, line: str) -> None:
    """Run the README's `pip install` with the wheel built from this tree, in a new environment."""
    wheels = user.folder / "wheels"
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--wheel-dir",
        str(wheels),
        str(ROOT),
    ]
    user.does(build)
    (wheel,) = wheels.glob("strata_control-*.whl")
    user.does([sys.executable, "-m", "venv", str(user.folder / "venv")])
    assert "'.[server]' torch" in line
    # the CPU-only build, as in the project's own environment; torch itself recommends numpy
    line = line.replace("'.[server]' torch", f"--quiet '{wheel}[server]' torch==2.13.0 numpy")
    user.does(["bash", "-c", line])


def command(part: str) -> str:
    """Return the README's command that contains `part`."""
    (line,) = (line for line in COMMANDS if part in line)
    return line


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_first_hour_page_works_as_written(user: User, record: Record) -> None:
    install(user, command("pip install"))
    user.env["STRATA_ETCD"] = str(find_etcd(members=3).path)  # the etcd that scripts/fetch-etcd installed
    ports = free_ports(4)
    dev = command("strata dev") + f" --port {ports[0]} --http-port {ports[3]}"
    control_plane = user.types(dev, name="dev")
    record.wait_line("status page: http://")
    line = next(e["text"] for e in record.of("line") if e["text"].startswith("endpoints: "))
    endpoints = line.removeprefix("endpoints: ")
    user.env["STRATA_ENDPOINTS"] = endpoints

    script = user.folder / "train.py"
    script.write_text(train_script())
    run = command("strata run")
    user.env["STRATA_LOG_FORMAT"] = "json"  # so that this test can parse the output

    # a rank is killed: the training continues
    first = user.types(run, name="first")
    record.wait_line("step 100")
    victim = record.wait("rank.started", generation=1, count=3)[2]
    os.kill(victim["pid"], signal.SIGKILL)
    record.wait("rank.started", generation=2, count=3)
    record.wait_line("step 200")

    # every process of this node is killed: the same command continues from a checkpoint
    first.signal(signal.SIGKILL)
    first.wait_quiet()
    seen = len(record.events)
    second = user.types(run, name="second")
    assert second.join(limit_s=120.0) == 0, printed(record, seen)
    begun = [int(e["text"].split()[-1]) for e in record.events[seen:] if begins(e)]
    assert len(begun) == 3
    assert min(begun) > 0, "from a checkpoint"
    with CoordinatorClient.connect(endpoints, job="digits") as client:
        job = client.call(GetJobRequest(job="digits"))
        assert job.job.phase == JOB_PHASE_DONE

    # the same command again: it reports that the job is finished, and names the options
    seen = len(record.events)
    assert user.types(run, name="again").join() == 4
    assert re.search(
        rf"job digits finished at \d\d:\d\d .* after {STEPS} steps$", printed(record, seen), re.MULTILINE
    )
    assert "start again with --new, or choose another --job" in printed(record, seen)

    # a typo, and its correction
    other = {"--job digits": "--job moons"}
    script.write_text(train_script().replace("nn.Linear(2, 32)", "nn.Linaer(2, 32)"))
    seen = len(record.events)
    assert user.types(run, name="typo", **other).join() == 78
    assert "module 'torch.nn' has no attribute 'Linaer'" in printed(record, seen)
    assert len([e for e in record.events[seen:] if e.get("event") == "rank.started"]) <= 6, "one retry"
    script.write_text(train_script())
    seen = len(record.events)
    assert user.types(run, name="repaired", **other).join(limit_s=120.0) == 0, printed(record, seen)

    # the user ends the control plane
    control_plane.signal(signal.SIGINT)
    assert control_plane.join() == 0


def begins(event: dict[str, object]) -> bool:
    return event["event"] == "line" and "] begins at " in str(event["text"])


def printed(record: Record, since: int) -> str:
    """Return the output since event number `since`."""
    return "\n".join(str(e.get("text", e)) for e in record.events[since:])
