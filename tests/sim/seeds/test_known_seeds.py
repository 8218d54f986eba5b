"""Known seeds: some show planted faults (tests/planted), others once found a fault."""

from __future__ import annotations

import pytest

from tests.sim.conftest import Run

SEEDS = (
    1,
    3,
    13,
    20,
    102,
    103,
    425,
    654,
    816,
    1006,
    2465,
    2953,
    3375,
    3945,
    8627,
    10194,
    11906,
    13692,
    20165,
    35448,
    39700,
    42159,
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_known_seed_breaks_no_promise(seed: int, run: Run) -> None:
    assert run(seed).violations == []
