"""The programs of docs/frameworks/fsdp.md run unchanged, on the ranks of `strata run`."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import ROOT, Nodes, run_strata
from tests.integration.training.test_ddp_bits import STARTED_S, wait_saved
from tests.integration.training.test_virtual_ranks import all_begun, stepped
from tests.processes import Record, Talker

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

PAGE = (ROOT / "docs" / "frameworks" / "fsdp.md").read_text()
BLOCKS: list[str] = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
PRELUDE = """
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

import strata
from examples.fsdp_tp.train import Decoder as make_model, Progressions, digest, parallel, say
from strata.integrations.dcp import JsonLoadPlanner, JsonSavePlanner, StrataReader, StrataWriter

folder, storage = sys.argv[1:]
device, tp, epochs, steps = "cpu", 2, 1, 40
torch.set_num_threads(1)
torch.manual_seed(int(os.environ["WORLD_SIZE"]))
data = Progressions(48)
loader = torch.utils.data.DataLoader([data[number][1] for number in range(len(data))], batch_size=4)

def loss_of(model, tokens):
    return torch.nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

def report(event, **facts):
    facts["generation"] = int(os.environ["STRATA_GENERATION"])
    say(event, rank=dist.get_rank(), digest=digest(model, optimizer), **facts)

begun = False

def train_step(model, optimizer, step):
    global begun
    if not begun:
        report("begun", step=step - 1)
        begun = True
    tokens = next(iter(loader))
    loss_of(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()
    report("step", step=step)
"""


def block(which: str) -> str:
    (found,) = [block for block in BLOCKS if which in block]
    return found


def sharded() -> str:
    """Return the lines that make the mesh, the model and the optimizer."""
    loop = block("run.steps")
    return loop[: loop.index("run = strata.init")]


def begin() -> str:
    (line,) = [line for line in block("run.steps").splitlines() if "strata.init(" in line and "run =" in line]
    return f"{line}\n"


def start(
    cluster: LocalCluster, nodes: Nodes, folder: Path, program: str, *, name: str, slots: int
) -> Talker:
    script = folder / "train.py"
    script.write_text(PRELUDE + program)
    return nodes.run_script(
        cluster.endpoints,
        script,
        *(str(folder / "dcp"), str(folder / f"strata-{nodes.job}")),
        node=name,
        options=("--max-workers", "1", "--slots", str(slots)),
    )


def test_a_training_leaves_for_a_dcp_folder_and_another_begins_from_it(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    leaving = f"{block('run.steps')}\n{block('dcp.save({')}\nreport('left', step=run.step)\n"
    node = start(cluster, nodes, tmp_path, leaving, name="leaving", slots=4)
    assert node.join(STARTED_S) == 0
    left = record.of("left")
    assert [e["step"] for e in left] == [3] * 4, "48 samples, 16 a step"
    weights = tmp_path / "model.safetensors"
    code, printed = run_strata(
        *("checkpoints", "export", "latest", str(weights), "--only", "model", "--job", nodes.job),
        *("--endpoints", cluster.endpoints),
    )
    assert code == 0, printed
    assert weights.stat().st_size > 1000

    nodes.job = f"{nodes.job}-next"
    coming = (
        f"{sharded()}\n{block('not in os.environ')}\n{begin()}\nreport('came', step=run.step)\nrun.close()\n"
    )
    node = start(cluster, nodes, tmp_path, coming, name="coming", slots=2)
    assert node.join(STARTED_S) == 0
    came = record.of("came")
    assert [e["step"] for e in came] == [0] * 2
    assert len({e["digest"] for e in (*left, *came)}) == 1


def test_a_loop_that_saves_through_dcp_goes_on_with_2_ranks(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    program = sharded() + block("StrataWriter")
    node = start(cluster, nodes, tmp_path, program, name="four", slots=4)
    record.until("a step after the first save", partial(stepped, step=6), limit_s=STARTED_S)
    wait_saved(cluster, nodes.job, 5)
    node.child.kill()
    node.join()
    node = start(cluster, nodes, tmp_path, program, name="two", slots=2)
    begun = record.until("2 ranks", partial(all_begun, number=2, ranks=2), limit_s=STARTED_S)
    assert node.join(STARTED_S) == 0
    (restored,) = {e["step"] for e in begun}
    assert restored % 5 == 0
    assert 5 <= restored < 40
    saved = record.of("step", source="four", step=restored)
    assert len({e["digest"] for e in (*saved, *begun)}) == 1, "parameters and moments, bit by bit"
    assert [e["step"] for e in record.of("step", source="two", rank=0)] == list(range(restored + 1, 41))
