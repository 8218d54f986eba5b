"""Putting checkpoints that were read and proven into the state of a training."""

from __future__ import annotations

import logging
from collections.abc import Collection, MutableMapping, Sequence
from typing import Any, Final

from strata.checkpoint import rng
from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.reader import Loaded
from strata.checkpoint.restoring import restore_into

log: Final = logging.getLogger("strata.checkpoint")

Found = Sequence[tuple[CheckpointMetadata, Loaded]]
"""Checkpoints, what is wanted most first."""


def put_into(
    state: MutableMapping[str, Any],
    found: Found,
    *,
    of_rank_0: Collection[str],
    rank: int,
    restore_rng: bool,
) -> None:
    """Restore each key of `state` from the first that holds it, and the random generators.

    `CheckpointError`, naming what does not fit, before anything is changed.
    """
    for _, loaded in found:
        loaded.check_known(state, of_rank_0, rank=rank)
    restore_into(found[0][1].saved, state, *(loaded.saved for _, loaded in found[1:]))
    if restore_rng:
        _restore_rng(found, rank)


def _restore_rng(found: Found, rank: int) -> None:
    for checkpoint, loaded in found:
        if loaded.saved.rng is None:
            continue
        if loaded.own:
            rng.restore(loaded.saved.value(loaded.saved.rng))
            return
        log.warning("step %d has no random state for rank %d", checkpoint.step, rank)
