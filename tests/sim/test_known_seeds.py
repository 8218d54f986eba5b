"""Seeds by name: those that planted faults are caught by (tests/planted), and two more."""

from __future__ import annotations

import pytest

from tests.sim.run import run_seed

SEEDS = (1, 2, 1006)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_known_seed_breaks_no_promise(seed: int) -> None:
    assert run_seed(seed).violations == []
