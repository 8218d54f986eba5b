from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from strata_chaos.exits import Exit
from strata_chaos.faults.record import Injury
from strata_chaos.faults.schedule import PlannedFault
from strata_chaos.judgement import report
from strata_chaos.judgement.judge import RuleCoverage
from strata_chaos.judgement.report import Result, Spread
from strata_chaos.judgement.verdict import Finding
from strata_chaos.run import rounds, runner

FOUND = Finding(checker="leadership/fenced", message="a write without its fence", evidence=("x.jsonl:3: {}",))


def injury(
    fault: str = "kill-leader",
    *,
    number: int = 1,
    required: bool = True,
    effective: bool = True,
    leader_s: float | None = None,
    barrier_s: float | None = None,
    healed: bool = False,
) -> Injury:
    planned = PlannedFault(number=number, fault=fault, at_s=1.0, hold_s=2.0, choice=7, required=required)
    return Injury(
        planned=planned,
        targets=("coordinator-1",),
        injected=True,
        effective=effective,
        evidence="it was ended by SIGKILL" if effective else "it lives",
        held_s=2.01,
        leader_s=leader_s,
        barrier_s=barrier_s,
        barrier_needed_healing=healed,
    )


def result(
    *injuries: Injury,
    findings: tuple[Finding, ...] = (),
    broken: str = "",
    cut_short: bool = False,
    uncertainties: tuple[str, ...] = (),
    seed: int = 3,
) -> Result:
    return Result(
        scenario="smoke",
        seed=seed,
        duration_s=120,
        backend="netns",
        folder=Path("runs/smoke-3"),
        injuries=injuries,
        findings=findings,
        operations={"barrier": {"ok": 40, "unknown": 2}},
        rules=(
            RuleCoverage(checker="barriers", rule="once", promise="p", judged=12, broken=0),
            RuleCoverage(checker="watches", rule="exact", promise="p", judged=0, broken=0),
        ),
        uncertainties=uncertainties,
        broken=broken,
        cut_short=cut_short,
    )


@pytest.mark.parametrize(
    ("found", "verdict", "printed"),
    [
        (result(injury()), Exit.PASS, "PASS"),
        (result(injury(), findings=(FOUND,), broken="b", cut_short=True), Exit.VIOLATION, "1 found"),
        (result(injury(effective=False), broken="etcd is gone\nlog"), Exit.INFRASTRUCTURE, "etcd is gone"),
        (result(injury(effective=False)), Exit.UNKNOWN, r"without effect: kill-leader \(1\)"),
        (result(injury(effective=False, required=False)), Exit.PASS, "PASS"),
        (result(injury(), cut_short=True), Exit.UNKNOWN, "cut short"),
        (result(injury(), uncertainties=("etcd's events have a gap",)), Exit.UNKNOWN, "gap"),
    ],
)
def test_the_verdict(found: Result, verdict: Exit, printed: str) -> None:
    assert found.exit is verdict
    assert re.search(printed, found.verdict)
    assert "\n" not in found.verdict


def test_the_text_report_shows_verdict_faults_latencies_and_commands() -> None:
    text = report.text(
        result(
            injury(leader_s=0.05, barrier_s=0.2),
            injury(number=2, leader_s=5.5, barrier_s=0.4),
            injury("kill-etcd-majority", number=3, barrier_s=1.25, healed=True),
            injury("freeze-rank", number=4, effective=False, required=False),
            findings=(FOUND,),
        )
    )

    assert text.startswith("VIOLATION: 1 found\n")
    assert "4 faults injected, 3 effective" in text
    (row,) = [line.split() for line in text.splitlines() if line.startswith("kill-leader ")]
    assert row == ["kill-leader", "2", "2", "2.77", "/", "5.50", "0.30", "/", "0.40", "-", "-"]
    (row,) = [line.split() for line in text.splitlines() if line.startswith("kill-etcd-majority ")]
    assert row == ["kill-etcd-majority", "1", "1", "-", "-", "1.25", "/", "1.25", "-"]
    assert "VIOLATION (leadership/fenced): a write without its fence\n    x.jsonl:3: {}" in text
    assert "4 freeze-rank: it lives" in text
    assert re.search(r"barriers/once +12 +0\n", text)
    assert "nothing to judge for: watches/exact" in text
    assert "again   strata-chaos run --scenario smoke --seed 3 --duration 120 --backend netns" in text
    assert "judge   strata-chaos check runs/smoke-3" in text


def test_the_json_report_holds_the_same_data_and_can_be_read_back() -> None:
    found = result(injury(leader_s=0.05), injury(number=2, effective=False), findings=(FOUND,))

    body = json.loads(json.dumps(report.body(found)))

    assert body["verdict"] == "violation"
    assert body["exit_code"] == 1
    assert body["faults"][0]["injected"] == 2
    assert body["faults"][0]["effective"] == 1
    assert body["faults"][0]["leader"] == {"p50_s": 0.05, "max_s": 0.05, "count": 1}
    assert body["findings"] == [FOUND.as_json()]
    assert [Injury.from_json(one) for one in body["injuries"]] == list(found.injuries)


def test_spreads() -> None:
    assert Spread.of([None, None]) is None
    assert str(Spread.of([1.0, None, 3.0, 20.0])) == "3.00 / 20.0"


def test_a_summary_adds_up_all_runs() -> None:
    runs = [result(injury(), seed=1), result(injury(), injury(number=2), findings=(FOUND,), seed=2)]

    text, body = rounds.text(runs), rounds.body(runs)

    assert text.startswith("1 PASS, 1 VIOLATION\n2 runs, 4 minutes, 3 faults injected, 3 effective\n")
    assert "seed 2: VIOLATION (leadership/fenced)" in text
    assert body["exit_code"] == 1
    assert body["operations"] == {"barrier": {"ok": 80, "unknown": 4}}
    assert [run["seed"] for run in body["runs"]] == [1, 2]


def test_the_worst_result_of_all_runs_sets_the_exit_code() -> None:
    good, unknown = result(injury()), result(injury(), cut_short=True)
    broken, bad = result(broken="b"), result(findings=(FOUND,))

    assert rounds.worst([good]) is Exit.PASS
    assert rounds.worst([good, unknown]) is Exit.UNKNOWN
    assert rounds.worst([unknown, broken]) is Exit.INFRASTRUCTURE
    assert rounds.worst([broken, bad, good]) is Exit.VIOLATION


def test_the_report_repeats_a_custom_scenario_by_its_path() -> None:
    own = replace(result(), scenario="mine", scenario_argument="/runs of ours/mine.toml")

    assert "again   strata-chaos run --scenario '/runs of ours/mine.toml' --seed 3" in report.text(own)


def test_only_client_calls_count_as_operations() -> None:
    theirs = {("barrier", "ok"): 3, ("member.leave", "ok"): 1}
    ours = {
        ("run.phase", "ok"): 4,
        ("job.placed", "ok"): 2,
        ("fault.inject", "ok"): 1,
        ("fault.heal", "ok"): 1,
    }

    assert runner.by_operation(theirs | ours) == {"barrier": {"ok": 3}, "member.leave": {"ok": 1}}
