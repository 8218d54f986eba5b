"""Many forks of a process with a session: DataLoader workers, epoch after epoch."""

from __future__ import annotations

import pytest

from tests.cluster_fixtures import Nodes, StartCluster
from tests.processes import Record


@pytest.mark.timeout(600)
@pytest.mark.usefixtures("torch_installed")
def test_15_epochs_with_forked_workers(start_cluster: StartCluster, nodes: Nodes, record: Record) -> None:
    # a long limit: with 15 x 4 forks on a busy machine, a process may get no core for two seconds
    cluster = start_cluster(coordinators=1, detect_s=20.0)
    node = nodes.run(cluster.endpoints, "loader", "--epochs", "15", options=("--slots", "2"))
    assert node.join(300.0) == 0
    node.wait_quiet()
    assert sorted((e["rank"], e["epoch"], e["seen"]) for e in record.of("epoch")) == [
        (rank, epoch, 64) for rank in (0, 1) for epoch in range(15)
    ]
    assert all(e["connected"] for e in record.of("epoch"))
    assert len(record.of("start")) == 2, "no rank crashed and came again"
    assert [e["text"] for e in record.of("line")] == [], "and nothing complained"
