"""Time of a save and a load through torch's DCP: our storage compared with DCP's own and with the disk.

    python -m benchmarks.checkpoint_dcp [--json FILE] [--megabytes 512] [--rounds 5] [--tensors 6000]

Both save and load the same tensors with the same planner calls (`dcp.save`, `dcp.load`), in an order that rotates
with each round. R_w and R_r are raw loops of direct I/O (write, read) in the same run. Our save is committed when the
call returns: hashed, synced, named, marked. DCP's FileSystemWriter syncs, and hashes nothing. Loads fill existing
tensors. DCP's files come from the page cache, which our reads bypass.

The second part has many small tensors and compares only with DCP's own storage: wall time and CPU, after the first
save. Our save counts until the search for old checkpoints has ended, and it keeps every checkpoint. Both sync their
files; our save also syncs each file's name.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._disk import BLOCK_BYTES, Pages, cpu_s, raw_read, raw_write, spread
from strata.integrations.dcp import JsonLoadPlanner, JsonSavePlanner, StrataReader, StrataWriter

# torch exports its documented names, but not in a form that a type checker sees
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 64
SMALL_ELEMENTS = 8
GOAL = (
    "save through DCP ≥ 0.70 R_w; CPU ≤ 0.20 s/GB;"
    " 6,000 small tensors ≤ 1.0 of FileSystemWriter's wall time and CPU"
)


class Rig:
    """Timed saves and loads of `tensors` with `count` elements each; its files are removed after they are read."""

    def __init__(self, folder: Path, tensors: int, count: int, *, keep_count: int) -> None:
        torch.manual_seed(0)
        self.folder = folder
        self.state = {f"layer{i}.weight": torch.randn(count) for i in range(tensors)}
        self.into = {name: torch.zeros_like(value) for name, value in self.state.items()}
        self.pages = Pages(max(1, tensors * count * 4 // BLOCK_BYTES) * BLOCK_BYTES)
        self.writer = StrataWriter(folder / "ours", keep_count=keep_count)
        self.waits = (
            keep_count == 0
        )  # no checkpoint is removed; DCP's files are removed outside the timing too
        self.seconds: dict[str, list[float]] = {}
        self.step = 0

    def timed(self, name: str, act: Callable[[], object]) -> None:
        cpu, began = cpu_s(), time.perf_counter()
        act()
        self.seconds.setdefault(name, []).append(time.perf_counter() - began)
        self.seconds.setdefault(f"{name} cpu", []).append(cpu_s() - cpu)

    def raw(self) -> None:
        path = self.folder / "raw"
        self.timed("raw write", lambda: raw_write(path, self.pages))
        self.timed("raw read", lambda: raw_read(path, self.pages))
        path.unlink()

    def ours(self) -> None:
        self.step += 1
        self.timed("our save", self._save)
        reader = StrataReader(self.folder / "ours")
        self.timed(
            "our load", lambda: dcp.load(dict(self.into), storage_reader=reader, planner=JsonLoadPlanner())
        )
        assert torch.equal(self.into["layer0.weight"], self.state["layer0.weight"])

    def _save(self) -> None:
        dcp.save(
            dict(self.state),
            checkpoint_id=str(self.step),
            storage_writer=self.writer,
            planner=JsonSavePlanner(),
        )
        if self.waits:
            self.writer._wait_collected()

    def theirs(self) -> None:
        path = self.folder / "dcp"
        writer = dcp.FileSystemWriter(path, sync_files=True)
        self.timed("dcp save", lambda: dcp.save(dict(self.state), storage_writer=writer))
        reader = dcp.FileSystemReader(path)
        self.timed("dcp load", lambda: dcp.load(dict(self.into), storage_reader=reader))
        shutil.rmtree(path)

    def run(self, rounds: int, *, raw: bool = True) -> None:
        """Measure in turn; the first round only warms up."""
        turns = [self.raw, self.ours, self.theirs] if raw else [self.ours, self.theirs]
        for number in range(rounds + 1):
            for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
                os.sync()
                turn()
            if number == 0:
                self.seconds.clear()
            print(f"round {number} of {rounds}", flush=True)
        self.writer.close()

    def ratio(self, one: str, other: str) -> tuple[float, list[float]]:
        pairs = zip(self.seconds[one], self.seconds[other], strict=True)
        return spread([a / b for a, b in pairs])


def small(folder: Path, tensors: int, rounds: int) -> dict[str, float]:
    """Return the cost of saves and loads of many small tensors, as a share of DCP's own."""
    folder.mkdir()
    rig = Rig(folder, tensors, SMALL_ELEMENTS, keep_count=0)
    rig.run(rounds, raw=False)
    return {
        f"{what}{kind}": rig.ratio(f"our {what}{kind}", f"dcp {what}{kind}")[0]
        for what in ("save", "load")
        for kind in ("", " cpu")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=6000)
    args = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=base) as name:
        rig = Rig(Path(name), TENSORS, (args.megabytes << 20) // 4 // TENSORS, keep_count=1)
        rig.run(max(5, args.rounds))
        many = small(Path(name) / "many", args.tensors, max(9, args.rounds))
        few = small(Path(name) / "few", 10, 20)
    dist.destroy_process_group()
    save, load = rig.ratio("raw write", "our save"), rig.ratio("raw read", "our load")
    of_dcp, load_of_dcp = rig.ratio("dcp save", "our save"), rig.ratio("dcp load", "our load")
    cpu = round(
        sorted(rig.seconds["our save cpu"])[len(rig.seconds["our save cpu"]) // 2] * 1024 / args.megabytes, 3
    )
    result = {
        "benchmark": "checkpoint_dcp",
        "megabytes": args.megabytes,
        "rounds": args.rounds,
        "save_of_raw": save[0],
        "save_of_raw_spread": save[1],
        "save_of_dcp": of_dcp[0],
        "save_of_dcp_spread": of_dcp[1],
        "load_of_raw": load[0],
        "load_of_raw_spread": load[1],
        "load_of_dcp_cached": load_of_dcp[0],
        "cpu_s_per_gb": cpu,
        "small_tensors": args.tensors,
        "small_of_dcp": many,
        "ten_of_dcp": few,
        "goal": GOAL,
        "met": save[0] >= 0.70 and cpu <= 0.20 and many["save"] <= 1.0 and many["save cpu"] <= 1.0,
        "torch": torch.__version__,
    }
    print(
        f"{args.megabytes} MB through DCP: save {save[0]} R_w (spread {save[1]}), {of_dcp[0]} x FileSystemWriter;"
        f" load into tensors {load[0]} R_r, {load_of_dcp[0]} x FileSystemReader from the page cache; CPU {cpu} s/GB;"
        f" {args.tensors} small tensors: save {many['save']} of FileSystemWriter's time, {many['save cpu']} of its CPU,"
        f" load {many['load']} and {many['load cpu']}; 10: save {few['save']} and {few['save cpu']},"
        f" load {few['load']} and {few['load cpu']}"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
