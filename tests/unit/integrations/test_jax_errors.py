"""The error for a bare JAX array in a state names `Pytree`, and never a class that is not public."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import jax, jax.numpy as jnp, numpy as np, strata
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from strata.integrations.jax import Pytree

def told(what, state):
    try:
        manager.restore(state) if what.startswith("restore") else manager.save_state(state, 2).wait()
    except strata.CheckpointError as error:
        print(what, "|", error.message, "|", error.hint)

where = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), PartitionSpec("x"))
with strata.CheckpointManager("root") as manager:
    saved = {"w": Pytree({"a": jnp.ones(8)}), "list": [1]}
    manager.save_state(saved, 1).wait()
    told("save", {"w": {"a": jnp.ones(8)}})
    told("save a key", {"w": jax.random.key(0)})
    told("save on two devices", {"w": jax.device_put(jnp.ones(8), where)})
    told("save int4 on two devices", {"w": Pytree({"a": jax.device_put(jnp.ones(8, jnp.int4), where)})})
    told("restore", {"w": {"a": jnp.zeros(8)}})
    told("restore what was no array", {"list": jnp.zeros(1)})
"""
HINT = "wrap the tree that holds it: Pytree(tree), from strata.integrations.jax import Pytree"
EXPECTED = {
    "save": ("w.a is a bare JAX array, which cannot be saved", HINT),
    "save a key": ("w is a bare JAX array, which cannot be saved", HINT),
    "save on two devices": ("w is a bare JAX array, which cannot be saved", HINT),
    "save int4 on two devices": ("a of a Pytree is an array of int4, which cannot be saved", ""),
    "restore": ("w.a was saved as a tensor float32[8], and is a bare JAX array here", HINT),
    "restore what was no array": ("list was saved as a list, and is a bare JAX array here", HINT),
}


@pytest.mark.usefixtures("jax_installed")
def test_an_error_about_a_jax_array_names_pytree(tmp_path: Path) -> None:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    env = {name: value for name, value in os.environ.items() if not name.startswith("STRATA_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        cwd=tmp_path,
        env={**env, **devices},
    )
    assert done.returncode == 0, done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines()]
    assert {what: (message, hint.strip()) for what, message, hint in rows} == EXPECTED
