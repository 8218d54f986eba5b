from __future__ import annotations

from pathlib import Path

import pytest

from strata.checkpoint.sink import NotAnObject
from strata.client.checkpoints import CheckpointManager


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else_from_going(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    for step in (1, 2, 3):
        manager.save(b"x", step=step).wait()
    manager.close()
    first = next(tmp_path.glob("step-000000000001-*"))
    (first / "rank-00000.json").unlink()
    (first / "rank-00000.json").mkdir()
    keeping = CheckpointManager(tmp_path, keep_count=1)
    keeping.save(b"x", step=4).wait()
    with pytest.raises(NotAnObject, match="it is a folder") as error:
        keeping.wait_until_finished()
    assert "move it away" in error.value.hint
    assert keeping.all_steps() == [4]
    assert {path.name.split("-")[1] for path in tmp_path.glob("step-*")} == {"000000000001", "000000000004"}
    (first / "rank-00000.json").rmdir()
    keeping.save(b"x", step=5).wait()
    keeping.close()
    assert {path.name.split("-")[1] for path in tmp_path.glob("step-*")} == {"000000000005"}
