"""All ranks load the same checkpoint through DCP, even if a commit comes between their reads of the catalog."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.processes import Record, Talker

ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 300.0


@pytest.mark.journey
def test_all_ranks_load_the_checkpoint_that_rank_0_found(tmp_path: Path) -> None:
    record = Record()
    (tmp_path / "meet").mkdir()
    command = [sys.executable, "-m", "tests.ranks.agreeing", str(tmp_path), str(tmp_path / "meet")]
    talker = Talker(command, name="agreeing", record=record, cwd=ROOT)
    assert talker.join(limit_s=LIMIT_S) == 0, record.events
    talker.wait_quiet()
    assert [event["codes"] for event in record.of("world")] == [[0, 0]], record.events
    # rank 0 read the catalog before the commit, or after it
    for first, step in ((0, 1), (1, 2)):
        agreed = [event for event in record.of("agreed") if event["first"] == first]
        assert [(e["step"], e["values"]) for e in agreed] == [(step, [step])] * 2, agreed
    # a plan for one checkpoint cannot read the other checkpoint, because its shards have another layout
    refused = record.of("refused")
    assert len(refused) == 2
    assert all("load again" in event["error"] for event in refused), refused
