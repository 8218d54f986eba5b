"""A real torch training whose ranks are killed equals an undisturbed training; see `tests.rank_kills`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.processes import Record, Talker

pytest.importorskip("torch")


@pytest.mark.slow
@pytest.mark.timeout(330)
def test_killed_ranks_lose_no_committed_step_and_resume_bit_for_bit(tmp_path: Path) -> None:
    record, path = Record(), tmp_path / "report.json"
    argv = [sys.executable, "-m", "tests.rank_kills", "--kills", "3", "--seed", "2", "--json", str(path)]
    talker = Talker([*argv, "--folder", str(tmp_path / "run")], name="rank-kills", record=record)
    code = talker.join(300)
    talker.wait_quiet()
    assert code == 0, [event.get("text") for event in record.events]
    report = json.loads(path.read_text())
    assert report["wrong"] == []
    assert report["kills"] == sum(report["met"].values()) == 3
    assert report["checkpoints_seen"].keys() == {"full", "incremental"}
