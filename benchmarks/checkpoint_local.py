"""A durable save and a restore on the local disk against torch.save with fsync, and torch.load.

    python -m benchmarks.checkpoint_local [--json FILE] [--megabytes 512] [--rounds 7]

Both sides save the same tensors, and alternate; each removes its file of the round before only
after its new one is durable. A round's ratio is torch's time ÷ ours, so above 1 we are faster.
Ours hashes every byte and is done when the checkpoint is committed; the trainer is blocked only
while the state is copied. Our restore proves every byte before it hands any out, torch.load proves
none; both read from the page cache. This is the simple writer: one thread, buffered writes. Its
figure is a base line for the engine that follows.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from strata.client.checkpoints import CheckpointManager

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 64
GOAL = 2.5
"""Of the later engine, for the save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Seconds of one round."""

    ours_blocked: float
    ours_save: float
    torch_save: float
    ours_restore: float
    torch_load: float


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def measure(folder: Path, megabytes: int, rounds: int) -> list[Round]:
    """Return the rounds after one of warming up; both sides write fresh files in each."""
    torch.manual_seed(0)
    state = {f"layer{i}.weight": torch.randn((megabytes << 20) // 4 // TENSORS) for i in range(TENSORS)}
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    files = [folder / f"torch-{number}.pt" for number in range(rounds + 1)]
    found = []
    with CheckpointManager(folder / "ours", keep_count=1, capture_rng=False) as manager:

        def by_torch(number: int) -> float:
            began = time.perf_counter()
            torch.save(state, files[number])
            sync(files[number])
            sync(folder)
            took = time.perf_counter() - began
            if number:
                files[number - 1].unlink()
            return took

        def load_by_torch(number: int) -> None:
            for name, tensor in torch.load(files[number], weights_only=True).items():
                into[name].copy_(tensor)

        def by_us(step: int) -> tuple[float, float]:
            began = time.perf_counter()
            info = manager.save_state(state, step)
            blocked = time.perf_counter() - began
            info.wait()
            saved = time.perf_counter() - began
            manager.wait_until_finished()
            return blocked, saved

        for number in range(rounds + 1):
            os.sync()
            if number % 2:
                (blocked, saved), torched = by_us(number), by_torch(number)
            else:
                torched, (blocked, saved) = by_torch(number), by_us(number)
            restored = timed(partial(manager.restore, into))
            loaded = timed(partial(load_by_torch, number))
            found.append(
                Round(
                    ours_blocked=blocked,
                    ours_save=saved,
                    torch_save=torched,
                    ours_restore=restored,
                    torch_load=loaded,
                )
            )
    return found[1:]


def spread(values: list[float]) -> tuple[float, list[float]]:
    return round(statistics.median(values), 3), [round(min(values), 3), round(max(values), 3)]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as folder:
        rounds = measure(Path(folder), args.megabytes, max(5, args.rounds))
    save, save_spread = spread([r.torch_save / r.ours_save for r in rounds])
    restore, restore_spread = spread([r.torch_load / r.ours_restore for r in rounds])
    blocked, blocked_spread = spread([r.ours_blocked * 1024 / args.megabytes for r in rounds])
    rate = round(statistics.median(args.megabytes / r.ours_save for r in rounds))
    result = {
        "benchmark": "checkpoint_local",
        "megabytes": args.megabytes,
        "rounds": len(rounds),
        "save_ratio": save,
        "save_ratio_spread": save_spread,
        "restore_ratio": restore,
        "restore_ratio_spread": restore_spread,
        "blocked_s_per_gb": blocked,
        "blocked_s_per_gb_spread": blocked_spread,
        "save_mb_per_s": rate,
        "goal": f"save {GOAL} (the later engine's; this is the simple writer)",
        "met": None,
        "torch": torch.__version__,
    }
    print(
        f"{args.megabytes} MB: durable hashed save {save} x torch.save+fsync"
        f" (spread {save_spread[0]} to {save_spread[1]}), {rate} MB/s;"
        f" trainer blocked {blocked} s/GB; verified restore {restore} x torch.load"
        f" (spread {restore_spread[0]} to {restore_spread[1]})"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
