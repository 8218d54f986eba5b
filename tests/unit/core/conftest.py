"""What most tests of this folder begin with."""

from __future__ import annotations

import pytest

from tests.unit.core.rig import Store


@pytest.fixture
def store() -> Store:
    return Store()
