from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.client.checkpoints.manager import CheckpointManager


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the launcher's environment, so that no test process counts as a rank of a world."""
    for name in ("STRATA_SOCKET", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointManager]:
    """Return a manager that uses no coordinators."""
    with CheckpointManager(tmp_path / "root") as manager:
        yield manager
