"""SIGKILL at every step of a save: after reopening, the newest checkpoint is complete and no reported one is lost."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import Record, Talker


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_a_process_killed_at_any_step_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    record, path = Record(), tmp_path / "report.json"
    argv = [sys.executable, "-m", "tests.crashes", "--rounds", "1", "--json", str(path)]
    talker = Talker([*argv, "--folder", str(tmp_path / "roots")], name="crashes", record=record)
    code = talker.join(300)
    talker.wait_quiet()
    assert code == 0, [event.get("text") for event in record.events]
    report = json.loads(path.read_text())
    assert report["wrong"] == []
    names = report["steps"]
    assert (report["kills"], report["lived_to_the_end"]) == (len(names), 0)
    assert len(names) > 80, "four saves, three deletions"
    mark = names.index("mark")
    steps = ["begin COMMIT", "write COMMIT", "sync COMMIT", "link COMMIT", "sync folder of COMMIT"]
    assert names[mark:][:7] == ["mark", *steps, "marked"]
    deletions = [name for name in names if name.startswith("delete")]
    assert deletions[:4] == [
        "delete COMMIT",
        "delete manifest.json",
        "delete rank-00000.safetensors",
        "delete rank-00000.json",
    ]
