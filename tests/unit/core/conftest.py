"""Fixtures of most tests of this folder."""

from __future__ import annotations

import pytest

from tests.unit.core.rig import Store, lead


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def epoch(store: Store) -> int:
    """Elect a leader; return its epoch."""
    return lead(store)
