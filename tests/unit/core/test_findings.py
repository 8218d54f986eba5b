"""What is wrong with a job, in a sentence."""

from __future__ import annotations

from dataclasses import replace

from strata.core.findings import RankReport, diagnose
from strata.core.save_hold import SaveHold


def word(
    rank: int, step: int = 8, phase: str = "step", stalled_s: float = 0, usual_s: float = 1.0
) -> RankReport:
    return RankReport(
        rank=rank,
        step=step,
        phase=phase,
        age_ms=100,
        stalled_ms=int(stalled_s * 1000),
        median_step_us=int(usual_s * 1e6),
    )


def test_a_healthy_job_has_no_trouble() -> None:
    found = diagnose([word(0), word(1), word(2)], {("w1", 0): ""})
    assert (found.says, found.stalled, found.slow, found.sick) == ("", (), (), ())
    assert diagnose([], {}).says == ""


def test_the_rank_that_holds_up_the_others_is_named() -> None:
    found = diagnose([word(r, stalled_s=42, phase="data" if r == 2 else "step") for r in range(4)], {})
    assert found.suspects == (2,)
    assert found.says == "rank 2 stands still at step 8 (data) for 42 s, and 3 more with it"


def test_many_that_cannot_be_told_apart_are_counted() -> None:
    found = diagnose([word(r, stalled_s=40 + r) for r in range(100)], {})
    assert found.says == "100 ranks stand still at step 8 for 139 s"
    assert len(found.stalled) == 100


def test_held_saves_are_said_first_with_every_host_or_their_number() -> None:
    def held(rank: int, host: str, held_s: float, reason: str = "disk full") -> RankReport:
        return replace(word(rank), hold=SaveHold(step=24, reason=reason, host=host, held_s=held_s))

    found = diagnose([held(0, "a", 10), held(1, "b", 240), word(2, stalled_s=42)], {}, committed_step=20)
    assert found.says == (
        "no checkpoint since step 20, 4 min: disk full on hosts a, b; rank 2 stands still at step 8 (step) for 42 s"
    )
    assert ([each.rank for each in found.held], found.held_s) == ([1, 0], 240)
    many = [held(rank, f"n{rank:02}", 5, "storage answers 503") for rank in range(64)]
    assert diagnose([*many, held(64, "x", 1)], {}).says == (
        "no checkpoint yet, 5 s: disk full on host x; storage answers 503 on hosts n00, n01, n02 and 61 more"
    )


def test_slow_ranks_and_sick_devices_are_named_and_then_counted() -> None:
    words = [word(r, usual_s=3.0 if r < 5 else 1.0) for r in range(16)]
    found = diagnose(words, {("w1", 2): "XID 79: gone", ("w0", 1): ""})
    assert found.says == (
        "rank 0 takes 3.0 times the median for a step; rank 1 takes 3.0 times the median for a step;"
        " rank 2 takes 3.0 times the median for a step; 2 more slow ranks; device 2 of w1: XID 79: gone"
    )
    assert [(sick.worker, sick.index) for sick in found.sick] == [("w1", 2)]
