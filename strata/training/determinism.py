"""`strata.deterministic()`: settings with which a training of the same world gives the same bits."""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from strata.checkpoint.snapshot import rng
from strata.client.api.arguments import integer
from strata.errors import ConfigError

WORKSPACE: Final = "CUBLAS_WORKSPACE_CONFIG"
"""The environment variable from which cuBLAS takes its workspaces, when a process first uses CUDA."""
WORKSPACES: Final = (":4096:8", ":16:8")
"""The values with which cuBLAS is deterministic on several streams; the second takes less memory and is slower."""


def deterministic(seed: int = 0, *, warn_only: bool = False) -> None:
    """Make this process compute the same bits each time; call it on every rank, before the model is made.

    Seeds the random generators of Python, NumPy and torch. Of NumPy, the global generator; `default_rng(seed)` makes
    others. NumPy and torch are set only if the program has imported them. Of torch, it also sets:

    - `torch.use_deterministic_algorithms(True)`. An operation without a deterministic algorithm then raises; with
      `warn_only` it warns.
    - `torch.backends.cudnn.deterministic = True` and `benchmark = False`: cuDNN measures no algorithms to choose one.
    - CUBLAS_WORKSPACE_CONFIG to `:4096:8`, unless it is `:16:8`: older releases of torch refuse cuBLAS's operations
      without it. `ConfigError` if it has another value and this process has used CUDA already; then nothing is changed.

    The precision of float32 products (TF32) stays as it is: TF32 is less precise, but gives the same bits each time.
    The bits may differ on another kind of device, with another release of torch or another number of its CPU threads,
    and where a program depends on the order of a set of texts (PYTHONHASHSEED).
    """
    seed = integer("seed", seed, below=2**32, hint="pass a whole number of at most 32 bits, as NumPy takes")
    torch = sys.modules.get("torch")
    if torch is not None:
        _set_cublas(torch)
    rng.seed(seed)
    if torch is not None:
        torch.use_deterministic_algorithms(True, warn_only=warn_only)
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.benchmark = False


def _set_cublas(torch: Any) -> None:
    """Set cuBLAS's workspaces, unless they are deterministic; `ConfigError` if it is too late."""
    value = os.environ.get(WORKSPACE)
    if value in WORKSPACES:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(
            f"{WORKSPACE} is {value or 'not set'}, and this process has used CUDA already",
            hint=f"call strata.deterministic() before the first use of CUDA, or start with {WORKSPACE}={WORKSPACES[0]}",
        )
    os.environ[WORKSPACE] = WORKSPACES[0]
