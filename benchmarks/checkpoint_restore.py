"""Time of a verified restore from the local disk, compared with the disk itself, torch.load and DCP, all cold.

    python -m benchmarks.checkpoint_restore [--json FILE] [--megabytes 512] [--rounds 7]

One checkpoint is read repeatedly, and every byte is verified. *Views*: the tensors stay in the memory into which the
checkpoint was read, which is the buffer of saves. *Copied*: the data is copied into the tensors of the state. *Fresh
process*: as *copied* in a new process, from the call of restore on. Our reads bypass the page cache, so they are
always cold. torch.load and DCP read files that were dropped from the page cache, and verify nothing. R_r is a raw
loop of direct I/O over our image in the same run, into warm memory. Two bounds are measured too: R_r's loop followed
by one thread's copy (bound of *copied*), and R_r's loop into memory that a new process with a state has just
allocated (bound of *fresh process*).
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks._disk import BLOCK_BYTES, Pages, cpu_s, forget, raw_read, timed
from benchmarks.checkpoint_local import Times, state_of, sync
from strata.checkpoint.restore.reader import load
from strata.client.checkpoints.manager import CheckpointManager

# torch exports its documented names, but not in a form that a type checker sees
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

ROOT = Path(__file__).resolve().parent.parent
GOAL = (
    "views / copied / fresh process ≥ 0.95 / 0.80 / 0.70 R_r; ≥ 2.5 x cold torch.load, ≥ 1.7 x cold DCP;"
    " CPU ≤ 0.20 s/GB"
)

FRESH_PROGRAM = """
import sys, time, torch
from benchmarks.checkpoint_local import state_of
from strata.client.checkpoints.manager import CheckpointManager
into = state_of(int(sys.argv[2]))
with CheckpointManager(sys.argv[1], capture_rng=False) as manager:
    began = time.perf_counter()
    manager.restore(into)
    print(time.perf_counter() - began)
