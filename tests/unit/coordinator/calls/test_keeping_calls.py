"""Calls about committed checkpoints, through any replica; the leader marks the checkpoints to delete."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata.core.job import JobView
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointNotFound, Conflict, InvalidArgument, NotFound, Refused
from strata.v1 import checkpoints_pb2 as pb
from strata.v1.retention_pb2 import GetRetentionRequest, Keep, Retention, SetRetentionRequest
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, Cluster, Member, Node, cluster


async def ask(node: Node, name: str, request: Any) -> Any:
    request.job = request.job or "job"
    return await node.service.calls.answer(name, request, None)


async def save(member: Member, *steps: int, generation: int = 1) -> None:
    """Save these steps in a world of one rank."""
    author = {
        "worker_id": member.worker,
        "incarnation": member.incarnation,
        "generation": generation,
        "rank": 0,
    }
    for step in steps:
        slot: dict[str, Any] = {"author": author, "step": step, "attempt": f"x{step}"}
        began = await member.call(begin_checkpoint={**slot, "type": 1, "root": "file:///tmp/x"})
        assert began.begin_checkpoint.checkpoint.state == pb.CHECKPOINT_STATE_OPEN, began
        await member.call(ack_checkpoint={**slot, "digest": "d"})
        await member.call(seal_checkpoint={**slot, "manifest_digest": "m", "size_bytes": 1})


def states(node: Node) -> dict[int, CheckpointState]:
    job = JobView(node.view, JOB)
    return {entry.record.step: entry.record.state for entry in job.checkpoints()}


async def until(node: Node, wanted: dict[int, CheckpointState]) -> None:
    async with asyncio.timeout(60):
        await node.context.mirror.wait_until(lambda _view: states(node) == wanted)


async def committed(c: Cluster, *steps: int) -> Member:
    (member,) = await c.world("r1")
    await save(member, *steps)
    for node in c.alive:
        await until(node, dict.fromkeys(steps, CheckpointState.COMMITTED))
    return member


DELETING, COMMITTED = CheckpointState.DELETING, CheckpointState.COMMITTED


@in_rig(cluster, members=1)
async def test_the_leader_marks_checkpoints_beyond_the_policy_and_a_host_removes_them(c: Cluster) -> None:
    await committed(c, 20, 40, 60)
    keep = Retention(keep=Keep(latest=1, every_steps=40), who="ada")
    await ask(c["r2"], "set_retention", SetRetentionRequest(retention=keep))
    await until(c["r3"], {20: DELETING, 40: COMMITTED, 60: COMMITTED})
    shown = await ask(c["r3"], "get_retention", GetRetentionRequest())
    assert shown.retention.who == "ada"
    assert dict(shown.kept) == {
        "40/x40": "primary: the first from step 40 on",
        "60/x60": "primary: one of the 1 newest",
    }
    answer = await ask(c["r1"], "list_maintenance", pb.ListMaintenanceRequest(host="h"))
    (task,) = answer.tasks
    assert (task.kind, task.step, task.attempt) == (pb.MAINTENANCE_KIND_REMOVE, 20, "x20")
    removed = pb.DeleteCheckpointRequest(step=20, attempt="x20", finished=True, tier=task.tier, host="h")
    await ask(c["r1"], "delete_checkpoint", removed)
    await until(c["r2"], {40: COMMITTED, 60: COMMITTED})


@in_rig(cluster, members=1)
async def test_a_checkpoint_is_marked_for_deletion_when_it_reaches_its_maximum_age(c: Cluster) -> None:
    await committed(c, 20, 40)
    keep = Keep(latest=1, age_ms=10_000)
    await ask(c["r1"], "set_retention", SetRetentionRequest(retention=Retention(keep=keep)))
    # virtual time: if the first checkpoint were old enough, it would be deleted by now
    await asyncio.sleep(5)
    assert states(c["r2"]) == {20: COMMITTED, 40: COMMITTED}
    await until(c["r2"], {20: DELETING, 40: COMMITTED})


@in_rig(cluster, members=1)
async def test_a_reader_keeps_its_checkpoint_until_it_closes_or_its_lease_runs_out(c: Cluster) -> None:
    await committed(c, 20, 40, 60)
    opening = pb.OpenCheckpointRequest(step=20, attempt="x20", reader="quick", who="eval", ttl_s=5)
    await ask(c["r1"], "open_checkpoint", opening)
    opening.reader = "dead"
    await ask(c["r2"], "open_checkpoint", opening)
    opened = await ask(c["r3"], "open_checkpoint", opening)
    assert sorted(opened.checkpoint.readers) == ["dead", "quick"]
    await ask(c["r1"], "set_retention", SetRetentionRequest(retention=Retention(keep=Keep(latest=1))))
    await until(c["r1"], {20: COMMITTED, 40: DELETING, 60: COMMITTED})
    closing = pb.CloseCheckpointRequest(step=20, attempt="x20", reader="quick")
    for _ in range(2):
        await ask(c["r3"], "close_checkpoint", closing)
    assert states(c["r3"])[20] is COMMITTED
    await until(c["r1"], {20: DELETING, 40: DELETING, 60: COMMITTED})
    with pytest.raises(Refused, match="cannot be read"):
        await ask(c["r1"], "open_checkpoint", opening)
    with pytest.raises(InvalidArgument):
        await ask(c["r1"], "open_checkpoint", pb.OpenCheckpointRequest(step=60, reader="r", ttl_s=-1))


@in_rig(cluster, members=1)
async def test_a_job_is_forked_before_its_first_member_and_begins_there(c: Cluster) -> None:
    await committed(c, 20, 40)
    tagging = pb.TagCheckpointRequest(tag="good", step=20, attempt="x20", who="ada")
    assert list((await ask(c["r2"], "tag_checkpoint", tagging)).checkpoint.tags) == ["good"]
    found = await ask(c["r3"], "get_checkpoint", pb.GetCheckpointRequest(tag="good"))
    assert found.checkpoint.step == 20
    before = pb.GetCheckpointRequest(step=40, attempt="x40", before=True)
    assert (await ask(c["r3"], "get_checkpoint", before)).checkpoint.step == 20
    fork = pb.ForkCheckpointRequest(job="new", source_job="job", tag="good")
    for node in ("r1", "r2"):
        forked = (await ask(c[node], "fork_checkpoint", fork)).checkpoint
        assert (forked.step, forked.generation, forked.origin_job) == (20, 0, "job")
    listed = await ask(c["r3"], "list_checkpoints", pb.ListCheckpointsRequest(job="new"))
    assert [each.step for each in listed.checkpoints] == [20]
    fork.source_job = "nobody"
    with pytest.raises(NotFound):
        await ask(c["r1"], "fork_checkpoint", fork)
    with pytest.raises(Conflict, match="good names step 20"):
        await ask(c["r1"], "untag_checkpoint", pb.UntagCheckpointRequest(tag="good", step=40, attempt="x40"))
    await ask(c["r1"], "untag_checkpoint", pb.UntagCheckpointRequest(tag="good"))
    with pytest.raises(CheckpointNotFound, match="tagged good"):
        await ask(c["r3"], "get_checkpoint", pb.GetCheckpointRequest(tag="good"))


@in_rig(cluster, members=1)
async def test_a_rewind_starts_a_new_generation_from_the_chosen_step(c: Cluster) -> None:
    member = await committed(c, 20, 40)
    rewind = pb.RewindJobRequest(step=20, who="ada", generation=1)
    for node in ("r2", "r3"):
        answer = await ask(c[node], "rewind_job", rewind)
        assert answer.checkpoint.step == 20
    update = await member.world(2)
    assert (update.world.restore.step, update.world.restore.attempt) == (20, "x20")
    assert "ada rewinds the job to step 20" in update.world.reason
    assert [tier.name for tier in update.world.restore.tiers] == ["primary"]
    await save(member, 30, generation=2)
    latest = await ask(c["r1"], "get_checkpoint", pb.GetCheckpointRequest(latest=True))
    assert latest.checkpoint.step == 30


@in_rig(cluster, members=1)
async def test_damage_is_reported_to_all_and_a_waiting_world_restores_an_earlier_step(c: Cluster) -> None:
    member = await committed(c, 20, 40)
    await ask(c["r2"], "rewind_job", pb.RewindJobRequest(step=40))
    await member.world(2)
    report = pb.ReportDamageRequest(step=40, attempt="x40", host="elsewhere", reason="a bit", generation=2)
    private = await ask(c["r2"], "report_damage", report)
    assert list(private.checkpoint.suspected) == ["primary"]
    # ranks on other hosts are to verify it
    await member.until(lambda: [each for each in member.all("checkpoint") if each.suspected])
    report.host = "third"
    found = await ask(c["r3"], "report_damage", report)
    assert found.checkpoint.state == pb.CHECKPOINT_STATE_CORRUPT
    assert (await member.world(3)).world.restore.step == 20


@in_rig(cluster, members=1)
async def test_a_copy_is_in_the_record_once_all_of_it_is_reported(c: Cluster) -> None:
    await committed(c, 20)
    copy = pb.ReportCopyRequest(step=20, attempt="x20", tier="s3", root="s3://b", rank=0, digest="d")
    await ask(c["r1"], "report_copy", copy)
    copy.sealed, copy.digest = True, "m"
    answer = await ask(c["r2"], "report_copy", copy)
    tiers = {tier.name: (tier.state, tier.shared) for tier in answer.checkpoint.tiers}
    assert tiers == {
        "primary": (pb.TIER_STATE_PRESENT, True),
        "s3": (pb.TIER_STATE_PRESENT, True),
    }
