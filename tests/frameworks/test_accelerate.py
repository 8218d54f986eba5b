"""accelerate: a loop of one's own over `run.steps`, with a model and an optimizer that accelerate has wrapped."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.frameworks.killed_runs import facts_of, first_of, train
from tests.processes import Record

pytest.importorskip("accelerate")
PROGRAM = "accelerate_training.py"
EPOCH_BATCHES = (
    19  # 220 samples in steps of 24, each in two batches a rank; the last step has 4 samples, in one
)
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def test_a_killed_training_equals_an_undisturbed_one(cluster: LocalCluster, tmp_path: Path) -> None:
    undisturbed, killed = Record(), Record()
    train(cluster, undisturbed, PROGRAM, tmp_path / "undisturbed", job="accelerate-undisturbed")
    hang = (("5", 3), ("14", 12))
    train(cluster, killed, PROGRAM, tmp_path / "killed", job="accelerate-killed", hang=hang)
    assert [first_of(killed, "batch", generation)["step"] for generation in (1, 2, 3)] == [0, 3, 12]
    assert len(facts_of(undisturbed, "batch", "end")) == 3 * EPOCH_BATCHES * 2 + 2
    assert facts_of(killed, "batch", "end") == facts_of(undisturbed, "batch", "end")
