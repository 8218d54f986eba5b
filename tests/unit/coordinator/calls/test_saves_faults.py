"""A replica receives the last ack of a save and dies of it: the others commit the save."""

from __future__ import annotations

import asyncio
from functools import partial

from structlog.testing import capture_logs

from strata.core.job import JobView
from strata.core.kv.records import CheckpointState
from strata.core.kv.view import View
from strata.v1 import checkpoints_pb2 as pb
from strata.v1 import session_pb2
from strata.v1.common_pb2 import Author
from strata.v1.members_pb2 import RankProgress, SaveHold
from strata.v1.session_pb2 import Progress
from tests.unit.coordinator.rig import Moment, in_rig, writes
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_world

STEP = 5


def committed(view: View) -> bool:
    entry = JobView(view, JOB).checkpoint(STEP, 1)
    return entry is not None and entry.record.state is CheckpointState.COMMITTED


async def author(member: Member) -> Author:
    place = (await member.world()).place
    return Author(
        worker_id=member.worker, incarnation=member.incarnation, generation=1, rank=place.first_rank
    )


@in_rig(cluster, 2, members=2)
async def test_a_save_is_committed_although_the_replica_that_wrote_the_seal_dies(c: Cluster) -> None:
    sealed = Moment(lambda call: writes(call, "/seal"))
    await c.start("r9", network=sealed.network(partial(Cluster.kill, c, "r9")))
    members = await c.world("r1", "r9")
    sealing = next(m for m in members if m.worker == "w1")
    attempt = ""
    for member in members:
        request = pb.BeginCheckpointRequest(
            author=await author(member),
            step=STEP,
            type=pb.CHECKPOINT_TYPE_FULL,
            root="file:///saves",
            attempt=f"of-{member.worker}",
        )
        reply = await member.call(begin_checkpoint=request)
        attempt = reply.begin_checkpoint.checkpoint.attempt
    for member in members:
        ack = pb.AckCheckpointRequest(
            author=await author(member), step=STEP, attempt=attempt, digest=member.worker, size_bytes=1
        )
        assert not (await member.call(ack_checkpoint=ack)).HasField("error")
    seal = pb.SealCheckpointRequest(
        author=await author(sealing), step=STEP, attempt=attempt, manifest_digest="d", size_bytes=2
    )
    sealing.send(call=session_pb2.Call(id=1, seal_checkpoint=seal))
    await sealed.came.wait()
    async with asyncio.timeout(1.0):
        await c["r1"].context.mirror.wait_until(committed)


# -- a rank that cannot save reports it: every replica shows it, one key holds it, every replica logs it


@in_world("r1", "r2", "r3")
async def test_every_replica_shows_and_records_why_a_rank_cannot_save(
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
        assert job.diagnosis == "no checkpoint yet, 3 s: disk full on host b"
    members[1].send(progress=Progress(generation=1, ranks=[RankProgress(rank=1, step=28, phase="step")]))
    await asyncio.sleep(2)
    for member in members:
        assert (await member.call(get_job={})).get_job.job.diagnosis == ""
    wrong = {**hold, "author": {**author, "rank": 0}}
    assert (await members[1].call(hold_saves=wrong)).error.code == "REFUSED"
