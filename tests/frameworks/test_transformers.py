"""Hugging Face's Trainer: a killed training does what an undisturbed one does, to the last bit."""

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

for library in ("transformers", "accelerate", "datasets"):
    pytest.importorskip(library)
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

PROGRAM = "transformers_training.py"
KINDS = ("batch", "evaluated", "epoch_end", "end")


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The events of two ranks that nothing disturbs."""
    record = Record()
    train(cluster, record, PROGRAM, tmp_path_factory.mktemp("undisturbed"), job="trainer-undisturbed")
    return record


def test_a_killed_training_equals_an_undisturbed_one(
    cluster: LocalCluster, undisturbed: Record, tmp_path: Path
) -> None:
    """Killed in the middle of an epoch, in the evaluation after an epoch, and in the first batch after an epoch."""
    hang = (("batch:5", 3), (f"evaluation:{2 * EPOCH_STEPS}", 18), (f"batch:{3 * EPOCH_STEPS}", 30))
    record = Record()
    train(cluster, record, PROGRAM, tmp_path, job="trainer-killed", hang=hang)
    begun = [first_of(record, "batch", generation)["step"] for generation in (1, 2, 3, 4)]
    assert begun == [0, 3, 18, 30]
    assert facts_of(record, *KINDS) == facts_of(undisturbed, *KINDS)


def test_a_stopped_training_does_not_go_on(cluster: LocalCluster, tmp_path: Path) -> None:
    """Killed after its last save, and before the end of the run."""
    record = Record()
    arguments = ("--stop", "13")
    train(
        cluster,
        record,
        PROGRAM,
        tmp_path,
        job="trainer-stopped",
        hang=(("end:13", 13),),
        ranks=1,
        arguments=arguments,
    )
    assert {event["step"] for event in record.of("end")} == {13}
    assert record.of("batch", generation=2) == []


def test_a_world_of_another_size_trains_on_the_same_samples(
    cluster: LocalCluster, undisturbed: Record, tmp_path: Path
) -> None:
    check_one_rank_alone(cluster, undisturbed, PROGRAM, tmp_path, job="trainer-alone")


def test_the_example_trains(cluster: LocalCluster, nodes: Nodes, tmp_path: Path) -> None:
    node = nodes.run_script(
        cluster.endpoints,
        ROOT / "examples" / "transformers" / "train.py",
        *("--epochs", "1", "--storage", str(tmp_path / "storage"), "--output", str(tmp_path / "out")),
        options=("--max-workers", "1", "--slots", "2"),
    )
    assert node.join(STARTED_S) == 0
