"""Fixtures that several tests of this folder use."""

from __future__ import annotations

import pytest

from strata.testing.memory_store import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()
