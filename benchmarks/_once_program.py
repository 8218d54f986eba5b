"""One rank of `benchmarks.checkpoint_once`: saves a state equal on all ranks, once for each input line."""

from __future__ import annotations

import argparse
import json
import sys
import time

import torch

import strata

TENSORS = 64
SETTINGS = {"compared": None, "declared": True, "own": False}
"""The manager's argument `replicated` in each mode."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("endpoints")
    parser.add_argument("job")
    parser.add_argument("worker")
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--storage", required=True)
    parser.add_argument("--megabytes", type=int, required=True)
    parser.add_argument("--mode", choices=SETTINGS, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    count = (options.megabytes << 20) // 4 // TENSORS
    state = {f"layer{number}.weight": torch.randn(count) for number in range(TENSORS)}
    with strata.connect(
        options.endpoints,
        job=options.job,
        worker_id=options.worker,
        min_workers=options.ranks,
        max_workers=options.ranks,
    ) as client:
        with strata.CheckpointManager(
            options.storage,
            client=client,
            keep_count=1,
            capture_rng=False,
            replicated=SETTINGS[options.mode],
        ) as manager:
            manager.prepare(state)
            for step, _ in enumerate(sys.stdin, 1):  # each line requests one save
                state["layer0.weight"][0] = step
                client.barrier("begin")
                began = time.perf_counter()
                info = manager.save_state(state, step)
                blocked_s = time.perf_counter() - began
                info.wait()
                took_s = time.perf_counter() - began
                client.barrier("saved")
                manager.wait_until_finished()
                facts = {"took_s": took_s, "blocked_s": blocked_s, "compared_s": info.compared_s}
                print(json.dumps({**facts, "bytes": info.size_bytes}), flush=True)
        client.barrier("end")


if __name__ == "__main__":
    main()
