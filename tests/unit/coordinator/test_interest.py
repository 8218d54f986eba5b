"""Members are asked for more while somebody looks, at whichever replica, and no longer."""

from __future__ import annotations

import asyncio
from typing import Any

from strata.coordinator.reports.interest import LOOK_S
from strata.v1.members_pb2 import RankEvidence
from strata.v1.session_pb2 import Progress, Tick
from tests.not_none import not_none
from tests.unit.coordinator.rig import now
from tests.unit.coordinator.serving_rig import Cluster, Member, in_world


async def answering(member: Member, rank: int) -> None:
    """Answer each look at a rank, as an agent does."""
    seen = 0
    while True:
        asked = member.all("inspect")
        if len(asked) > seen:
            seen = len(asked)
            evidence = RankEvidence(rank=rank, stack=f"stack {seen}", log=["a line"])
            member.send(progress=Progress(generation=1, evidence=[evidence]))
        member.send(tick=Tick())
        await asyncio.sleep(0.1)


def looks(c: Cluster, replica: str) -> Any:
    return c[replica].service.live


@in_world("r1", "r2", members=2)
async def test_a_look_at_any_replica_brings_evidence_and_the_ages_of_heartbeats(
    c: Cluster, members: list[Member]
) -> None:
    tasks = [c.tasks.create_task(answering(member, rank)) for rank, member in enumerate(members)]
    service = looks(c, "r3")
    await asyncio.sleep(5)
    assert members[0].all("inspect") == []
    assert service.heard("job", "w0", members[0].incarnation) is None
    for _ in range(6):
        service.look("job", 0)
        service.look("job", None)
        await asyncio.sleep(1)
    found = not_none(service.evidence("job", 1, 0))
    assert found.stack.startswith("stack ")
    assert list(found.log) == ["a line"]
    assert service.evidence("job", 1, 1) is None, "nobody looks at rank 1"
    assert members[1].all("inspect") == []
    for name in ("w0", "w1"):
        assert (
            now()
            - not_none(service.heard("job", name, next(m.incarnation for m in members if m.worker == name)))
            < 4
        )
    await asyncio.sleep(2 * LOOK_S + 12)
    count = len(members[0].all("inspect"))
    assert service.evidence("job", 1, 0) is None
    await asyncio.sleep(10)
    assert len(members[0].all("inspect")) == count, "nobody looks any more"
    for task in tasks:
        task.cancel()


@in_world("r1", "r1", members=2)
async def test_evidence_of_others_ranks_is_not_taken(c: Cluster, members: list[Member]) -> None:
    members[0].send(progress=Progress(generation=1, evidence=[RankEvidence(rank=1, stack="made up")]))
    await asyncio.sleep(2)
    assert looks(c, "r1").evidence("job", 1, 1) is None
