"""JAX states in Strata's checkpoints: any pytree, arrays on any number of devices and processes.

from strata.integrations.jax import Pytree

state = Pytree({"params": params, "opt": opt_state, "key": key})
manager.save_state({"train": state}, step=step)
manager.restore({"train": state})
params = state.tree["params"]
"""

from strata.integrations.jax.pytree import Pytree

__all__ = ["Pytree"]
