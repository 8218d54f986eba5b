"""examples/flax: a killed training has the bits of an undisturbed one, and continues in worlds of other sizes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.checkpoint.format.marker import NAME as MARKER
from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import ROOT, Nodes
from tests.polling import until
from tests.processes import Event, Record, Talker

for library in ("flax", "optax", "sklearn"):
    pytest.importorskip(library)
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

STARTED_S = 120.0
"""Time without events of an agent and its ranks, which all import JAX, on a busy machine."""
EPOCHS = 4
EPOCH_STEPS = 36  # 1,797 samples in steps of 50; the last step of an epoch has 47
SAVE_EVERY = 5
"""No multiple of it ends an epoch, so each restore is in the middle of an epoch."""


def begin(cluster: LocalCluster, nodes: Nodes, folder: Path, *, ranks: int, node: str = "node-1") -> Talker:
    """Start the example on one node of `ranks` ranks."""
    return nodes.run_script(
        cluster.endpoints,
        ROOT / "examples" / "flax" / "train.py",
        *("--epochs", str(EPOCHS), "--storage", str(folder / "storage"), "--data", str(folder / "data")),
        node=node,
        options=("--max-workers", "1", "--slots", str(ranks)),
        env={"STRATA_TRAIN_SAVE_EVERY_STEPS": str(SAVE_EVERY)},
    )


@pytest.fixture(scope="module")
def undisturbed(cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Record]:
    """The events of two ranks that nothing disturbs."""
    record = Record()
    nodes = Nodes(record, "flax-undisturbed")
    try:
        node = begin(cluster, nodes, tmp_path_factory.mktemp("undisturbed"), ranks=2)
        assert node.join(STARTED_S) == 0
        yield record
    finally:
        nodes.end()


def wait_saved(record: Record, folder: Path, *, ranks: int) -> list[Event]:
    """Return the starts of a world of `ranks` ranks, once it has trained on after a save of its own."""
    starts = record.wait("start", world=ranks, count=ranks, limit_s=STARTED_S)
    generation = starts[0]["generation"]
    step = (
        starts[0]["step"] + 4 * SAVE_EVERY + 2
    )  # at most two saves are in flight, so an earlier one has ended
    record.wait("step", generation=generation, step=step, limit_s=STARTED_S)
    committed = f"*-gen-{generation:06}-*/{MARKER}"
    until(lambda: list(folder.rglob(committed)), "nothing was committed", limit_s=STARTED_S)
    return starts


def assert_mid_epoch(starts: list[Event]) -> None:
    """Assert that all ranks of a generation restored the same step, in the middle of an epoch."""
    (step,) = {e["step"] for e in starts}
    assert step > 0
    assert step % EPOCH_STEPS != 0


def by_rank(record: Record) -> dict[tuple[int, int], tuple[int, list[int], float]]:
    """Return the epoch, samples and loss of each step and rank; assert that repetitions of a step agree."""
    found: dict[tuple[int, int], tuple[int, list[int], float]] = {}
    for e in record.of("step"):
        facts = e["epoch"], e["samples"], e["loss"]
        assert found.setdefault((e["step"], e["rank"]), facts) == facts
    return found


def whole_steps(record: Record) -> list[tuple[int, list[int], float]]:
    """Return the number, the samples of all ranks in order, and the loss of each step that all ranks completed."""
    ranks = {e["generation"]: e["world"] for e in record.of("start")}
    shares: dict[tuple[int, int], dict[int, Event]] = {}
    for e in record.of("step"):
        shares.setdefault((e["generation"], e["step"]), {})[e["rank"]] = e
    return [
        (step, [sample for rank in sorted(share) for sample in share[rank]["samples"]], share[0]["loss"])
        for (generation, step), share in shares.items()
        if len(share) == ranks[generation]
    ]


def test_a_killed_training_has_the_bits_of_an_undisturbed_one(
    undisturbed: Record, cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    node = begin(cluster, nodes, tmp_path, ranks=2)
    (victim,) = [e["pid"] for e in wait_saved(record, tmp_path, ranks=2) if e["rank"] == 1]
    os.kill(victim, signal.SIGKILL)
    assert_mid_epoch(record.wait("start", generation=2, count=2, limit_s=STARTED_S))
    assert node.join(STARTED_S) == 0

    steps = range(1, EPOCHS * EPOCH_STEPS + 1)
    assert sorted(by_rank(undisturbed)) == [(step, rank) for step in steps for rank in range(2)]
    assert by_rank(record) == by_rank(undisturbed)
    (expected,) = {e["digest"] for e in undisturbed.of("end")}
    assert [e["digest"] for e in record.of("end")] == [expected, expected]


def test_worlds_of_other_sizes_train_the_same_samples(
    undisturbed: Record, cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    for ranks in (2, 3, 1):  # three ranks have 17, 17 and 16 samples of a step
        node = begin(cluster, nodes, tmp_path, ranks=ranks, node=f"node-{ranks}")
        starts = wait_saved(record, tmp_path, ranks=ranks)
        if ranks != 2:
            assert_mid_epoch(starts)
        if ranks != 1:
            node.child.kill()
        assert (node.join(STARTED_S) == 0) == (ranks == 1)

    expected = {step: (samples, loss) for step, samples, loss in whole_steps(undisturbed)}
    assert {step for step, _, _ in whole_steps(record)} == set(expected), "no step was left out"
    for step, samples, loss in whole_steps(record):
        assert (step, samples) == (step, expected[step][0])
        assert loss == pytest.approx(expected[step][1], rel=1e-3), step
