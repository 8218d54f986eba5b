from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.client.checkpoints.manager import CheckpointManager


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no process of these tests taken for a rank of some world."""
    for name in ("STRATA_SOCKET", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """Return a manager without coordinators."""
    with CheckpointManager(tmp_path / "root") as manager:
        yield manager
