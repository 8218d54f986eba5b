"""`strata run` removes the temporary folder of a killed agent, but not the folder of a live agent."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.devcluster.local_cluster import LocalCluster
from tests.cluster_fixtures import Nodes
from tests.processes import Record


@pytest.fixture
def place() -> Iterator[Path]:
    """A temporary folder whose path is short enough for a socket in it."""
    with tempfile.TemporaryDirectory(prefix="f") as folder:
        yield Path(folder)


def folders(place: Path) -> set[str]:
    return {entry.name for entry in place.iterdir() if entry.name.startswith("strata-")}


@pytest.mark.slow
def test_the_next_start_removes_the_folder_of_a_killed_agent(
    cluster: LocalCluster, nodes: Nodes, record: Record, tmp_path: Path, place: Path
) -> None:
    until = tmp_path / "until"
    env = {"TMPDIR": str(place)}
    steps = ("steps", "--no-barrier", "--until", str(until))

    def start(node: str) -> set[str]:
        before = folders(place)
        nodes.run(cluster.endpoints, *steps, node=node, options=("--max-workers", "4"), env=env)
        record.wait("start", source=node)
        return folders(place) - before

    (neighbour,) = start("neighbour")
    (killed,) = start("killed")
    nodes.talkers[-1].child.kill()
    nodes.talkers[-1].join()
    assert folders(place) == {neighbour, killed}
    (third,) = start("third")
    assert folders(place) == {neighbour, third}
    until.touch()
    for talker in nodes.talkers:
        talker.join()
    assert folders(place) == set()
