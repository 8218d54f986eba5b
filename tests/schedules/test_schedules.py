"""Two short schedules on a real cluster; `python -m tests.schedules --seeds 50` is the long run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_fixtures import StartCluster
from tests.ranks.learning import reference
from tests.schedules.drive import Drive
from tests.schedules.judge import judge
from tests.schedules.plan import Kind, make_plan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@pytest.mark.parametrize(
    ("seed", "kinds"),
    [(1, {Kind.KILL_RANK, Kind.FREEZE_NODE}), (2, {Kind.KILL_LEADER, Kind.KILL_NODE, Kind.SCALE})],
    ids=["ranks and hosts", "leaders and scaling"],
)
def test_a_training_survives_a_random_schedule(
    start_cluster: StartCluster, tmp_path: Path, seed: int, kinds: set[Kind]
) -> None:
    plan = make_plan(seed, epochs=6, events=3, kinds=frozenset(kinds))
    drive = Drive(plan, start_cluster(), tmp_path)
    history = drive.run()
    assert judge(history, reference(plan.epochs)) == []
    assert drive.deeds.done, "nothing was done to it"
