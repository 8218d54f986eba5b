"""A training that checks whether grpc is among its imports, and starts DataLoader workers by every method.

`--grpc before` imports grpc before strata; `--grpc after` imports it after the training has begun, as a user may. The
environment variable GRPC_FORK=1 turns gRPC's own fork support on.
"""

from __future__ import annotations

import argparse
import os
import sys

os.environ["GRPC_ENABLE_FORK_SUPPORT"] = os.environ.get("GRPC_FORK", "0")
if "before" in sys.argv:
    import grpc  # noqa: F401  # as a program that uses it for something else

import torch
from torch.utils.data import DataLoader, TensorDataset

import strata
from tests.ranks.saying import say

METHODS = ("fork", "spawn", "forkserver")
LENGTH = 32


def main() -> int:
    """Train one epoch with each kind of workers; each epoch ends with a save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--storage", required=True)
    parser.add_argument("--grpc", required=True, choices=("never", "before", "after"))
    options = parser.parse_args()
    torch.set_num_threads(1)

    data = TensorDataset(torch.arange(LENGTH))
    model = torch.nn.Linear(1, 1)
    run = strata.init(model=model, storage_path=options.storage)
    say("begun", rank=run.world.rank)
    if options.grpc == "after":
        import grpc  # noqa: PLC0415, F401  # as above
    for epoch, method in enumerate(METHODS):
        loader = DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context=method)
        seen = sum(len(batch) for (batch,) in run.steps(loader, epoch=epoch))
        run.save(wait=True)
        say("epoch", rank=run.world.rank, method=method, seen=seen, grpc="grpc" in sys.modules)
    run.close()
    say("end", step=run.step, grpc="grpc" in sys.modules)
    return 0


if __name__ == "__main__":
    sys.exit(main())
