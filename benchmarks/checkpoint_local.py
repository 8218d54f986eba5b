"""Time of a durable, hashed save on the local disk, compared with the disk itself, torch.save and DCP.

    python -m benchmarks.checkpoint_local [--json FILE] [--megabytes 768] [--rounds 7]

All save the same tensors, in an order that rotates with each round, and each removes its files immediately. R_w is a
raw loop of direct I/O with a sync, in the same run. Our save ends when the checkpoint is committed: hashed, synced,
named, marked. torch.save and DCP's FileSystemWriter sync too, and hash nothing. The time that the trainer is blocked
is compared with a copy of the same tensors by one thread into used memory, and with DCP's async_save. Memory is
measured in separate processes: the peak while two saves are in flight, minus the memory after a save of a single
number.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks._disk import BLOCK_BYTES, Pages, cpu_s, raw_write, spread, timed
from strata.client.checkpoints.manager import CheckpointManager

# torch exports its documented names, but not in a form that a type checker sees
dist: Any = importlib.import_module("torch.distributed")
dcp: Any = importlib.import_module("torch.distributed.checkpoint")

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 64
GOAL = (
    "save ≥ 0.90 R_w, ≥ 2.5 x torch.save+fsync, ≥ 3 x DCP; blocked ≤ 1.15 x memcpy and ≤ 1/4 of async_save;"
    " CPU ≤ 0.20 s/GB; extra memory ≤ 2 x the state, ≤ 1.1 x in low-memory mode"
)


@dataclass(slots=True)
class Times:
    """Seconds of each round, by the name of the measurement."""

    of: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, value: float) -> None:
        self.of.setdefault(name, []).append(value)

    def ratio(self, one: str, other: str) -> tuple[float, list[float]]:
        return spread([a / b for a, b in zip(self.of[one], self.of[other], strict=True)])

    def median(self, name: str) -> float:
        return statistics.median(self.of[name])


def state_of(megabytes: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    count = (megabytes << 20) // 4 // TENSORS
    return {f"layer{i}.weight": torch.randn(count) for i in range(TENSORS)}


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Rig:
    """The savers. Each saves once and removes its files."""

    def __init__(self, folder: Path, megabytes: int) -> None:
        self.folder = folder
        self.state = state_of(megabytes)
        self.pages = Pages((megabytes << 20) // BLOCK_BYTES * BLOCK_BYTES)
        self.manager = CheckpointManager(folder / "ours", keep_count=1, capture_rng=False)
        self.times = Times()
        self.step = 0

    def raw(self) -> None:
        path = self.folder / "raw"
        self.times.add("raw", raw_write(path, self.pages))
        path.unlink()

    def ours(self) -> None:
        self.step += 1
        cpu, began = cpu_s(), time.perf_counter()
        info = self.manager.save_state(self.state, self.step)
        self.times.add("blocked", time.perf_counter() - began)
        info.wait()
        self.times.add("ours", time.perf_counter() - began)
        self.times.add("cpu", cpu_s() - cpu)
        self.manager.wait_until_finished()

    def memcpy(self) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.pages.map))

        def copy() -> None:
            at = address
            for tensor in self.state.values():
                ctypes.memmove(at, tensor.data_ptr(), tensor.nbytes)
                at += tensor.nbytes

        self.times.add("memcpy", timed(copy))

    def torch_save(self) -> None:
        path = self.folder / "torch.pt"

        def save() -> None:
            torch.save(self.state, path)
            sync(path)
            sync(self.folder)

        self.times.add("torch", timed(save))
        path.unlink()

    def dcp_save(self) -> None:
        path = self.folder / "dcp"
        writer = dcp.FileSystemWriter(path, sync_files=True)
        self.times.add("dcp", timed(lambda: dcp.save(dict(self.state), storage_writer=writer)))
        shutil.rmtree(path)

    def dcp_async(self) -> None:
        path = self.folder / "dcp-async"
        writer = dcp.FileSystemWriter(path, sync_files=True)
        began = time.perf_counter()
        future: Any = dcp.async_save(dict(self.state), storage_writer=writer)
        self.times.add("async", time.perf_counter() - began)
        future.result()
        shutil.rmtree(path)

    def run(self, rounds: int) -> None:
        """Measure in turn; the first round only warms up."""
        turns: list[Callable[[], None]] = [
            self.raw,
            self.ours,
            self.memcpy,
            self.torch_save,
            self.dcp_save,
            self.dcp_async,
        ]
        for number in range(rounds + 1):
            for turn in turns[number % len(turns) :] + turns[: number % len(turns)]:
                os.sync()
                turn()
            if number == 0:
                self.times.of.clear()
            print(f"round {number} of {rounds}", flush=True)
        self.manager.close()


MEMORY_PROGRAM = """
import sys, torch
from pathlib import Path
from strata.client.checkpoints.manager import CheckpointManager
def kib(field):
    return int(Path("/proc/self/status").read_text().split(field + ":")[1].split()[0])
