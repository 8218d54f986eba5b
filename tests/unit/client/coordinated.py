"""Checkpoint managers with a control plane in memory, and functions that damage the saved files."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from strata.client.checkpoints.manager import CheckpointManager
from tests.unit.checkpoint.ports import Cluster

LIMIT_S = 30.0


@contextlib.contextmanager
def managers(
    cluster: Cluster,
    root: Path,
    *,
    ranks: int | None = None,
    restore: bool = False,
    each: Mapping[int, dict[str, Any]] | None = None,
    **settings: Any,
) -> Iterator[list[CheckpointManager]]:
    """Yield a manager for each rank of the current world, or for `ranks` ranks; `each` has settings of single ranks."""
    world = cluster.view().world()
    assert world is not None
    point = cluster.restore_point() if restore else None
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                CheckpointManager(
                    root,
                    client=cluster.port(rank, restore=point),
                    **{**settings, **(each or {}).get(rank, {})},
                )
            )
            for rank in range(ranks or world.head.size)
        ]


def manager(cluster: Cluster, root: Path, *, restores: bool = False, **settings: Any) -> CheckpointManager:
    point = cluster.restore_point() if restores else None
    return CheckpointManager(root, client=cluster.port(0, restore=point), **settings)


def save(ckpt: CheckpointManager, *steps: int, **more: Any) -> None:
    for step in steps:
        ckpt.save_state({"w": np.full(4, float(step))}, step, **more).wait(LIMIT_S)
        ckpt.wait_until_finished(LIMIT_S)


def damage(root: Path, step: int) -> None:
    (image,) = root.glob(f"job/step-{step:012d}-*/rank-00000.safetensors")
    data = image.read_bytes()
    image.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
