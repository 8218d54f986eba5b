"""The verdict: the reasons for "unknown", the counts, and little memory for a long run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from strata_chaos.judgement.judge import Result, judge
from tests.unit.chaos.story import Story, good_run

LONG_RUN = """
import resource, sys
from pathlib import Path
from strata_chaos.judgement.judge import judge
from tests.unit.chaos.story import long_run
folder = Path(sys.argv[1])
lines = long_run(folder, rounds=int(sys.argv[2]))
before = resource.getrusage(resource.RUSAGE_SELF)
verdict = judge(folder)
after = resource.getrusage(resource.RUSAGE_SELF)
assert verdict.result == "pass", verdict.summary()
assert verdict.lines == lines, (verdict.lines, lines)
grown = 1024 * (after.ru_maxrss - before.ru_maxrss)
print(verdict.lines, after.ru_utime - before.ru_utime, grown)
"""


def test_the_verdict_is_unknown_without_an_observer(tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    del story.files["observer"]
    story.drop(lambda line: line["op"] != "member.alive")
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.UNKNOWN
    assert verdict.uncertainties == ("no observer recorded etcd's changes",)


def test_a_gap_in_the_ground_truth_makes_the_verdict_unknown(tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    story.line("observer", 1, "observer.gap", args={"after": story.revision})
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.UNKNOWN
    assert "gap after revision" in verdict.uncertainties[0]


@pytest.mark.parametrize("complete", [None, False])
def test_a_ground_truth_that_ends_early_makes_the_verdict_unknown(
    complete: bool | None, tmp_path: Path
) -> None:
    """The observer was killed, or did not catch up."""
    run = good_run(tmp_path / "storage").write(tmp_path)
    lines = (run / "observer.jsonl").read_text().splitlines(keepends=True)
    last = [] if complete is None else [lines[-1].replace("true", "false")]
    (run / "observer.jsonl").write_text("".join([*lines[:-1], *last]))
    verdict = judge(run)
    assert verdict.result is Result.UNKNOWN
    assert "the observer did not catch up with etcd before it ended" in verdict.uncertainties


def test_a_torn_line_of_a_client_is_reported_and_ignored(tmp_path: Path) -> None:
    run = good_run(tmp_path / "storage").write(tmp_path)
    with (run / "c.w0-10.jsonl").open("a") as file:
        file.write('{"v":1,')
    verdict = judge(run)
    assert verdict.result is Result.PASS
    assert [torn.split(":")[0] for torn in verdict.torn] == ["c.w0-10.jsonl"]


def test_a_file_that_is_not_a_history_makes_the_verdict_unknown(tmp_path: Path) -> None:
    run = good_run(tmp_path / "storage").write(tmp_path)
    (run / "other.jsonl").write_text('{"hello": "world"}\n')
    verdict = judge(run)
    assert verdict.result is Result.UNKNOWN
    assert "other.jsonl:1" in verdict.uncertainties[0]


def test_a_line_that_lacks_required_fields_makes_the_verdict_unknown(tmp_path: Path) -> None:
    run = good_run(tmp_path / "storage").write(tmp_path)
    line = '{"v":1,"client":"x","process":1,"op":"process.ended","t0":1,"t1":2,"args":{},"outcome":"ok","result":{}}'
    (run / "other.jsonl").write_text(f"{line}\n")
    verdict = judge(run)
    assert verdict.result is Result.UNKNOWN
    assert verdict.uncertainties[0].startswith("other.jsonl:1: ")


def test_a_violation_beside_an_observer_gap_is_reported_as_unproven(tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    story.txn(("/strata/v1/default/leader", {"instance": "C"}))
    story.line("observer", 1, "observer.gap", args={"after": story.revision})
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.UNKNOWN
    assert verdict.violations == ()
    assert any(reason.startswith("unproven: leadership/one-instance: ") for reason in verdict.uncertainties)


def test_an_operation_without_an_end_counts_as_unknown(tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    before = judge(story.write(tmp_path)).operations
    args = {"job": "j", "worker": "w1", "generation": 2, "rank": 1, "name": "all", "ranks": [0, 1]}
    story.line("c.w1", 12, "barrier", args={**args, "payload": "AAAA"}, begun="never-ended")
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS
    assert verdict.operations["barrier", "unknown"] == 1
    assert ("barrier", "unknown") not in before
    assert verdict.operations["barrier", "ok"] == before["barrier", "ok"] == 4


@pytest.mark.parametrize("outcome", ["unknown", "fail"])
def test_an_operation_without_a_known_outcome_may_have_taken_effect(outcome: str, tmp_path: Path) -> None:
    """A barrier and a save end with an error, although they took effect in etcd. An unknown outcome allows that."""
    story = good_run(tmp_path / "storage")
    for op in ("barrier", "checkpoint.save"):
        ended = next(line for line in story.lines(op) if line["outcome"] == "ok")
        ended.update(outcome=outcome, result={}, error={"type": "Unavailable", "message": "late"})
    assert judge(story.write(tmp_path)).result is Result.PASS


def test_a_rule_that_judged_nothing_is_named(tmp_path: Path) -> None:
    story = Story()
    story.txn(("/strata/v1/default/leader", {"instance": "A"}))
    story.line("c", 2, "member.alive", args={"worker": "w"})
    verdict = judge(story.write(tmp_path))
    assert verdict.result is Result.PASS
    assert "barriers/once" in verdict.unjudged
    assert "leadership/one-instance" not in verdict.unjudged
    assert "judged nothing: " in verdict.summary()


def test_a_long_run_is_judged_in_little_memory(tmp_path: Path) -> None:
    """This run has a hundred thousand lines; docs/chaos/checkers.md has the numbers for a million."""
    done = subprocess.run(
        [sys.executable, "-c", LONG_RUN, str(tmp_path), "15000"], check=True, capture_output=True, text=True
    )
    lines, seconds, grown = map(float, done.stdout.split())
    assert lines > 100_000
    assert lines / seconds > 5_000, "processor time, so that a busy machine does not count"
    assert grown / lines < 600, "bytes a line"


def test_evidence_is_quoted_and_a_long_line_is_cut(tmp_path: Path) -> None:
    story = good_run(tmp_path / "storage")
    story.txn(("/strata/v1/default/leader", {"instance": "C" * 5000}))
    verdict = judge(story.write(tmp_path))
    (evidence,) = next(v.evidence for v in verdict.violations if v.rule == "one-instance")
    assert evidence.startswith("observer.jsonl:")
    assert "CCC" in evidence
    assert len(evidence) < 1_100
