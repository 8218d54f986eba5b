from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata_chaos.history import Failure, HistoryWriter, Outcome, Record
from strata_chaos.judgement import expectations
from strata_chaos.scenario import Expectations

ALL = Expectations(no_member_dies=True, no_new_generation=True, no_barrier_fails=True, no_save_fails=True)
J = "/strata/v1/default/jobs/b-1"


def line(
    client: str,
    op: str,
    t0: float,
    *,
    args: object = None,
    result: object = None,
    error: Failure | None = None,
    begun: str = "",
    ended: str = "",
) -> Record:
    """Return one line. The two lines of an announced operation have the same id, one as `begun` and one as `ended`."""
    return Record(
        client=client,
        process=1,
        id=begun or ended,
        op=op,
        t0=t0,
        t1=None if begun else t0,
        outcome=Outcome.OK if error is None and not begun else Outcome.UNKNOWN,
        args=args or {},  # type: ignore[arg-type]
        result=result or {},  # type: ignore[arg-type]
        error=error,
    )


def event(t0: float, key: str, value: object = None) -> Record:
    """Return an event of etcd as the observer writes it; without a value, a deletion."""
    result = {
        "revision": int(t0 * 10),
        "key": key,
        "type": "delete" if value is None else "put",
        "value": None if value is None else json.dumps(value),
        "prev": None,
        "lease": 0,
    }
    return line("observer", "etcd.event", t0, result=result)


def judged(folder: Path, *events: Record, expect: Expectations = ALL, end_s: float = 20.0) -> list[str]:
    with HistoryWriter(folder / "nemesis.jsonl") as writer:
        writer.write(line("nemesis", "run.phase", 10.0, args={"phase": "faults"}))
        writer.write(line("nemesis", "run.phase", end_s, args={"phase": "end"}))
    with HistoryWriter(folder / "observer.jsonl") as writer:
        writer.write(*events)
    return [finding.message for finding in expectations.judge(folder, expect)]


DEATH = event(15.0, f"{J}/workers/w-1")
WORLD = event(15.0, f"{J}/world", {"generation": 3, "reason": "w-1 died"})
BROKEN = event(15.0, f"{J}/barriers/all/1/4/outcome", {"result": "broken", "reason": "w-1 died"})
SLOT = f"{J}/checkpoints/000000000120/000000000002"
ABORTED = event(15.0, SLOT, {"state": "aborted", "reason": "rank 1 did not upload in time"})
UNSAVED = line(
    "w-1",
    "checkpoint.save",
    15.0,
    args={"job": "b-1", "step": 120, "rank": 1},
    error=Failure(type="Unavailable", message="no coordinator answers"),
)


def test_each_violated_expectation_is_a_finding_with_its_line(tmp_path: Path) -> None:
    assert judged(tmp_path, DEATH, WORLD, BROKEN, ABORTED, UNSAVED) == [
        "no_member_dies: member w-1 of job b-1 was deleted at revision 150",
        "no_new_generation: job b-1 began generation 3: w-1 died",
        "no_barrier_fails: barrier all of job b-1 was not released: w-1 died",
        "no_save_fails: the checkpoint of step 120 of job b-1 was aborted: rank 1 did not upload in time",
        "no_save_fails: the save of step 120 by rank 1 of job b-1 ended in Unavailable: no coordinator answers",
    ]
    (first, *_) = expectations.judge(tmp_path, ALL)
    assert first.evidence == ("observer.jsonl:1",)


@pytest.mark.parametrize("expect", [Expectations(), Expectations(no_barrier_fails=True)])
def test_events_without_an_expectation_are_not_checked(tmp_path: Path, expect: Expectations) -> None:
    assert not judged(tmp_path, DEATH, WORLD, ABORTED, UNSAVED, expect=expect)


def test_a_save_that_ends_without_a_commit_counts_as_failed(tmp_path: Path) -> None:
    args = {"job": "b-1", "step": 120, "rank": 1}
    (finding,) = judged(
        tmp_path, line("w-1", "checkpoint.save", 15.0, args=args, result={"committed": False})
    )
    assert finding == "no_save_fails: the save of step 120 by rank 1 of job b-1 ended without a commit"


def test_a_save_that_never_ends_counts_as_failed(tmp_path: Path) -> None:
    args = {"job": "b-1", "step": 120, "rank": 1}
    saves = [
        line("w-1", "checkpoint.save", 12.0, args=args, begun="w-1.1"),
        line("w-1", "checkpoint.save", 13.0, args=args, result={"committed": True}, ended="w-1.1"),
        line("w-1", "checkpoint.save", 14.0, args=args, begun="w-1.2"),
        line("w-1", "checkpoint.save", 30.0, args=args, begun="w-1.3"),
        line("w-1", "checkpoint.save", 51.0, args=args, result={"committed": False}, ended="w-1.2"),
    ]
    (finding,) = judged(tmp_path, *saves, end_s=50.0)
    assert finding == "no_save_fails: the save of step 120 by rank 1 of job b-1 had not ended after 36 s"


def test_expectations_judge_only_the_period_of_the_faults(tmp_path: Path) -> None:
    """Members join before the first fault and leave after the last one."""
    early = [event(5.0, f"{J}/workers/founder"), event(5.0, f"{J}/world", {"generation": 1})]

    assert not judged(tmp_path, *early, event(21.0, f"{J}/workers/w-1"))


def test_normal_events_violate_no_expectation(tmp_path: Path) -> None:
    assert not judged(
        tmp_path,
        event(
            15.0, f"{J}/workers/w-1", {"boot": "b"}
        ),  # the member's hand-over to another replica (PROTOCOLS 5.2)
        event(15.1, f"{J}/barriers/all/1/4/outcome", {"result": "released"}),
        event(15.2, f"{J}/barriers/all/1/4/outcome"),  # the outcome is removed
        event(15.3, f"{J}/barriers/short-deadline/1/4/outcome", {"result": "timed_out"}),
        event(15.3, SLOT, {"state": "committed", "reason": ""}),
        line("w-1", "checkpoint.save", 15.3, args={"step": 120}, result={"committed": True}),
        event(15.4, f"{J}/worlds/1/2/members/0"),
        event(15.5, "/strata/v1/default/leader"),
    )
