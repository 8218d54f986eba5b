"""Three changed lines make an ordinary training script survive failures."""

from __future__ import annotations

import difflib
from pathlib import Path

FOLDER = Path(__file__).resolve().parent.parent.parent / "examples" / "three_lines"


def test_the_strata_example_changes_three_lines() -> None:
    plain, ours = (
        [line for line in (FOLDER / name).read_text().splitlines() if line.strip()]
        for name in ("plain.py", "train.py")
    )
    changes = [line for line in difflib.ndiff(plain, ours) if line[0] in "+-"]
    assert changes == [
        "+ import strata",
        "+     run = strata.init(model=net, optim=optimizer, sched=scheduler, data=loader)",
        "-         for x, y in loader:",
        "+         for x, y in run.steps(loader):",
    ]
