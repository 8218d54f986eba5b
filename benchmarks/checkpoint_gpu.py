"""How long a save blocks a training whose state is on a CUDA device.

    python -m benchmarks.checkpoint_gpu [--json FILE] [--megabytes 2048] [--rounds 7]

Needs a CUDA device, and prints so if there is none. *Blocked* is the time from the call of save until the device has
done the training's next work, minus the time of the same work without a save. That work changes all tensors
immediately, which is the worst case for the copy. *Returned* is the time until the call itself returns. The baseline
is a raw copy of the same bytes into pinned memory.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks._disk import spread
from strata.client.checkpoints.manager import CheckpointManager

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 32
GOAL = "blocked ≤ 1.10 x the raw pinned copy"


def measure(folder: Path, megabytes: int, rounds: int) -> tuple[list[float], list[float], list[float]]:
    """Return seconds blocked, until the call returned, and of the raw copy, for each round."""
    count = (megabytes << 20) // 4 // TENSORS
    state = {f"layer{i}": torch.ones(count, device="cuda") for i in range(TENSORS)}
    pinned = torch.empty(count, pin_memory=True)

    def change() -> None:
        for tensor in state.values():
            tensor.add_(1)

    def timed_until_done() -> float:
        began = time.perf_counter()
        change()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    blocked, returned, raw = [], [], []
    with CheckpointManager(folder, keep_count=1, capture_rng=False) as manager:
        for step in range(1, rounds + 2):
            torch.cuda.synchronize()
            work = timed_until_done()
            began = time.perf_counter()
            info = manager.save_state(state, step)
            back = time.perf_counter() - began
            change()
            torch.cuda.synchronize()
            took = time.perf_counter() - began - work
            info.wait()
            manager.wait_until_finished()
            began = time.perf_counter()
            for tensor in state.values():
                pinned.copy_(tensor, non_blocking=True)
            torch.cuda.synchronize()
            plain = time.perf_counter() - began
            if step > 1:  # the first save pins its memory
                blocked.append(took)
                returned.append(back)
                raw.append(plain)
    return blocked, returned, raw


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    result: dict[str, object] = {"benchmark": "checkpoint_gpu", "goal": GOAL, "met": None}
    if not torch.cuda.is_available():
        print("not measured: it needs a CUDA device, and this machine has none")
    else:
        base = ROOT / ".strata"
        base.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=base) as name:
            blocked, returned, raw = measure(Path(name), args.megabytes, max(5, args.rounds))
        ratio, ratio_spread = spread([a / b for a, b in zip(blocked, raw, strict=True)])
        gigabytes = args.megabytes / 1024
        result |= {
            "megabytes": args.megabytes,
            "rounds": len(raw),
            "blocked_of_pinned_copy": ratio,
            "blocked_of_pinned_copy_spread": ratio_spread,
            "blocked_s_per_gb": round(statistics.median(blocked) / gigabytes, 4),
            "returned_s_per_gb": round(statistics.median(returned) / gigabytes, 4),
            "device": torch.cuda.get_device_name(),
            "met": ratio <= 1.10,
        }
        print(
            f"{args.megabytes} MB on {result['device']}: blocked {ratio} x a raw pinned copy (spread"
            f" {ratio_spread}), {result['blocked_s_per_gb']} s/GB; the call returns after"
            f" {result['returned_s_per_gb']} s/GB"
        )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