state = {f"w{i}": torch.ones(int(sys.argv[2]) << 18) for i in range(8)}
with CheckpointManager(sys.argv[1], keep_count=1, low_memory=sys.argv[3] == "low") as manager:
    manager.save_state({"w": torch.ones(1)}, 1).wait()
    before = kib("VmRSS")
    for step in range(2, 5):
        manager.save_state(state, step)
    manager.wait_until_finished()
    size = sum(tensor.nbytes for tensor in state.values()) / 1024
    print((kib("VmHWM") - before) / size)
"""


def memory_ratio(folder: Path, mode: str) -> float:
    """Return the peak of the extra memory of saves, as a multiple of the state."""
    done = subprocess.run(
        [sys.executable, "-c", MEMORY_PROGRAM, str(folder / f"memory-{mode}"), "32", mode],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    return round(float(done.stdout), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=base) as name:
        folder = Path(name)
        rig = Rig(folder, args.megabytes)
        rig.run(max(5, args.rounds))
        memory = {mode: memory_ratio(folder, mode) for mode in ("usual", "low")}
    dist.destroy_process_group()
    times, gigabytes = rig.times, args.megabytes / 1024
    ratios = {
        "of_raw": times.ratio("raw", "ours"),
        "of_torch_save": times.ratio("torch", "ours"),
        "of_dcp": times.ratio("dcp", "ours"),
        "blocked_of_memcpy": times.ratio("blocked", "memcpy"),
        "blocked_of_async_save": times.ratio("blocked", "async"),
    }
    cpu = round(times.median("cpu") / gigabytes, 3)
    met = (
        ratios["of_raw"][0] >= 0.90
        and ratios["of_torch_save"][0] >= 2.5
        and ratios["of_dcp"][0] >= 3.0
        and ratios["blocked_of_memcpy"][0] <= 1.15
        and ratios["blocked_of_async_save"][0] <= 0.25
        and cpu <= 0.20
        and memory["usual"] <= 2.0
        and memory["low"] <= 1.1
    )
    result = {
        "benchmark": "checkpoint_local",
        "megabytes": args.megabytes,
        "rounds": args.rounds,
        **{key: value[0] for key, value in ratios.items()},
        **{f"{key}_spread": value[1] for key, value in ratios.items()},
        "cpu_s_per_gb": cpu,
        "blocked_s_per_gb": round(times.median("blocked") / gigabytes, 3),
        "save_mb_per_s": round(args.megabytes / times.median("ours")),
        "raw_mb_per_s": round(args.megabytes / times.median("raw")),
        "extra_memory_of_state": memory,
        "goal": GOAL,
        "met": met,
        "torch": torch.__version__,
    }
    print(
        f"{args.megabytes} MB: durable hashed save {ratios['of_raw'][0]} R_w"
        f" ({result['save_mb_per_s']} of {result['raw_mb_per_s']} MB/s, spread {ratios['of_raw'][1]}),"
        f" {ratios['of_torch_save'][0]} x torch.save+fsync, {ratios['of_dcp'][0]} x DCP;"
        f" blocked {ratios['blocked_of_memcpy'][0]} x memcpy ({result['blocked_s_per_gb']} s/GB),"
        f" {ratios['blocked_of_async_save'][0]} of async_save; CPU {cpu} s/GB;"
        f" extra memory {memory['usual']} x, low-memory {memory['low']} x the state"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
