"""A thousand seeds of the whole control plane, on two processes.

A seed that fails is run again, with all that happened in it, by `python -m tests.sim --seed N --trace`.
SIM_SEEDS takes another number of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import SHOWN
from tests.sim.batch import Summary
from tests.sim.conftest import LIMIT_S, SEEDS, Running
from tests.sim.run import LEAST_EFFECTIVE, RUN_S

BLOCKS = 20


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_no_seed_breaks_a_promise(block: int, running: Running) -> None:
    failed = []
    for seed in range(block * SEEDS // BLOCKS, (block + 1) * SEEDS // BLOCKS):
        result = running.result(seed)
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
        total.add(running.result(seed))
    record_property(SHOWN, f"simulation: {total.text()}")  # the coverage is to be seen in every run
    assert total.never() == []
