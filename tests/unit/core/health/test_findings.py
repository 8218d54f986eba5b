"""Findings about a job's faults: each has one sentence, which every status view shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from strata.core.health.attribution import NO_BLAME, RankReport, blame
from strata.core.health.findings import Device, Diagnosis, Ended, diagnose
from strata.core.health.stragglers import StepTimes
from strata.core.stop.save_hold import SaveHold


def report(
    rank: int, step: int = 8, phase: str = "step", stalled_s: float = 0, usual_s: float = 1.0
) -> RankReport:
    times = StepTimes(
        compute_s=usual_s,
        data_wait_s=0.0,
        median_compute_s=usual_s,
        median_data_wait_s=0.0,
        best_compute_s=1.0,
        cheaper_s=usual_s,
        step=8,
        steady_steps=8,
    )
    return RankReport(
        rank=rank, step=step, phase=phase, age_ms=100, stalled_ms=int(stalled_s * 1000), times=times
    )


def slow(rank: int, *, compute_s: float = 1.0, wait_s: float = 0.0, host: str = "a") -> RankReport:
    times = StepTimes(
        compute_s=compute_s,
        data_wait_s=wait_s,
        median_compute_s=compute_s,
        median_data_wait_s=wait_s,
        cheaper_s=compute_s + wait_s,
        step=8,
        steady_steps=8,
    )
    return RankReport(rank=rank, step=8, phase="step", age_ms=100, times=times, host=host, worker=f"w-{host}")


def only_text(found: Diagnosis) -> str:
    (finding,) = found.findings
    assert found.says == finding.text
    return finding.text


def test_a_healthy_job_has_no_findings() -> None:
    found = diagnose([report(0), report(1), report(2)])
    assert (found.says, found.findings, found.stalled, found.slow, found.sick) == ("", (), (), (), ())
    assert diagnose([]).says == ""


# -- stalled ranks


def test_the_rank_that_holds_up_the_others_is_named() -> None:
    found = diagnose([report(r, stalled_s=42, phase="data" if r == 2 else "step") for r in range(4)])
    assert found.suspects == (2,)
    assert found.says == (
        "rank 2 stands still at step 8 (data) for 42 s, and 3 more with it: waiting for the data loader"
    )
    assert [(each.kind, each.cause, each.ranks, each.since_ms) for each in found.findings] == [
        ("stalled", "data", (2,), 42_000)
    ]
    assert found.of_rank(2) == found.says
    assert found.of_rank(0) == f"waits for others: {found.says}"
    assert found.of_rank(9) == ""


def still(count: int, **more: object) -> list[RankReport]:
    return [replace(report(r, stalled_s=42), **more) for r in range(count)]  # type: ignore[arg-type]  # by name


LOCKS = replace(report(3, stalled_s=42), host="b", activity="code", where="lock (a.py)", trace_file="/t/n_3")


@pytest.mark.parametrize(
    ("ranks", "says"),
    [
        (
            [*still(3, host="a", activity="collective"), LOCKS],
            "rank 3 on host b stands still{}, and 3 more with it: in its own code in lock (a.py); NCCL recorded /t/n_3",
        ),
        (
            [*still(6, host="a"), *(replace(r, host="b", process="stopped") for r in still(8)[6:])],
            "ranks 6-7 on host b stand still{}, and 6 more with them: stopped by a signal",
        ),
        ([report(r, stalled_s=40 + r) for r in range(100)], "100 ranks stand still at step 8 for 139 s"),
        (
            still(9, activity="collective", where="all_reduce (x.py)"),
            "9 ranks stand still at step 8 for 42 s: waiting for other ranks in all_reduce (x.py)",
        ),
    ],
    ids=["host, cause, function, recording", "of one host with one cause", "many", "many in one function"],
)
def test_the_sentence_of_a_stall(ranks: list[RankReport], says: str) -> None:
    found = diagnose(ranks)
    assert only_text(found) == says.format(" at step 8 (step) for 42 s")
    assert len(found.stalled) == len(ranks)


# -- late ranks, before the stall limit


def late(rank: int, activity: str = "collective", **more: object) -> RankReport:
    found = RankReport(
        rank=rank, step=8, phase="step", age_ms=3_000, late_ms=3_000, usual_ms=500, activity=activity
    )
    return replace(found, **more)  # type: ignore[arg-type]  # fields by name


def test_a_rank_that_others_wait_for_is_named_before_that_is_a_stall() -> None:
    found = diagnose([late(r, "data" if r == 2 else "collective") for r in range(4)])
    assert found.says.startswith(
        "rank 2 stands still at step 8 (step) for 3 s, and 3 more with it: waiting for the data"
    )
    assert not found.stalled
    assert not found.suspects, "and nobody is evicted for it"
    assert found.held_up == (0, 1, 3)


@pytest.mark.parametrize(
    "ranks",
    [
        [late(r, "code") for r in range(4)],
        [late(r) for r in range(4)],
        [late(r, "" if r == 2 else "collective") for r in range(4)],
        [late(0, "code"), late(1), *(report(r) for r in range(2, 6))],
        [late(r, "collective" if r == 2 else "code") for r in range(4)],
    ],
    ids=[
        "all do the same: an evaluation perhaps",
        "all wait: none is known to hold them up",
        "what it does is unknown",
        "most ranks train on",
        "more are to blame than wait",
    ],
)
def test_no_rank_is_blamed_early_without_evidence(ranks: list[RankReport]) -> None:
    assert not diagnose(ranks).findings


def test_a_rank_whose_agent_stops_reporting_is_silent() -> None:
    def ranks(age_ms: int) -> list[RankReport]:
        silent = late(2, "", late_ms=0, age_ms=age_ms, host="b")
        return [silent if r == 2 else late(r, age_ms=age_ms) for r in range(4)]

    assert not diagnose(ranks(3_000)).findings, "its agent may be about to"
    assert (
        "on host b stands still at step 8 (step) for 5 s, and 3 more with it: its agent reports nothing"
        in (diagnose(ranks(4_600)).says)
    )


def test_a_late_rank_without_a_stack_yet_is_neither_silent_nor_blamed() -> None:
    def ranks(activity: str, where: str, *, phase: str = "step") -> list[RankReport]:
        requested = late(2, activity, where=where, age_ms=4_600, host="b", phase=phase)
        return [requested if r == 2 else late(r, age_ms=4_600, phase=phase) for r in range(4)]

    assert not diagnose(ranks("", "")).findings, "its agent has a word of it, so it is not silent"
    assert not diagnose(ranks("", "", phase="save")).findings, (
        "in what everybody does nobody is blamed for it"
    )
    assert diagnose(ranks("data", "read (loader.py)")).held_up == (0, 1, 3)


# -- slow ranks


@pytest.mark.parametrize(
    ("slow_ones", "devices", "cause", "says"),
    [
        (
            [slow(5, compute_s=2.0, host="b")],
            [],
            "compute",
            "rank 5 on host b takes 2.0 times{}: slow compute",
        ),
        (
            [slow(5, wait_s=0.9, host="b")],
            [],
            "data",
            "rank 5 on host b takes 1.9 times{}: slow data loading, 900 ms more a step",
        ),
        (
            [slow(r, compute_s=2.0, host="b") for r in (5, 6, 7)],
            [],
            "host",
            "ranks 5-7 on host b take 2.0 times{}: all ranks of the host are slow",
        ),
        (
            [replace(slow(5, compute_s=2.0, host="b"), throttled=(1, "hot"))],
            [Device(worker="w-b", index=1, throttled="hot", host="b")],
            "device",
            "rank 5 on host b takes 2.0 times{}: device 1 is throttled (hot)",
        ),
    ],
)
def test_the_cause_of_a_slow_rank_is_distinguished(
    slow_ones: list[RankReport], devices: list[Device], cause: str, says: str
) -> None:
    found = diagnose([*(slow(r) for r in range(5)), *slow_ones], devices)
    assert only_text(found) == says.format(" the median for a step")
    assert (found.findings[0].cause, found.findings[0].device) == (cause, 1 if devices else None)


def test_slow_ranks_and_sick_devices_are_named_and_then_counted() -> None:
    words = [report(r, usual_s=3.0 if r < 5 else 1.0) for r in range(16)]
    devices = [
        Device(worker="w1", index=2, fault="XID 79: gone"),
        Device(worker="w0", index=1, throttled="power brake", host="h"),
    ]
    found = diagnose(words, devices)
    assert found.says == (
        "rank 0 takes 3.0 times the median for a step: slow compute;"
        " rank 1 takes 3.0 times the median for a step: slow compute;"
        " rank 2 takes 3.0 times the median for a step: slow compute; 2 more groups of slow ranks;"
        " device 1 of w0 on host h is throttled (power brake); device 2 of w1: XID 79: gone"
    )
    assert [(sick.worker, sick.index) for sick in found.sick] == [("w1", 2)]
    assert found.scores[0].relative == found.scores[0].own == 1 / 3


# -- other findings


def test_a_rank_that_waits_for_a_moving_rank_is_not_blamed() -> None:
    """Rank 0 evaluates for a long time, with steady progress; the others wait for it."""
    moves = RankReport(rank=0, step=7, phase="eval 3/10", age_ms=100)
    waiting = [replace(report(rank, stalled_s=60), waits=True) for rank in (1, 2, 3)]
    assert blame([moves, *waiting]) == NO_BLAME
    assert set(blame(waiting).ranks) == {1, 2, 3}, "all wait for each other"


def test_a_rank_that_waits_for_an_ended_rank_is_not_blamed() -> None:
    ended = [Ended(rank=2, worker="w", host="b", reason="exit code 1")]
    found = diagnose([late(r) for r in range(4)], ended=ended)
    assert only_text(found) == "rank 2 on host b has ended: exit code 1"
    assert found.of_rank(0) == "waits for others: rank 2 on host b has ended: exit code 1"
    lost = [Ended(rank=r, worker="w", host="", reason="its node w is gone", lost=True) for r in (2, 3)]
    assert only_text(diagnose([report(0)], ended=lost)) == "ranks 2-3 have ended: its node w is gone"


def test_held_saves_are_reported_first_with_their_hosts_or_the_number_of_hosts() -> None:
    def held(rank: int, host: str, held_s: float, reason: str = "disk full") -> RankReport:
        return replace(report(rank), hold=SaveHold(step=24, reason=reason, host=host, held_s=held_s))

    found = diagnose([held(0, "a", 10), held(1, "b", 240), report(2, stalled_s=42)], committed_step=20)
    assert found.says == (
        "no checkpoint since step 20, 4 min: disk full on hosts a, b; rank 2 stands still at step 8 (step) for 42 s"
    )
    assert ([each.rank for each in found.held], found.held_s) == ([1, 0], 240)
    many = [held(rank, f"n{rank:02}", 5, "storage answers 503") for rank in range(64)]
    assert diagnose([*many, held(64, "x", 1)]).says == (
        "no checkpoint yet, 5 s: disk full on host x; storage answers 503 on hosts n00, n01, n02 and 61 more"
    )


def test_an_invariant_violation_is_a_finding() -> None:
    assert only_text(diagnose([], (), ["two worlds"])) == "its keys are inconsistent: two worlds"


def test_a_finding_stays_the_same_while_it_grows_older() -> None:
    keys = {
        diagnose([report(r, stalled_s=s, phase="data" if r == 2 else "step") for r in range(4)])
        .findings[0]
        .key
        for s in (42, 43)
    }
    assert len(keys) == 1
