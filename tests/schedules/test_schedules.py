"""Some short schedules on a real cluster; `python -m tests.schedules --seeds 50` is the long run.

Together they injure nodes, ranks and leaders, and make operators' requests: see
`test_the_schedules_cover_every_kind_of_event_but_preemption`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cluster_fixtures import StartCluster
from tests.ranks.learning import reference
from tests.schedules.drive import Drive
from tests.schedules.judge import judge
from tests.schedules.plan import Kind, Plan, make_plan

CHOSEN: dict[str, tuple[int, set[Kind], int, int]] = {
    "ranks and hosts": (40, {Kind.KILL_RANK, Kind.FREEZE_RANK, Kind.FREEZE_NODE}, 5, 3),
    "leaders and scaling": (2, {Kind.KILL_LEADER, Kind.KILL_NODE, Kind.SCALE}, 6, 3),
    "a drain within a pause": (107, {Kind.PAUSE, Kind.DRAIN}, 4, 2),
    "a scheduler and a leader": (85, {Kind.TERM_NODE, Kind.FREEZE_LEADER}, 4, 2),
}
"""Name -> a seed, its kinds of deed, the number of epochs, and the number of deeds."""


def plan_of(name: str) -> Plan:
    seed, kinds, epochs, events = CHOSEN[name]
    return make_plan(seed, epochs=epochs, events=events, kinds=frozenset(kinds))


def test_the_schedules_cover_every_kind_of_event_but_preemption() -> None:
    done = {event.kind for name in CHOSEN for event in plan_of(name).events}
    assert done == set(Kind) - {Kind.PREEMPT}, "SIGTERM to a node comes to the same"


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.parametrize("name", CHOSEN)
def test_a_training_survives_a_random_schedule(
    start_cluster: StartCluster, tmp_path: Path, name: str
) -> None:
    plan = plan_of(name)
    drive = Drive(plan, start_cluster(), tmp_path)
    history = drive.run()
    assert judge(history, reference(plan.epochs)) == []
    assert drive.deeds.done, "nothing was done to it"
