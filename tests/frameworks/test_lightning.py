"""Lightning: a killed training does what an undisturbed one does, from the epochs' hooks to the last bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import ROOT, Nodes
from tests.frameworks.killed_runs import (
    EPOCH_STEPS,
    STARTED_S,
    check_one_rank_alone,
    facts_of,
    first_of,
    train,
)
from tests.processes import Record

pytest.importorskip("lightning")
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

PROGRAM = "lightning_training.py"
KINDS = ("batch", "validated", "epoch", "epoch_end", "end")


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The events of two ranks that nothing disturbs."""
    record = Record()
    train(cluster, record, PROGRAM, tmp_path_factory.mktemp("undisturbed"), job="lightning-undisturbed")
    return record


def test_a_killed_training_equals_an_undisturbed_one(
    cluster: LocalCluster, undisturbed: Record, tmp_path: Path
) -> None:
    """Killed in the middle of an epoch, in the validation after an epoch, and in the first batch after an epoch."""
    hang = (("batch:5", 3), (f"validation:{2 * EPOCH_STEPS}", 18), (f"batch:{3 * EPOCH_STEPS}", 30))
    record = Record()
    train(cluster, record, PROGRAM, tmp_path, job="lightning-killed", hang=hang)
    begun = [first_of(record, "batch", generation)["step"] for generation in (1, 2, 3, 4)]
    assert begun == [0, 3, 18, 30]
    assert facts_of(record, *KINDS) == facts_of(undisturbed, *KINDS)


def test_a_world_of_another_size_trains_on_the_same_samples(
    cluster: LocalCluster, undisturbed: Record, tmp_path: Path
) -> None:
    check_one_rank_alone(cluster, undisturbed, PROGRAM, tmp_path, job="lightning-alone")


def test_the_example_trains(cluster: LocalCluster, nodes: Nodes, tmp_path: Path) -> None:
    node = nodes.run_script(
        cluster.endpoints,
        ROOT / "examples" / "lightning" / "train.py",
        *("--epochs", "1", "--storage", str(tmp_path)),
        options=("--max-workers", "1", "--slots", "2"),
    )
    assert node.join(STARTED_S) == 0
