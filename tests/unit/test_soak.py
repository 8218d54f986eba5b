"""A long run: turns until the time is over, a ledger that goes on, failures that are kept."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.soak import campaigns
from tests.soak.campaigns import Campaign, Outcome, Turn
from tests.soak.ledger import Ledger, Open, Span
from tests.soak.run import Soak, mended, table

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

    def outcome(said: Mapping[str, Any], turn: Turn) -> Outcome:
        return Outcome(turn.seeds, 0.5, {int(seed): why for seed, why in said["failed"].items()})

    usual: dict[str, Any] = {"first": 1, "seeds": 10, "turn_s": 1.0, "again": "again --seed {seed}"}
    return Campaign(name=name, command=command, outcome=outcome, **(usual | more))


def soak(folder: Path, *chosen: Campaign, seconds: float = 1.5) -> Soak:
    """A run that begins turns of a second for `seconds`."""
    said: list[str] = []
    return Soak(
        campaigns=chosen,
        commit="abc",
        ledger=folder / "ledger.tsv",
        kept=folder / "kept",
        until=time.monotonic() + seconds,
        say=said.append,
    )


def test_it_goes_on_where_the_last_one_stopped_and_keeps_nothing_of_what_held(tmp_path: Path) -> None:
    old = Span(campaign="quick", first=1, last=40, commit="old")
    Ledger((old,)).write(tmp_path / "ledger.tsv")
    run = soak(tmp_path, campaign())
    run.run()
    assert run.troubles == []
    (before, now) = Ledger.read(tmp_path / "ledger.tsv").spans
    assert before == old
    assert (now.first, now.commit) == (41, "abc")
    assert now.seeds == now.effective == sum(span.seeds for span in run.spans) >= 10
    assert list((tmp_path / "kept").iterdir()) == []


def test_what_failed_is_kept_with_the_command_that_repeats_it_and_stays_open(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign(bad="7", turn_s=1.4))
    run.run()
    ledger = Ledger.read(tmp_path / "ledger.tsv")
    assert ledger.open == (Open(campaign="quick", seed=7, commit="abc", why="two leaders"),)
    assert ledger.spans[0].failed == (7,)
    kept = tmp_path / "kept" / "quick-1"
    assert (kept / "again").read_text() == "# on abc\nagain --seed 7\n"
    assert (kept / "log").read_text() == "begun\n"
    assert json.loads((kept / "result.json").read_text()) == {"failed": {"7": "two leaders"}}


def test_campaigns_take_turns_and_the_simulation_runs_beside_them(tmp_path: Path) -> None:
    run = soak(
        tmp_path,
        campaign("one", turn_s=0.1),
        campaign("two", turn_s=0.1),
        campaign("beside", turn_s=0.1, beside=True),
        seconds=2.0,
    )
    run.run()
    tried = {span.campaign for span in Ledger.read(tmp_path / "ledger.tsv").spans}
    assert tried == {"one", "two", "beside"}


def test_a_campaign_without_a_result_gets_no_further_turn_and_is_told(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign("dumb", bad="none at all"), campaign("quick"))
    run.run()
    (trouble,) = run.troubles
    assert trouble.startswith("dumb: seed 1 exited with 0 and left no result")
    assert {span.campaign for span in run.spans} == {"quick"}
    assert (tmp_path / "kept" / "dumb-1" / "log").exists()


def test_interrupted_it_ends_its_turn_and_counts_it_for_nothing(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign(seconds=1000.0), seconds=1000.0)
    going = threading.Thread(target=run.run)
    going.start()
    log = tmp_path / "kept" / "quick-1" / "log"
    while not (log.exists() and log.read_text()):
        going.join(0.01)
    run.stop.set()
    going.join(60.0)
    assert not going.is_alive()
    assert run.spans == []
    assert run.troubles == []
    assert Ledger.read(tmp_path / "ledger.tsv") == Ledger()


def test_a_turn_that_hangs_is_ended_and_is_trouble(tmp_path: Path) -> None:
    run = soak(tmp_path, campaign(seconds=1000.0, turn_s=0.1))
    run.run()
    (trouble,) = run.troubles
    assert "left no result" in trouble


def test_a_seed_of_the_simulation_that_holds_again_is_closed_and_nothing_else() -> None:
    opened = tuple(
        Open(campaign=name, seed=seed, commit="abc", why="two leaders")
        for name, seed in (("simulation", 1), ("simulation", 2), ("chaos", 2))
    )
    left = mended(Ledger((), opened), lambda seed: seed == 2)
    assert [(one.campaign, one.seed) for one in left.open] == [("simulation", 1), ("chaos", 2)]


def test_the_table_has_a_line_a_campaign() -> None:
    spans = [
        Span(campaign="simulation", first=1, last=100, commit="a", effective=10, hours=1.0, failed=(3,)),
        Span(campaign="simulation", first=101, last=200, commit="b", effective=5, hours=0.5),
        Span(campaign="chaos", first=1, last=1, commit="b", effective=50, hours=0.1),
    ]
    assert table(spans).splitlines() == [
        "campaign        seeds  effective faults    hours  failed",
        "chaos               1                50      0.1       0",
        "simulation        200                15      1.5       1",
    ]


def test_what_the_campaigns_write_is_understood(tmp_path: Path) -> None:
    turn = Turn(first=5, seeds=2, json=tmp_path / "x.json", folder=tmp_path)
    simulation = {
        "seeds": 2,
        "failed": {"6": ["two leaders"]},
        "effective": {"a": 3, "b": 4},
        "virtual_s": 3600,
    }
    assert campaigns.SIMULATION.outcome(simulation, turn) == Outcome(7, 1.0, {6: "two leaders"})
    with pytest.raises(ValueError, match="1 of 2 seeds ran"):
        campaigns.SIMULATION.outcome(simulation | {"seeds": 1}, turn)
    schedules = {"failed": {"5": ["a", "b"]}, "deeds": {"kill_rank": 2}, "took_s": 1800}
    assert campaigns.SCHEDULES.outcome(schedules, turn) == Outcome(2, 0.5, {5: "a; b"})
    assert campaigns.CRASHES.outcome({"wrong": [], "kills": 9, "seconds": 3600}, turn) == Outcome(9, 1.0, {})
    chaos = {"faults": [{"effective": 3}], "verdict": "pass", "duration_s": 360, "cut_short": False}
    assert campaigns.CHAOS.outcome(chaos, turn) == Outcome(3, 0.1, {})
    broken = chaos | {"verdict": "violation", "sentence": "VIOLATION: 1 found"}
    assert campaigns.CHAOS.outcome(broken, turn) == Outcome(3, 0.1, {5: "VIOLATION: 1 found"})
    with pytest.raises(ValueError, match="cut short"):
        campaigns.CHAOS.outcome(chaos | {"cut_short": True}, turn)
