"""A process counts as frozen only if every sample for `detect_s` shows it stopped, and no sample is late."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata.core.members.rank_liveness import Sampling, StopCount, Verdict

FIVE = Sampling.derive(5.0)


def verdicts(*samples: tuple[float, str], sampling: Sampling = FIVE) -> list[Verdict]:
    count = StopCount(sampling)
    return [count.sample(now_s, state) for now_s, state in samples]


def stopped(begin_s: float, end_s: float, state: str = "T") -> list[tuple[float, str]]:
    """Return samples at four a second, both ends included."""
    return [(begin_s + i / 4, state) for i in range(int((end_s - begin_s) * 4) + 1)]


@pytest.mark.parametrize(
    ("detect_s", "interval_s", "max_gap_s"),
    [(0.5, 0.0625, 0.25), (1.0, 0.125, 0.5), (2.0, 0.25, 1.0), (5.0, 0.25, 1.0), (60.0, 0.25, 1.0)],
)
def test_samples_are_at_most_a_second_apart_and_find_a_freeze_within_a_quarter_of_one(
    detect_s: float, interval_s: float, max_gap_s: float
) -> None:
    sampling = Sampling.derive(detect_s)
    assert (sampling.interval_s, sampling.max_gap_s) == (interval_s, max_gap_s)


def test_a_process_that_is_stopped_for_detect_s_is_frozen() -> None:
    *before, last = verdicts(*stopped(100.0, 105.0))
    assert set(before) == {Verdict.ALIVE}
    assert last is Verdict.FROZEN
    assert FIVE.frozen == "frozen: a signal has stopped its process for 5 s"


def test_a_process_that_resumes_after_4_s_is_alive_and_restarts_the_count() -> None:
    seen = verdicts(*stopped(0.0, 4.75), (5.0, "S"), *stopped(5.25, 10.0), (10.25, "T"))
    assert set(seen[:-1]) == {Verdict.ALIVE}
    assert seen[-1] is Verdict.FROZEN


@pytest.mark.parametrize("state", ["t", "D", "S", "R", "Z", ""])
def test_only_the_stopped_state_counts_as_frozen(state: str) -> None:
    assert set(verdicts(*stopped(0.0, 60.0, state))) == {Verdict.ALIVE}
    assert set(verdicts(*stopped(0.0, 4.75), (5.0, state), *stopped(5.25, 10.0))) == {Verdict.ALIVE}


def test_an_agent_that_did_not_run_for_6_s_restarts_the_count() -> None:
    assert set(verdicts(*stopped(0.0, 4.0), *stopped(10.0, 14.75))) == {Verdict.ALIVE}
    assert verdicts(*stopped(0.0, 4.0), *stopped(10.0, 15.0))[-1] is Verdict.FROZEN


def test_a_process_that_ran_between_two_samples_restarts_the_count() -> None:
    count = StopCount(FIVE)
    seen = [count.sample(now_s, state, switches=int(now_s >= 3.0)) for now_s, state in stopped(0.0, 7.75)]
    assert set(seen) == {Verdict.ALIVE}
    assert count.sample(8.0, "T", switches=1) is Verdict.FROZEN


def test_a_starved_agent_kills_no_process() -> None:
    assert set(verdicts(*((i * 1.25, "T") for i in range(100)))) == {Verdict.ALIVE}


def test_a_process_that_dumps_core_is_dead_at_its_first_sample() -> None:
    assert StopCount(FIVE).sample(0.0, "D", dumps_core=True) is Verdict.DUMPS_CORE


def test_the_sample_that_may_decide_comes_in_time() -> None:
    count = StopCount(FIVE)
    count.sample(0.125, "S")
    assert count.due_s(0.125) == 0.375
    count.sample(0.375, "T")
    assert count.due_s(0.375) == 0.625
    assert count.due_s(5.25) == 5.375


TICK = 1 / 16
"""Seconds; its sums are exact in floating point."""


@given(
    detect_s=st.sampled_from([0.5, 1.0, 2.0, 5.0]),
    runs=st.lists(
        st.tuples(st.sampled_from("TTTTtDSRZ") | st.just(""), st.integers(1, 24), st.integers(1, 40)),
        max_size=12,
    ),
)
def test_frozen_means_stopped_in_every_sample_for_detect_s_without_a_gap(
    detect_s: float, runs: list[tuple[str, int, int]]
) -> None:
    sampling = Sampling.derive(detect_s)
    count = StopCount(sampling)
    seen: list[tuple[float, str]] = [(0.0, "S")]
    for state, ticks, times in runs:
        for _ in range(times):
            now_s = seen[-1][0] + ticks * TICK
            seen.append((now_s, state))
            verdict = count.sample(now_s, state)
            assert (verdict is Verdict.FROZEN) == is_frozen(seen, sampling)
            assert now_s < count.due_s(now_s) <= now_s + sampling.interval_s or verdict is Verdict.FROZEN


def is_frozen(seen: list[tuple[float, str]], sampling: Sampling) -> bool:
    """Return the verdict by the written rule: check the samples of the whole last `detect_s`."""
    end_s = seen[-1][0]
    since = [one for one in seen if one[0] > end_s - sampling.detect_s]
    first = len(seen) - len(since) - 1
    if first < 0:
        return False
    proof = seen[first:]
    gaps = [after - before for (before, _), (after, _) in pairwise(proof)]
    return {state for _, state in proof} == {"T"} and max(gaps) <= sampling.max_gap_s
