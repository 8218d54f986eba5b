from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from strata.checkpoint.reader import Loaded
from tests.unit.checkpoint.ranks import Ranks


@pytest.fixture
def two_ranks() -> Callable[..., Loaded]:
    """A function that saves two ranks' states together and loads them for a third."""

    def run(*states: Any, rank: int) -> Loaded:
        ranks = Ranks(len(states))
        ranks.save(states=states)
        loaded: Loaded = ranks.loaded(rank)
        return loaded

    return run
