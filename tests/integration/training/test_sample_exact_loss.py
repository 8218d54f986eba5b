"""A training that is killed and resized ends with a loss like those of undisturbed trainings that only round differently.

make test-all ARGS="-m campaign -k sample_exact_loss -n 0 -s"
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.integration.training.test_ddp_bits import STARTED_S, wait_saved
from tests.processes import Event, Record

pytest.importorskip("torch")
pytest.importorskip("sklearn")
pytestmark = [pytest.mark.timeout(3600), pytest.mark.campaign]

UNDISTURBED = 20
WORLDS = (3, 2, 4, 3)
EPOCH_STEPS = 38  # 1,797 digits in steps of 48
STEPS = 6 * EPOCH_STEPS
KILLED_EVERY = 50


def test_the_loss_lies_in_the_range_of_undisturbed_trainings(cluster: LocalCluster, tmp_path: Path) -> None:
    disturbed = trained(cluster, tmp_path / "disturbed", "disturbed", rounding=0, worlds=WORLDS)
    begun = {(e["generation"], e["world"], e["step"]) for e in disturbed.of("begun")}
    assert [world for _, world, _ in sorted(begun)] == list(WORLDS)
    for number, (_, _, step) in enumerate(sorted(begun)[1:], 1):
        assert step >= KILLED_EVERY * number - 10, "each world goes on"
        assert step % EPOCH_STEPS, "in the middle of an epoch"
    losses = []
    for number in range(1, UNDISTURBED + 1):
        found = trained(cluster, tmp_path / str(number), f"undisturbed-{number}", rounding=number)
        assert samples_of(found) == samples_of(disturbed)
        losses.append(loss_of(found))
    assert len(samples_of(disturbed)) == STEPS
    assert len(set(losses)) > 1, "the roundings differ"
    figures = f"disturbed {loss_of(disturbed):.6f}, undisturbed {min(losses):.6f} to {max(losses):.6f}"
    sys.stdout.write(figures + "\n")
    # of 21 equal trainings, two are the ends of the range: so the range may be exceeded by its own width
    width = max(losses) - min(losses)
    assert min(losses) - width <= loss_of(disturbed) <= max(losses) + width, figures


def trained(
    cluster: LocalCluster, folder: Path, job: str, *, rounding: int, worlds: tuple[int, ...] = (3,)
) -> Record:
    """Train in worlds of these numbers of ranks; each but the last is killed in mid-epoch."""
    record = Record()
    nodes = Nodes(record, f"loss-{job}")
    try:
        for number, ranks in enumerate(worlds):
            last = number == len(worlds) - 1
            node = nodes.run(
                cluster.endpoints,
                "rounding",
                *("--storage", str(folder), "--rounding", str(rounding), "--pace-s", "0" if last else "0.05"),
                node=f"n{number}",
                options=("--max-workers", "1", "--slots", str(ranks)),
            )
            if not last:
                step = KILLED_EVERY * (number + 1)
                record.until("its steps", partial(reached, step=step), limit_s=STARTED_S)
                wait_saved(cluster, nodes.job, step - 10)
                node.child.kill()
                node.join()
            else:
                assert node.join(STARTED_S) == 0
        return record
    finally:
        nodes.end()


def reached(events: list[Event], step: int) -> list[Event]:
    return [e for e in events if e["event"] == "step" and e["step"] == step]


def samples_of(record: Record) -> dict[int, list[int]]:
    """Return the samples of each step over all ranks, as its newest generation trained it."""
    newest: dict[int, dict[int, list[int]]] = {}
    for event in record.of("step"):
        newest.setdefault(event["step"], {}).setdefault(event["generation"], []).extend(event["samples"])
    return {step: sorted(found[max(found)]) for step, found in newest.items()}


def loss_of(record: Record) -> float:
    (loss,) = {event["loss"] for event in record.of("end")}
    return float(loss)
