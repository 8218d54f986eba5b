"""The cause that holds a rank's saves reaches its agent, the coordinators and every status view."""

from __future__ import annotations

from pathlib import Path

from strata.client import CoordinatorClient
from strata.devcluster.local_cluster import LocalCluster
from strata.v1.worlds_pb2 import GetJobRequest
from tests.cluster_fixtures import Nodes, run_strata, shown


def test_a_held_save_is_shown_until_the_rank_saves_again(
    cluster: LocalCluster, nodes: Nodes, tmp_path: Path
) -> None:
    saves = tmp_path / "saves"
    node = nodes.run(cluster.endpoints, "holding", str(saves))
    where = ("--endpoints", cluster.endpoints)
    held = nodes.record.wait_one("rank.saves_held")
    assert (held["step"], held["reason"], held["host"]) == (20, "disk full", "gpu-b")
    with CoordinatorClient.connect(cluster.endpoints, job=nodes.job) as client:
        says = f"{nodes.job}: no checkpoint yet, 4 min: disk full on host gpu-b"
        shown(says, "status", *where)
        shown("SAVES HELD: 0 for 4 min", "members", "--job", nodes.job, *where)
        code, keys = run_strata("watch", *where, "--job", nodes.job, "--once", "worlds/")
        assert code == 0
        assert "/held" in keys, "it is on record"
        saves.touch()
        nodes.record.wait_one("rank.saves_no_longer_held")
        client.call_until(GetJobRequest(job=nodes.job), lambda answer: not answer.job.diagnosis)
    saves.with_name("saves.over").touch()
    assert node.join() == 0
