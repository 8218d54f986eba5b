"""A rank says that it cannot save: every replica shows it, one key has it, every replica logs it."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from strata.v1.members_pb2 import RankProgress, SaveHold
from strata.v1.session_pb2 import Progress
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, in_world


@in_world("r1", "r2", "r3")
async def test_what_keeps_a_rank_from_saving_is_shown_by_every_replica_and_on_record(
    c: Cluster, members: list[Member]
) -> None:
    rank = RankProgress(
        rank=1,
        step=24,
        phase="step",
        save_hold=SaveHold(step=20, held_ms=1000, reason="disk full", host="b"),
    )
    members[1].send(progress=Progress(generation=1, ranks=[rank]))
    author = {"worker_id": "w1", "incarnation": members[1].incarnation, "generation": 1, "rank": 1}
    hold = {"author": author, "step": 20, "reason": "disk full", "host": "b"}
    with capture_logs() as logs:
        for _ in range(2):
            assert (await members[1].call(hold_saves=hold)).HasField("hold_saves")
    assert c["r3"].view.get(JOB.held(1)) is not None
    assert [log for log in logs if log["event"] == "saves_held"], "on the replicas' side, too"
    await asyncio.sleep(2)
    for member in members:
        job = (await member.call(get_job={})).get_job.job
        assert job.trouble == "no checkpoint yet, 3 s: disk full on host b"
    members[1].send(progress=Progress(generation=1, ranks=[RankProgress(rank=1, step=28, phase="step")]))
    await asyncio.sleep(2)
    for member in members:
        assert (await member.call(get_job={})).get_job.job.trouble == ""
    wrong = {**hold, "author": {**author, "rank": 0}}
    assert (await members[1].call(hold_saves=wrong)).error.code == "REFUSED"
