"""A thousand seeds of the whole control plane, on two processes.

A seed that fails is run again, with all that happened in it, by `python -m tests.sim --seed N --trace`.
SIM_SEEDS takes another number of them, SIM_BUDGET_S other seconds for all of them together.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import SHOWN
from tests.sim.batch import Summary
from tests.sim.conftest import BUDGET_S, LIMIT_S, SEEDS, Running
from tests.sim.run import LEAST_EFFECTIVE, RUN_S

BLOCKS = 20
ENOUGH = 300
"""From so many seeds on, every class of faults must have taken effect."""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_seed_breaks_a_promise(block: int, running: Running) -> None:
    failed: list[str] = []
    for seed in range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS):
        result = running.result(seed)
        if result is None:
            assert not failed, "\n".join(failed)
            pytest.skip(late(seed))
        assert result.virtual_s >= RUN_S
        assert result.faults.total() >= LEAST_EFFECTIVE
        failed += [f"seed {seed}: {wrong}" for wrong in result.violations[:2]]
    assert not failed, "\n".join([*failed, "again: python -m tests.sim --seed N --trace"])


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_every_class_of_faults_took_effect(
    running: Running, record_property: Callable[[str, object], None]
) -> None:
    total = Summary()
    for seed in range(SEEDS):
        result = running.result(seed)
        if result is None:
            break
        total.add(result)
    record_property(SHOWN, f"simulation: {total.text()}")  # the coverage is to be seen in every run
    if total.seeds < ENOUGH:
        pytest.skip(f"{total.seeds} seeds are too few for every class of faults")
    assert total.never() == []


def late(seed: int) -> str:
    """Return why a seed has no result."""
    return (
        f"this machine did not reach seed {seed} within {BUDGET_S:g} s (SIM_BUDGET_S); "
        f"python -m tests.sim --first {seed} --seeds {SEEDS - seed} runs the rest"
    )
