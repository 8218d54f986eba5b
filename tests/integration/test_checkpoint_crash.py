"""SIGKILL at every step of a save: at reopen the newest is complete, and nothing told is lost."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strata.client.checkpoints import CheckpointManager
from strata.core.records import CheckpointState
from tests.processes import Record, Talker
from tests.unit.checkpoint.crashing import COUNT, STEPS

LAST = 56
"""How many steps there are; the first test says when it is no longer so."""

Crashes = tuple[Path, Record]


@pytest.fixture(scope="module")
def crashes(tmp_path_factory: pytest.TempPathFactory) -> Crashes:
    """A root for each step, at which its process died, and what all of them said."""
    root, record = tmp_path_factory.mktemp("crashes"), Record()
    argv = [sys.executable, "-m", "tests.unit.checkpoint.crashing", str(root), str(LAST)]
    talker = Talker(argv, name="crashing", record=record)
    assert talker.join(300) == 0
    return root, record


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_the_way_of_a_save_has_these_steps(crashes: Crashes) -> None:
    _, record = crashes
    assert [e["code"] for e in record.of("ended")] == [0] + [-signal.SIGKILL] * LAST
    names = [e["name"] for e in record.of("step", run=0)]
    assert len(names) == LAST
    mark = names.index("mark")
    assert names[mark:][:5] == ["mark", "sync COMMIT", "link COMMIT", "sync folder of COMMIT", "marked"]
    deletions = [name for name in names if name.startswith("delete")]
    assert deletions[:4] == [
        "delete COMMIT",
        "delete manifest.json",
        "delete rank-00000.safetensors",
        "delete rank-00000.json",
    ]


@pytest.mark.parametrize("run", range(1, LAST + 1))
def test_whatever_was_told_is_there_and_nothing_partial_is_latest(crashes: Crashes, run: int) -> None:
    root, record = crashes[0] / str(run), crashes[1]
    told = [e["step"] for e in record.of("committed", run=run)]
    marks = len(record.of("step", run=run, name="marked"))
    with CheckpointManager(root, keep_count=1) as manager:
        assert {c.state for c in manager.all_checkpoints()} <= {CheckpointState.COMMITTED}
        latest = manager.latest_step()
        assert latest in {None, *STEPS}
        known = max([0, *told, *STEPS[:marks]])
        assert (latest or 0) >= known
        state: dict[str, Any] = {"w": np.zeros(COUNT), "step": None}
        found = manager.restore(state)
        assert (found.step if found else None) == latest
        if latest is not None:
            assert np.all(state["w"] == latest)
            assert state["step"] == latest
        manager.save_state({"w": np.ones(3), "step": 60}, 60)
        manager.wait_until_finished(20)
        assert manager.all_steps() == [60]
    assert len(list(root.glob("step-*"))) == 1, "the next run clears away what the crash left"
    assert not list(root.glob("step-*/.*"))
