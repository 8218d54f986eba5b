"""TensorBoard shows each step once, although a restart repeats the steps since its checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import strata

tensorboard: Any = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
events: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


def trained(folder: Path, *, begin: int, end: int) -> None:
    """Train to step `end` as docs/training.md logs it, and end without another save."""
    run = strata.init(state={}, storage_path=folder / "checkpoints", save_every_steps=5)
    assert run.step == begin
    writer = tensorboard.SummaryWriter(str(folder / "events"), purge_step=run.step + 1)
    while run.step < end:
        run.step_done(1)
        writer.add_scalar("loss", begin + 1 / run.step, run.step)
    writer.close()
    run.saves.finish(run.step)
    run.abandon("killed")


def test_the_points_after_the_restored_step_are_those_of_the_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    trained(tmp_path, begin=0, end=8)
    trained(tmp_path, begin=5, end=12)
    shown = events.EventAccumulator(str(tmp_path / "events"))
    shown.Reload()
    points = [(point.step, int(point.value)) for point in shown.Scalars("loss")]
    assert points == [*((step, int(1 / step)) for step in range(1, 6)), *((step, 5) for step in range(6, 13))]
