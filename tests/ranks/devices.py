"""Saves JAX arrays from some devices of one process, and restores them on others.

XLA_FLAGS=--xla_force_host_platform_device_count=4 python -m tests.ranks.devices <storage>
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from strata.client.checkpoints.manager import CheckpointManager
from strata.integrations.jax import Pytree
from tests.ranks.saying import say


def tree(rows: int, columns: int, *, scale: float) -> dict[str, Any]:
    """Return a pytree whose arrays are sharded over `rows` times `columns` devices."""
    devices = np.array(jax.devices()[: rows * columns]).reshape(rows, columns)
    mesh = Mesh(devices, ("rows", "columns"))

    def put(value: Any, *axes: str | None) -> jax.Array:
        where = PartitionSpec(*axes)  # type: ignore[no-untyped-call]  # jax has no types for it
        found: jax.Array = jax.device_put(value, NamedSharding(mesh, where))
        return found

    return {
        "w": put(jnp.arange(32.0).reshape(8, 4) * scale, "rows", "columns"),
        "halves": put(jnp.arange(8, dtype=jnp.bfloat16) * scale, "rows"),
        "everywhere": put(jnp.full(3, scale)),
        "one": jnp.full((2, 2), scale),
        "key": jax.random.key(int(scale)),
        "list": [np.full(2, scale), (int(scale), "x")],
    }


def reported(value: dict[str, Any]) -> str:
    """Return every value of the tree as text."""
    plain = {**value, "key": jax.random.key_data(value["key"])}
    return repr(
        jax.tree.map(lambda leaf: leaf if isinstance(leaf, str | int) else np.asarray(leaf).tolist(), plain)
    )


def main() -> int:
    saved = Pytree(tree(2, 2, scale=3))
    with CheckpointManager(sys.argv[1]) as manager:
        manager.save_state({"train": saved}, step=1)
        manager.wait_until_finished(60)
        for rows, columns in ((2, 2), (4, 1), (1, 2), (1, 1)):
            here = Pytree(tree(rows, columns, scale=1))
            before = here.tree["w"].sharding
            manager.restore({"train": here})
            say(
                "restored",
                shape=[rows, columns],
                same=reported(here.tree) == reported(saved.tree),
                lies_as_before=here.tree["w"].sharding == before,
                one_is_an_array=isinstance(here.tree["one"], jax.Array),
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
