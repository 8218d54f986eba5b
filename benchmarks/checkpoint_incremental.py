"""An Incremental of a state of which 99 of 100 tensors are frozen, beside a Full of the same state.

    python -m benchmarks.checkpoint_incremental [--json FILE] [--megabytes 800] [--rounds 7]

Each round saves a Full and then an Incremental, after changing one tensor in a hundred. Both end when the checkpoint
is committed, and both include the copy of the whole state that blocks the trainer. The Incremental hashes the whole
state and writes the changes. The size of its image and manifests is compared with the size of the changed chunks.
Afterwards it is restored, and every tensor is compared with the saved one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

import numpy as np

from benchmarks._disk import cpu_s, spread
from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.kv.records import CheckpointType

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 100
GOAL = "≤ 1/10 of a Full's time; bytes ≤ 1.05 x the chunks that changed"


@dataclass(slots=True)
class Rounds:
    """Seconds and bytes of each round."""

    full_s: list[float] = field(default_factory=list)
    incremental_s: list[float] = field(default_factory=list)
    blocked_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    bytes_of_changed: list[float] = field(default_factory=list)


def bytes_on_disk(info: CheckpointInfo) -> int:
    folder = Path(unquote(urlsplit(info.path).path))
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(folder: Path, megabytes: int, rounds: int) -> Rounds:
    """Return the measured rounds, without the first, which warms up."""
    random = np.random.default_rng(0)
    count = (megabytes << 20) // 4 // TENSORS
    state = {f"layer{i}": random.random(count, dtype=np.float32) for i in range(TENSORS)}
    hot = state["layer7"]
    found = Rounds()
    with CheckpointManager(folder / "root", keep_count=1, capture_rng=False) as manager:

        def save(step: int, kind: CheckpointType) -> tuple[CheckpointInfo, float, float]:
            os.sync()
            began = time.perf_counter()
            info = manager.save_state(state, step, 0, kind)
            blocked = time.perf_counter() - began
            info.wait()
            took = time.perf_counter() - began
            manager.wait_until_finished()
            return info, blocked, took

        for number in range(rounds + 1):
            hot += 1
            _, _, full_s = save(2 * number + 1, CheckpointType.FULL)
            hot += 1
            cpu = cpu_s()
            info, blocked_s, incremental_s = save(2 * number + 2, CheckpointType.INCREMENTAL)
            if info.checkpoint_type is not CheckpointType.INCREMENTAL:
                raise RuntimeError("no Incremental was saved")
            if number:
                found.full_s.append(full_s)
                found.incremental_s.append(incremental_s)
                found.blocked_s.append(blocked_s)
                found.cpu_s.append(cpu_s() - cpu)
                found.bytes_of_changed.append(bytes_on_disk(info) / hot.nbytes)
            print(f"round {number} of {rounds}", flush=True)
        back = {name: np.zeros_like(array) for name, array in state.items()}
        manager.restore(back)
    if any(not np.array_equal(back[name], state[name]) for name in state):
        raise RuntimeError("the restored state differs from the saved one")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--megabytes", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    base = ROOT / ".strata"
    base.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=base) as name:
        rounds = measure(Path(name), args.megabytes, max(5, args.rounds))
    pairs = list(zip(rounds.incremental_s, rounds.full_s, strict=True))
    share, share_spread = spread([one / full for one, full in pairs])
    size, size_spread = spread(rounds.bytes_of_changed)
    gigabytes = args.megabytes / 1024
    result = {
        "benchmark": "checkpoint_incremental",
        "megabytes": args.megabytes,
        "rounds": len(pairs),
        "time_of_full": share,
        "time_of_full_spread": share_spread,
        "bytes_of_changed": size,
        "bytes_of_changed_spread": size_spread,
        "full_s": spread(rounds.full_s)[0],
        "incremental_s": spread(rounds.incremental_s)[0],
        "blocked_s_per_gb": round(spread(rounds.blocked_s)[0] / gigabytes, 3),
        "cpu_s_per_gb": round(spread(rounds.cpu_s)[0] / gigabytes, 3),
        "goal": GOAL,
        "met": share <= 0.1 and size <= 1.05,
    }
    print(
        f"{args.megabytes} MB, 99 of 100 tensors frozen: an Incremental takes {share} of a Full's time"
        f" (spread {share_spread[0]} to {share_spread[1]}; {result['incremental_s']} s, of which the trainer"
        f" is blocked {result['blocked_s_per_gb']} s/GB, CPU {result['cpu_s_per_gb']} s/GB) and {size} x the"
        " bytes that changed"
    )
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
