"""torchrun agents that a test starts, with the entry point that this tree declares."""

from __future__ import annotations

import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from tests.cluster_fixtures import RANKS, ROOT, Nodes
from tests.processes import Talker


def entry_points(folder: Path) -> Path:
    """Return a folder for PYTHONPATH with the entry points of pyproject.toml.

    An environment that was installed before an entry point was added lacks this entry point; a duplicate does no
    harm.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    group = project["entry-points"]["torchrun.handlers"]
    info = folder / "strata_of_this_tree-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: strata-of-this-tree\nVersion: 0\n")
    lines = "".join(f"{name} = {target}\n" for name, target in group.items())
    (info / "entry_points.txt").write_text(f"[torchrun.handlers]\n{lines}")
    return folder


def agent(
    nodes: Nodes,
    endpoints: str,
    folder: Path,
    script: str,
    *arguments: str,
    name: str,
    nnodes: str = "3",
    options: tuple[str, ...] = (),
    env: Mapping[str, str | None] | None = None,
) -> Talker:
    """Start `torchrun` of one of the scripts in tests/ranks as an agent of this test's job."""
    paths = os.pathsep.join((str(ROOT), str(entry_points(folder))))
    given = {"PYTHONPATH": paths, "STRATA_WORKER_ID": name, "STRATA_LOG_FORMAT": "json"}
    return nodes.start(
        sys.executable,
        *("-m", "torch.distributed.run", "--rdzv-backend=strata", f"--rdzv-endpoint={endpoints}"),
        *(f"--rdzv-id={nodes.job}", f"--nnodes={nnodes}", "--nproc-per-node=1", "--max-restarts=10"),
        *options,
        *(str(RANKS / f"{script}.py"), *arguments),
        name=name,
        env=given | dict(env or {}),
    )
