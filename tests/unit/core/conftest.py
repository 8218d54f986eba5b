"""What most tests of this folder begin with."""

from __future__ import annotations

import pytest

from tests.unit.core.rig import Store, lead


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def epoch(store: Store) -> int:
    """Let somebody lead."""
    return lead(store)
