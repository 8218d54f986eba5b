"""Soak runs: turns until the time is over, a ledger that continues across runs, and the evidence of failures."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.soak import campaigns
from tests.soak.campaigns import Campaign, Outcome, Turn
from tests.soak.ledger import Ledger, Open, Span
from tests.soak.run import Soak, table

PROGRAM = """
import json, pathlib, sys, time
first, seeds, out, bad, seconds = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], sys.argv[5]
print("begun", flush=True)
time.sleep(float(seconds))
broken = {s: "two leaders" for s in range(first, first + seeds) if str(s) == bad}
if bad != "none at all":
    pathlib.Path(out).write_text(json.dumps({"failed": broken}))
"""


def campaign(name: str = "quick", *, bad: str = "", seconds: float = 0.0, **more: Any) -> Campaign:
    def command(turn: Turn) -> list[str]:
        words = (str(turn.first), str(turn.seeds), str(turn.json), bad, str(seconds))
        return [sys.executable, "-c", PROGRAM, *words]

    def outcome(printed: Mapping[str, Any], turn: Turn) -> Outcome:
        return Outcome(turn.seeds, 30.0, {int(seed): why for seed, why in printed["failed"].items()})

    usual: dict[str, Any] = {"first": 1, "seeds": 10, "turn_s": 1.0, "again": "again --seed {seed}"}
    return Campaign(name=name, command=command, outcome=outcome, **(usual | more))


def soak(folder: Path, *chosen: Campaign, turns: int = 3, **more: Any) -> Soak:
    """Return a run whose time is over once it has recorded `turns` turns, however long that takes."""
    lines: list[str] = []
    run = Soak(
        campaigns=chosen,
        commit="abc",
        ledger=folder / "ledger.tsv",
        kept=folder / "kept",
        left_s=lambda: 1000.0 if len(run.spans) < turns else 0.0,
        say=lines.append,
        **more,
    )
    return run


@contextmanager
def going(run: Soak) -> Iterator[threading.Thread]:
    """Run the soak in a thread inside the block; stop it at the end of the block, even after an error."""
    thread = threading.Thread(target=run.run, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        run.stop.set()
        thread.join(60.0)


def kept(folder: Path) -> list[str]:
    return sorted(path.name.rpartition("-")[0] for path in (folder / "kept").iterdir())


def test_a_run_continues_the_ledger_and_keeps_no_files_of_passed_seeds(tmp_path: Path) -> None:
    old = Span(campaign="quick", first=1, last=40, commit="old")
    Ledger((old,)).write(tmp_path / "ledger.tsv")
    run = soak(tmp_path, campaign())
    run.run()
    assert run.broken == []
    assert Ledger.read(tmp_path / "ledger.tsv").spans == (
        old,
        Span(campaign="quick", first=41, last=70, commit="abc", effective=30, seconds=90),
    )
    assert kept(tmp_path) == []


def test_a_failed_seed_is_kept_with_its_repeat_command_and_stays_open(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign(bad="7"), turns=1)
    run.run()
    ledger = Ledger.read(tmp_path / "ledger.tsv")
    assert ledger.open == (Open(campaign="quick", seed=7, commit="abc", why="two leaders"),)
    assert ledger.spans[0].failed == (7,)
    assert kept(tmp_path) == ["quick-1"]
    (folder,) = (tmp_path / "kept").iterdir()
    assert (folder / "again").read_text() == "# on abc\nagain --seed 7\n"
    assert (folder / "log").read_text() == "begun\n"
    assert json.loads((folder / "result.json").read_text()) == {"failed": {"7": "two leaders"}}


def test_campaigns_take_turns(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign("one"), campaign("two"), turns=4)
    run.run()
    assert [span.campaign for span in run.spans] == ["one", "two", "one", "two"]


def test_a_parallel_campaign_waits_for_no_other_campaign(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign("long", seconds=1000.0), campaign("beside", beside=True), turns=2)
    with going(run) as thread:
        while len(run.spans) < 2:
            thread.join(0.01)
    assert {span.campaign for span in run.spans} == {"beside"}


def test_a_turn_longer_than_the_time_left_is_not_begun(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign("long", turn_s=1001.0), campaign("quick"), turns=2)
    run.run()
    assert {span.campaign for span in run.spans} == {"quick"}


def test_a_campaign_stops_after_three_turns_without_a_result(
    tmp_path: Path,
) -> None:
    run = soak(tmp_path, campaign("dumb", bad="none at all"), campaign("quick"), turns=8)
    run.run()
    opened = Ledger.read(tmp_path / "ledger.tsv").open
    assert [(one.campaign, one.seed) for one in opened] == [("dumb", 1), ("dumb", 11), ("dumb", 21)]
    assert opened[0].why.startswith("no result of 1 to 10: the turn exited with 0 (FileNotFoundError")
    assert run.broken == ["dumb gets no further turn: 3 left no result"]
    assert [span.campaign for span in run.spans].count("quick") == 5
    assert kept(tmp_path) == ["dumb-1", "dumb-11", "dumb-21"]


def test_an_interrupted_run_discards_its_turn_but_keeps_the_log(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign(seconds=1000.0))
    with going(run) as thread:
        while not any(log.read_text() for log in (tmp_path / "kept").glob("quick-1-*/log")):
            thread.join(0.01)
    assert not thread.is_alive()
    assert run.spans == []
    assert run.broken == []
    assert Ledger.read(tmp_path / "ledger.tsv") == Ledger()
    assert kept(tmp_path) == ["quick-1"]


def test_a_turn_that_hangs_is_ended_and_is_open(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign(seconds=1000.0), turns=1, overtime_s=0.5)
    run.run()
    (one,) = Ledger.read(tmp_path / "ledger.tsv").open
    assert one.why.startswith("no result of 1 to 10: the turn was ended after 0.5 s")


def test_a_broken_lane_ends_the_run_with_its_error(tmp_path: Path) -> None:
    (tmp_path / "ledger.tsv").write_text("<<<<<<< conflict\n")
    run = soak(tmp_path, campaign())
    run.run()
    (broken,) = run.broken
    assert "line 1 of the ledger is no span and no open failure" in broken


def test_the_table_has_a_line_a_campaign() -> None:
    spans = [
        Span(campaign="simulation", first=1, last=100, commit="a", effective=10, seconds=3600, failed=(3,)),
        Span(campaign="simulation", first=101, last=200, commit="b", effective=5, seconds=1800),
        Span(campaign="chaos", first=1, last=1, commit="b", effective=50, seconds=360),
    ]
    assert table(spans).splitlines() == [
        "campaign        seeds  effective faults   hours*  failed",
        "chaos               1                50      0.1       0",
        "simulation        200                15      1.5       1",
        "* virtual ones for the simulation, of this machine for the others",
    ]


def test_the_results_of_every_campaign_are_parsed(tmp_path: Path) -> None:
    turn = Turn(first=5, seeds=2, json=tmp_path / "x.json", folder=tmp_path)
    simulation = {
        "seeds": 2,
        "failed": {"6": ["two leaders"]},
        "effective": {"a": 3, "b": 4},
        "virtual_s": 3600,
    }
    assert campaigns.SIMULATION.outcome(simulation, turn) == Outcome(7, 3600, {6: "two leaders"})
    with pytest.raises(ValueError, match="1 of 2 seeds ran"):
        campaigns.SIMULATION.outcome(simulation | {"seeds": 1}, turn)
    schedules = {"failed": {"5": ["a", "b"]}, "deeds": {"kill_rank": 2}, "took_s": 1800}
    assert campaigns.SCHEDULES.outcome(schedules, turn) == Outcome(2, 1800, {5: "a; b"})
    assert campaigns.CRASHES.outcome({"wrong": [], "kills": 9, "seconds": 3600}, turn) == Outcome(9, 3600, {})
    assert campaigns.RANK_KILLS.outcome({"wrong": ["kill 3"], "kills": 3, "seconds": 60}, turn) == Outcome(
        3, 60, {5: "kill 3"}
    )
    chaos = {"faults": [{"effective": 3}], "verdict": "pass", "duration_s": 360, "cut_short": False}
    assert campaigns.CHAOS.outcome(chaos, turn) == Outcome(3, 360, {})
    for sentence in ("VIOLATION: 1 found", "UNKNOWN: the ground truth has a gap"):
        broken = chaos | {"verdict": sentence.partition(":")[0].lower(), "sentence": sentence}
        assert campaigns.CHAOS.outcome(broken, turn) == Outcome(3, 360, {5: sentence})
    assert f"--backend {campaigns.chaos_backend()}" in campaigns.CHAOS.again
    with pytest.raises(ValueError, match="cut short"):
        campaigns.CHAOS.outcome(chaos | {"cut_short": True}, turn)
