"""Sixty seeds that no run has tried before, drawn from the commit.

A failed seed blocks the change only if it passes on the parent commit. Otherwise the fault is older than the change:
the seed becomes an open line of the ledger (tests/soak/ledger.tsv), and the run reports it.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.conftest import SHOWN
from tests.sim.conftest import Run
from tests.sim.faults import FAULTS
from tests.sim.run import LEAST_EFFECTIVE, RUN_S
from tests.sim.seeds import fresh, revisions
from tests.sim.seeds.batch import Summary
from tests.soak.ledger import Open, change

_total = Summary()
_older: list[int] = []


@pytest.mark.timeout(2 * revisions.SEED_S + 60)
@pytest.mark.parametrize("seed", fresh.SEEDS)
def test_a_fresh_seed_breaks_no_promise(
    seed: int, run: Run, record_property: Callable[[str, object], None]
) -> None:
    result = run(seed)
    _total.add(result)
    wrong = list(result.violations)
    if result.virtual_s < RUN_S or result.faults.total() < LEAST_EFFECTIVE:
        wrong.append(
            f"it ran {result.virtual_s:.0f} virtual seconds with {result.faults.total()} effective faults"
        )
    if not wrong:
        return
    parent = revisions.parent(fresh.HEAD)
    tried = bool(parent) and len(_older) < fresh.MANY
    holds = revisions.holds_on(parent, seed) if tried else None
    verdict = fresh.judge(seed, wrong[0], holds, older=len(_older))
    if verdict.blocks:
        pytest.fail(verdict.reason, pytrace=False)
    _older.append(seed)
    failure = Open(campaign="simulation", seed=seed, commit=revisions.short(parent), why=wrong[0])
    change(lambda ledger: ledger.with_open([failure]))
    record_property(SHOWN, f"open: {verdict.reason}\nadd to tests/soak/ledger.tsv:\n{failure.line()}")


def test_every_class_of_faults_takes_effect_in_the_fresh_seeds(
    record_property: Callable[[str, object], None],
) -> None:
    seeds = f"{fresh.SEEDS[0]} to {fresh.SEEDS[-1]} of {revisions.short(fresh.HEAD)}"
    record_property(SHOWN, f"fresh seeds {seeds}: {_total.text()}")
    if _total.seeds < fresh.COUNT:
        pytest.skip(f"{_total.seeds} seeds are too few for every class of faults")
    assert [name for name in FAULTS if not _total.effective[name]] == []
