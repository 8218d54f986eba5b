"""Members' reports and requests on their sessions: exits of ranks, saves, worlds."""

from __future__ import annotations

import asyncio

import pytest

from strata.errors import ClusterReplaced, Unavailable
from strata.v1 import worlds_pb2
from strata.v1.session_pb2 import RankExit
from tests.unit.coordinator.rig import Scripted, in_rig
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, cluster, in_world


@in_rig(cluster, members=2)
async def test_the_exits_of_ranks_are_confirmed_when_durable_and_again_when_repeated(c: Cluster) -> None:
    members = await c.world("r1", "r2", slots=2)
    members[0].send(rank_exit=RankExit(generation=1, rank=1, code=0, id=5))
    reply = await members[0].next("reply")
    assert (reply.id, reply.WhichOneof("response")) == (5, "done")
    assert c["r1"].view.get(JOB.done_rank(1, 1)) is not None
    await members[0].connect("r3")
    members[0].send(rank_exit=RankExit(generation=1, rank=1, code=0, id=6))
    assert (await members[0].next("reply")).HasField("done")
    members[0].send(rank_exit=RankExit(generation=1, rank=3, code=0, id=7))
    assert (await members[0].next("reply", after=1)).error.code == "REFUSED"
    members[0].send(rank_exit=RankExit(generation=1, rank=0, code=-9, id=8))
    assert (await members[0].next("reply", after=2)).HasField("done")
    update = await members[1].world(2)
    assert "rank 0" in update.world.reason


def begin(member: Member, number: int, **author: object) -> dict[str, object]:
    who = {"worker_id": member.worker, "incarnation": member.incarnation, "generation": 1, "rank": number}
    return {
        "author": {**who, **author},
        "step": 20,
        "type": 1,
        "root": "file:///tmp/x",
        "attempt": f"attempt-{number}",
    }


@in_world("r1", "r2", "r3")
async def test_a_save_through_three_replicas_is_pushed_to_all_until_it_is_committed(
    c: Cluster, members: list[Member]
) -> None:
    attempts = set()
    for rank, member in enumerate(members):
        reply = await member.call(begin_checkpoint=begin(member, rank))
        attempts.add(reply.begin_checkpoint.checkpoint.attempt)
    assert len(attempts) == 1, "the losers of the race join the winner's attempt"
    (attempt,) = attempts
    for rank, member in enumerate(members):
        author = begin(member, rank)["author"]
        reply = await member.call(
            ack_checkpoint={"author": author, "step": 20, "attempt": attempt, "digest": "d"}
        )
        assert rank in reply.ack_checkpoint.checkpoint.acked
    full = await members[0].save(1, acked=3)
    assert not full.sealed
    await members[0].call(
        seal_checkpoint={
            "author": begin(members[0], 0)["author"],
            "step": 20,
            "attempt": attempt,
            "manifest_digest": "m",
        }
    )
    for member in members:
        committed = await member.save(2)
        assert committed.latest
    await members[1].connect("r1")
    assert (await members[1].next("checkpoint")).state == 2, "who was away is told the end"


@in_world("r1", "r2", "r3")
async def test_acks_reach_the_sealing_rank_at_once_and_others_once_a_second(
    c: Cluster, members: list[Member]
) -> None:
    await members[0].call(begin_checkpoint=begin(members[0], 0))
    await asyncio.sleep(2)
    received = [len(member.all("checkpoint")) for member in members]
    for rank, member in enumerate(members):
        author = begin(member, rank)["author"]
        await member.call(
            ack_checkpoint={"author": author, "step": 20, "attempt": "attempt-0", "digest": "d"}
        )
        await asyncio.sleep(0.1)
    assert len((await members[0].save(1, acked=3)).acked) == 3
    assert [len(m.all("checkpoint")) for m in members[1:]] == received[1:]
    await asyncio.sleep(1)
    for member, before in zip(members[1:], received[1:], strict=True):
        news = member.all("checkpoint")[before:]
        assert [len(save.acked) for save in news] == [3]


@pytest.mark.parametrize(
    ("author", "error"),
    [
        ({"worker_id": "w1"}, "REFUSED"),
        ({"incarnation": 1}, "STALE_INCARNATION"),
        ({"incarnation": 1 << 40}, "REFUSED"),
        ({"rank": 1}, "REFUSED"),
    ],
    ids=str,
)
@in_world("r1", "r1", replicas=1, members=2)
async def test_a_session_speaks_for_its_own_ranks_only(
    c: Cluster, members: list[Member], author: dict[str, object], error: str
) -> None:
    reply = await members[0].call(begin_checkpoint=begin(members[0], 0, **author))
    assert reply.error.code == error


@in_rig(cluster, 1, members=1)
async def test_a_call_on_a_session_may_omit_its_job_but_not_name_another(c: Cluster) -> None:
    (member,) = await c.world("r1")
    assert (await member.call(get_world={})).get_world.world.generation == 1
    assert (await member.call(get_world={"job": "other"})).error.code == "REFUSED"
    assert (await member.call(get_world={"job": "job"})).get_world.members[0].worker_id == "w0"
    assert (await member.call()).error.code == "INVALID_ARGUMENT"


@in_rig(cluster, 2, members=1)
async def test_an_answer_is_never_older_than_the_revision_its_caller_has_seen(c: Cluster) -> None:
    await c.start("r9", network=Scripted(watch_s=0.5))
    (member,) = await c.world("r1")
    revision = c["r1"].view.revision
    request = worlds_pb2.GetWorldRequest(job="job")
    request.token.uid, request.token.revision = "uid-1", revision
    assert c["r9"].view.revision < revision
    answer = await c["r9"].service.calls.answer("get_world", request, None)
    assert answer.world.generation == (await member.world()).world.generation
    assert answer.token.revision >= revision
    request.token.revision = revision + 1000
    with pytest.raises(Unavailable, match="revision"):
        await c["r9"].service.calls.answer("get_world", request, None)
    request.token.uid = "another"
    with pytest.raises(ClusterReplaced):
        await c["r9"].service.calls.answer("get_world", request, None)
