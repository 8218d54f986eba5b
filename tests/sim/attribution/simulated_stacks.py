"""Stacks of a simulated rank: frames as faulthandler names them in a torch training."""

from __future__ import annotations

import random
from typing import Final

SITE: Final = "/venv/lib/python3.11/site-packages"

Frame = tuple[str, int, str]


def frames(activity: str, chance: random.Random) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of each frame of the main thread, the innermost first."""
    main = [("/app/train.py", 88, "main"), ("/app/train.py", 120, "<module>")]
    steps = [(f"{SITE}/strata/training/loop/run.py", 270, "_steps"), *main]
    match activity:
        case "data":
            return [
                ("/usr/lib/python3.11/threading.py", 327, "wait"),
                ("/usr/lib/python3.11/queue.py", 180, "get"),
                (f"{SITE}/torch/utils/data/dataloader.py", 1133, "_try_get_data"),
                (f"{SITE}/torch/utils/data/dataloader.py", 630, "__next__"),
                (f"{SITE}/strata/training/loop/compute_timer.py", 44, "waiting"),
                *steps,
            ]
        case "disk":
            return [
                ("/app/dataset.py", 31, "read_shard"),
                ("/app/dataset.py", 50, "__iter__"),
                (f"{SITE}/strata/training/loop/compute_timer.py", 44, "waiting"),
                *steps,
            ]
        case "saving":
            return [
                (f"{SITE}/strata/checkpoint/storage/local_storage.py", 210, "write"),
                (f"{SITE}/strata/client/checkpoints/manager.py", 300, "save"),
                (f"{SITE}/strata/training/loop/run.py", 360, "_save"),
                *main,
            ]
        case "barrier":
            return [
                ("/usr/lib/python3.11/threading.py", 327, "wait"),
                ("/usr/lib/python3.11/concurrent/futures/_base.py", 451, "result"),
                (f"{SITE}/strata/client/event_loop.py", 55, "call"),
                (f"{SITE}/strata/client/rank/rank_client.py", 130, "barrier"),
                (f"{SITE}/strata/training/save/saves.py", 90, "meet"),
                *main,
            ]
        case "collective":
            return [
                (f"{SITE}/torch/distributed/distributed_c10d.py", 2806, "all_reduce"),
                (f"{SITE}/torch/distributed/c10d_logger.py", 83, "wrapper"),
                ("/app/train.py", 70, "average_gradients"),
                *main,
            ]
        case "lock":
            return [("/app/metrics.py", 12, "flush"), ("/app/train.py", 75, "log"), *main]
        case _:
            inner = chance.choice(
                [
                    (f"{SITE}/torch/nn/modules/linear.py", 125, "forward"),
                    (f"{SITE}/torch/nn/functional.py", 1500, "relu"),
                    (f"{SITE}/torch/autograd/graph.py", 841, "_engine_run_backward"),
                    ("/app/model.py", 44, "forward"),
                ]
            )
            return [inner, *main]
