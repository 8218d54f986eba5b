"""A simulated training is slow or hangs: the ranks and causes that a replica names, compared with the injected fault.

`pytest tests/sim/attribution/test_attribution.py -m slow --junitxml=FILE` writes the table into FILE.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.sim.attribution.trials import CAUSES, PLAN, Verdict, faulted, table, undisturbed
from tests.sim.seeds.batch import pool

PROCESSES = 2
QUIET = ("undisturbed", "all slow")
SMALL = 16
"""Largest number of ranks in the worlds of the quick tests."""


@pytest.mark.parametrize("kind", CAUSES)
def test_a_fault_is_named_with_its_rank_and_cause(kind: str) -> None:
    verdict = faulted(1, kind, most=SMALL)
    assert verdict.right_cause, verdict


@pytest.mark.parametrize("kind", QUIET)
def test_no_rank_is_blamed_without_a_fault_of_its_own(kind: str) -> None:
    assert undisturbed(1, kind, most=SMALL) == ()


@pytest.mark.parametrize("kind", ["stuck on disk", "deadlock", "stuck in save"])
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_that_takes_long_to_write_its_stacks_is_not_named_as_silent(seed: int, kind: str) -> None:
    verdict = faulted(seed, kind, most=SMALL, dump_s=2.5)
    assert (verdict.cause, verdict.innocent) == (CAUSES[kind], ()), verdict


@pytest.mark.slow
def test_nearly_all_of_200_faults_get_the_right_rank_cause_and_time(
    record_property: Callable[[str, object], None],
) -> None:
    trials = [(seed, kind) for kind, count in PLAN.items() for seed in range(count)]
    assert len(trials) == 200
    with pool(PROCESSES, give_way=False) as processes:
        verdicts: list[Verdict] = list(processes.map(faulted, *zip(*trials, strict=True)))
    record_property("faults", table(verdicts))
    wrong = [each for each in verdicts if not (each.right_cause and each.in_time)]
    assert sum(each.right_ranks for each in verdicts) >= 0.95 * len(verdicts), wrong
    assert sum(each.right_cause for each in verdicts) >= 0.90 * len(verdicts), wrong
    assert sum(each.in_time for each in verdicts) >= 0.95 * len(verdicts), wrong


@pytest.mark.slow
def test_at_most_one_of_120_intervals_without_a_rank_fault_blames_a_rank(
    record_property: Callable[[str, object], None],
) -> None:
    trials = [(seed, kind) for kind in QUIET for seed in range(60)]
    with pool(PROCESSES, give_way=False) as processes:
        found = list(processes.map(undisturbed, *zip(*trials, strict=True)))
    blamed = {trial: sentences for trial, sentences in zip(trials, found, strict=True) if sentences}
    record_property("blamed for nothing", str(blamed))
    assert len(blamed) <= 1, blamed
