"""The states of the random number generators of Python, NumPy and torch.

The state of a library's generators is captured and restored only if the process has loaded the library.
"""

from __future__ import annotations

import random
import sys
from typing import Any

from strata.errors import CheckpointCorrupt


def capture() -> dict[str, Any]:
    """Return the state of every global generator of this process."""
    states: dict[str, Any] = {"python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        states["numpy"] = numpy.random.get_state()
    if (torch := sys.modules.get("torch")) is not None:
        states["torch"] = torch.get_rng_state()
        if torch.cuda.is_initialized():
            states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def seed(number: int) -> None:
    """Seed every global generator of this process, those of accelerators too."""
    random.seed(number)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
    if (torch := sys.modules.get("torch")) is not None:
        torch.manual_seed(number)


def restore(states: dict[str, Any]) -> None:
    """Restore the generators; skip generators of libraries that are not loaded, and of GPUs that are not present.

    `CheckpointCorrupt` for a state that a generator rejects: no generator can have produced such a state.
    """
    try:
        _restore(states)
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RuntimeError) as error:
        raise CheckpointCorrupt(
            f"the state of the random generators cannot be put back: {error!s:.200}",
            hint="CheckpointManager(…, capture_rng=False) restores without it",
        ) from error


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    if "numpy" in states and (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.set_state(states["numpy"])
    torch = sys.modules.get("torch")
    if torch is None or "torch" not in states:
        return
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
