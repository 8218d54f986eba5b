"""A training with virtual ranks has the same bits in worlds of 3, 2, 3 and 4 ranks, with a kill before each change."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.integration.training.test_ddp_bits import STARTED_S, digests, wait_saved
from tests.processes import Event, Record

pytest.importorskip("torch")
pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

STEPS = 32  # 310 samples in global batches of 20, twice: each epoch ends with a batch of 10
WORLDS = (3, 2, 3, 4)
CHANGE_AFTER = 6


def test_worlds_of_other_sizes_train_the_same_bits(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path
) -> None:
    for number, ranks in enumerate(WORLDS):
        last = number == len(WORLDS) - 1
        node = nodes.run(
            cluster.endpoints,
            *("virtual", "--storage", str(tmp_path / "changing"), "--pace-s", "0" if last else "0.1"),
            node=f"n{number}",
            options=("--max-workers", "1", "--slots", str(ranks)),
        )
        begun = record.until(
            f"{ranks} ranks", partial(all_begun, number=number + 1, ranks=ranks), limit_s=STARTED_S
        )
        assert {e["world"] for e in begun} == {ranks}
        if not last:
            step = max(e["step"] for e in begun) + CHANGE_AFTER
            wait_saved(cluster, nodes.job, step - 3)
            record.until("its steps", partial(stepped, step=step))
            node.child.kill()
            node.join()
        else:
            assert node.join(STARTED_S) == 0
    changing = digests(record)
    assert sorted(changing) == list(range(1, STEPS + 1))

    nodes.job = f"{nodes.job}-undisturbed"
    node = nodes.run(
        cluster.endpoints,
        *("virtual", "--storage", str(tmp_path / "undisturbed")),
        options=("--max-workers", "1", "--slots", "1"),
    )
    assert node.join(STARTED_S) == 0
    assert digests(record) == changing


def all_begun(events: list[Event], number: int, ranks: int) -> list[Event]:
    """Return what the ranks of the `number`-th generation said when they began, once all have."""
    begun = [e for e in events if e["event"] == "begun"]
    generations = sorted({e["generation"] for e in begun})
    if len(generations) < number:
        return []
    newest = [e for e in begun if e["generation"] == generations[-1]]
    return newest if len(newest) == ranks else []


def stepped(events: list[Event], step: int) -> list[Event]:
    return [e for e in events if e["event"] == "step" and e["step"] >= step]