"""

RAW_FRESH_PROGRAM = """
import sys
from pathlib import Path
from benchmarks._disk import BLOCK_BYTES, Pages, raw_read
from benchmarks.checkpoint_local import state_of
state = state_of(int(sys.argv[2]))  # as there: a virtual machine may have to ask its host for more memory
print(raw_read(Path(sys.argv[1]), Pages((int(sys.argv[2]) << 20) // BLOCK_BYTES * BLOCK_BYTES, warm=False)))
"""


class Rig:
    """The readers. Each reads everything once."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self.megabytes = megabytes
        self.times = Times()
        self.pages = Pages((megabytes << 20) // BLOCK_BYTES * BLOCK_BYTES)
        state = state_of(megabytes)
        self.into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        self.manager = CheckpointManager(folder / "ours", capture_rng=False)
        self.manager.save_state(state, 1).wait()
        (self.image,) = folder.glob("ours/step-*/*.safetensors")
        self.checkpoint = self.manager.all_checkpoints()[0]
        self.torch_file = folder / "torch.pt"
        torch.save(state, self.torch_file)
        sync(self.torch_file)
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder / "dcp", sync_files=True))

    def raw(self) -> None:
        self.times.add("raw", raw_read(self.image, self.pages))

    def views(self) -> None:
        manager, folder = self.manager, self.image.parent.name
        digest, lend = self.checkpoint.manifest_digest, manager._writer.lend  # as restore() does
        cpu = cpu_s()
        self.times.add(
            "views",
            timed(
                lambda: load(manager._storage, folder, manifest_digest=digest, rank=0, threads=4, lend=lend)
            ),
        )
        self.times.add("cpu", cpu_s() - cpu)

    def copied(self) -> None:
        self.times.add("copied", timed(lambda: self.manager.restore(self.into)))

    def copy(self) -> None:
        tensors = list(self.into.values())
        others = [tensor.clone() for tensor in tensors]

        def copy() -> None:
            for tensor, other in zip(tensors, others, strict=True):
                ctypes.memmove(tensor.data_ptr(), other.data_ptr(), tensor.nbytes)

        self.times.add("copy", timed(copy))

    def fresh(self) -> None:
        self.times.add("fresh", self._in_a_process(FRESH_PROGRAM, self.folder / "ours"))

    def raw_fresh(self) -> None:
        self.times.add("raw fresh", self._in_a_process(RAW_FRESH_PROGRAM, self.image))

    def _in_a_process(self, program: str, path: Path) -> float:
        """Return the seconds that a program in a new process prints."""
        command = [sys.executable, "-c", program, str(path), str(self.megabytes)]
        return float(subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout)

    def torch_load(self) -> None:
        forget(self.torch_file)

        def read() -> None:
            for name, tensor in torch.load(self.torch_file, weights_only=True).items():
                self.into[name].copy_(tensor)

        self.times.add("torch", timed(read))

    def dcp_load(self) -> None:
        forget(self.folder / "dcp")
        reader = dcp.FileSystemReader(self.folder / "dcp")
        self.times.add("dcp", timed(lambda: dcp.load(self.into, storage_reader=reader)))

    def run(self, rounds: int) -> None:
        """Measure in turn; the first round only warms up."""
        turns: list[Callable[[], None]] = [
            self.raw,
            self.views,
            self.copied,
            self.copy,
            self.fresh,
            self.raw_fresh,
            self.torch_load,
            self.dcp_load,
        ]
        for number in range(rounds + 1):
            for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
                os.sync()
                turn()
            if number == 0:
                self.times.of.clear()
            print(f"round {number} of {rounds}", flush=True)
        self.manager.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=base) as name:
        rig = Rig(Path(name), args.megabytes)
        rig.run(max(5, args.rounds))
    dist.destroy_process_group()
    times = rig.times
    ratios = {
        "views_of_raw": times.ratio("raw", "views"),
        "copied_of_raw": times.ratio("raw", "copied"),
        "fresh_of_raw": times.ratio("raw", "fresh"),
        "copied_of_torch_load": times.ratio("torch", "copied"),
        "copied_of_dcp": times.ratio("dcp", "copied"),
    }
    bounds = {
        "copied_bound_of_raw": round(times.median("raw") / (times.median("raw") + times.median("copy")), 3),
        "fresh_bound_of_raw": times.ratio("raw", "raw fresh")[0],
    }
    cpu = round(times.median("cpu") * 1024 / args.megabytes, 3)
    goals = [0.95, 0.80, 0.70, 2.5, 1.7]
    met = cpu <= 0.20 and all(value[0] >= goal for value, goal in zip(ratios.values(), goals, strict=True))
    result = {
        "benchmark": "checkpoint_restore",
        "megabytes": args.megabytes,
        "rounds": args.rounds,
        **{key: value[0] for key, value in ratios.items()},
        **{f"{key}_spread": value[1] for key, value in ratios.items()},
        **bounds,
        "cpu_s_per_gb": cpu,
        "copied_mb_per_s": round(args.megabytes / times.median("copied")),
        "raw_mb_per_s": round(args.megabytes / times.median("raw")),
        "goal": GOAL,
        "met": met,
        "torch": torch.__version__,
    }
    print(
        f"{args.megabytes} MB: verified restore {ratios['views_of_raw'][0]} (views),"
        f" {ratios['copied_of_raw'][0]} (copied), {ratios['fresh_of_raw'][0]} (fresh process) of R_r"
        f" ({result['raw_mb_per_s']} MB/s); copied {ratios['copied_of_torch_load'][0]} x torch.load,"
        f" {ratios['copied_of_dcp'][0]} x DCP, all cold; CPU {cpu} s/GB; reading and then copying without a proof"
        f" would be {bounds['copied_bound_of_raw']} R_r, reading into a fresh process's memory"
        f" {bounds['fresh_bound_of_raw']} R_r"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
