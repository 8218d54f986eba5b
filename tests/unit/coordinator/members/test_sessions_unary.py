"""Members without a session: Register, Heartbeat, WaitBarrier, Leave."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable
from typing import Any

import pytest

from strata.coordinator.calls.barriers import WAIT_S
from strata.core.job import JobView
from strata.core.kv.view import View
from strata.core.stop.last_step import BEGIN_BARRIER
from strata.errors import (
    BarrierBroken,
    BarrierTimeout,
    Conflict,
    NotFound,
    Refused,
    StaleGeneration,
    StaleIncarnation,
    StrataError,
    Unavailable,
)
from strata.testing.mvcc import Revision
from strata.testing.serving import peer_address
from strata.v1 import barriers_pb2, checkpoints_pb2, datasets_pb2, members_pb2, recovery_pb2, worlds_pb2
from tests.not_none import not_none
from tests.unit.coordinator.rig import in_rig, now
from tests.unit.coordinator.serving_rig import JOB, Cluster, cluster, in_cluster
from tests.unit.coordinator.unary_client import Client, registered
from tests.unit.core.rig import release

DETECT_S = 5.0


async def beat(client: Client, *replicas: str) -> None:
    """Send a heartbeat a second, to one replica after another, until cancelled."""
    for replica in itertools.cycle(replicas):
        await asyncio.sleep(1)
        await client.heartbeat(replica)


async def refused(call: Awaitable[object]) -> StrataError:
    """Return the error that fails the call."""
    with pytest.raises(StrataError) as caught:
        await call
    return caught.value


async def until_removed(c: Cluster, worker: str) -> float:
    await c.alive[0].see(lambda view: view.get(JOB.worker(worker)) is None)
    return now()


@in_cluster(Client, "w0", members=1)
async def test_heartbeats_keep_a_member_alive_and_silence_is_its_death(c: Cluster, client: Client) -> None:
    response = await client.register("r1")
    assert response.detect_s == DETECT_S
    for _ in range(10):
        await asyncio.sleep(DETECT_S * 0.9)
        assert (await client.heartbeat("r1")).world.generation <= 1
    silent = now()
    assert DETECT_S <= await until_removed(c, "w0") - silent < DETECT_S + 1.5
    with pytest.raises(NotFound, match="not registered"):
        await client.heartbeat("r1")
    before = client.incarnation
    await client.register("r2")
    assert client.incarnation > before


@in_cluster(Client, "w0", members=1)
async def test_a_heartbeat_at_another_replica_is_passed_on_to_the_one_that_serves(
    c: Cluster, client: Client
) -> None:
    await client.register("r1")
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    before = c["r1"].view.revision
    for replica in ("r2", "r3") * 10:
        await asyncio.sleep(DETECT_S * 0.9)
        answer = await client.heartbeat(replica)
        assert (answer.place.worker_id, answer.phase) == ("w0", worlds_pb2.JOB_PHASE_RUNNING)
    entry = not_none(c.worker("w0"))
    assert (entry.create_revision, entry.record.served_by) == (client.incarnation, "instance-r1-1")
    assert entry.mod_revision <= before, "no heartbeat costs a write"
    silent = now()
    assert DETECT_S <= await until_removed(c, "w0") - silent < DETECT_S + 1.5
    with pytest.raises(NotFound):
        await client.heartbeat("r3")


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_heartbeat_that_cannot_be_forwarded_hands_the_member_over(c: Cluster, client: Client) -> None:

    def served_by() -> str:
        entry = not_none(c.worker("w0"))
        assert entry.create_revision == client.incarnation
        return entry.record.served_by

    c.partition("r1", "r2")  # r2 does not reach r1
    await asyncio.sleep(2)
    await client.heartbeat("r2")
    assert served_by() == "instance-r2-2"
    c.heal("r1", "r2")
    await c.ready()
    for link in c.board.links("r3", peer_address("r2")):
        link.stall()  # r2 looks frozen: r3 receives nothing from r2, and still counts r2 as ready
    began = now()
    await client.heartbeat("r3")
    assert now() - began < 1.2
    assert served_by() == "instance-r3-3"
    c["r3"].kill()
    await asyncio.sleep(1)
    await client.heartbeat("r1")
    assert served_by() == "instance-r1-1"
    for _ in range(5):
        await asyncio.sleep(3)
        await client.heartbeat("r2")
    assert served_by() == "instance-r1-1"


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_hand_over_whose_caller_timed_out_counts_as_a_heartbeat(c: Cluster, client: Client) -> None:
    c["r1"].kill()
    await asyncio.sleep(2)
    waiting = c.tasks.create_task(client.heartbeat("r2"))

    def give_up(_written: Revision) -> None:  # the client's deadline, at the worst moment
        waiting.cancel()

    leave = c.store.subscribe(give_up)
    await asyncio.wait([waiting])
    leave()
    handed_over = c.worker("w0")
    assert waiting.cancelled()
    assert handed_over is not None
    assert handed_over.record.served_by == "instance-r2-2"
    for _ in range(4):
        await asyncio.sleep(DETECT_S * 0.8)
        await client.heartbeat("r2")
    silent = now()
    assert DETECT_S <= await until_removed(c, "w0") - silent < DETECT_S + 1.5


@in_rig(cluster, members=9)
async def test_handing_many_members_over_does_not_count_as_broken_sessions(c: Cluster) -> None:
    clients = [Client(c, f"w{number}") for number in range(9)]
    for client in clients:
        await client.register("r1")
    c.partition("r1", "r2")
    await asyncio.sleep(2)
    for client in clients[1:]:
        await client.heartbeat("r2")
    assert c["r1"].service.failure_detector.sessions() == 1
    assert not c["r1"].service.failure_detector.spares()
    c.heal("r1", "r2")


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_heartbeat_hands_the_member_over_if_its_replica_has_no_session(
    c: Cluster, client: Client
) -> None:
    c["r1"].service.failure_detector.disconnected(
        not_none(c["r1"].service.failure_detector.find("job", "w0", client.boot))
    )
    await client.heartbeat("r2")
    entry = not_none(c.worker("w0"))
    assert (entry.create_revision, entry.record.served_by) == (client.incarnation, "instance-r2-2")


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_heartbeat_carries_progress_and_a_call_reports_the_exit_of_a_rank(
    c: Cluster, client: Client
) -> None:
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    ranks = [
        members_pb2.RankProgress(rank=0, step=7, phase="train"),
        members_pb2.RankProgress(rank=1, step=1, phase="not its own"),
    ]
    request = members_pb2.HeartbeatRequest(
        job="job",
        worker_id="w0",
        boot=client.boot,
        incarnation=client.incarnation,
        generation=1,
        ranks=ranks,
    )
    await client.call("r2", "heartbeat", request)
    (member,) = (await client.call("r2", "list_members", members_pb2.ListMembersRequest(job="job"))).members
    assert [(r.rank, r.step, r.phase) for r in member.ranks] == [(0, 7, "train")]
    report = members_pb2.ReportRankExitRequest(
        job="job", worker_id="w0", incarnation=client.incarnation, generation=1, rank=0
    )
    report.rank = 1
    with pytest.raises(Refused, match="does not run rank 1"):
        await client.call("r3", "report_rank_exit", report)
    report.rank = 0
    for replica in ("r3", "r1"):
        await client.call(replica, "report_rank_exit", report)
    await c["r2"].see(lambda view: view.get(JOB.phase) is not None)
    (member,) = (await client.call("r2", "list_members", members_pb2.ListMembersRequest(job="job"))).members
    assert not member.ranks, "of a job that has ended nothing is kept in memory"
    answer = await client.heartbeat("r2")
    assert (answer.phase, answer.phase_reason) == (worlds_pb2.JOB_PHASE_DONE, "all 1 ranks are done")


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_taken_name_is_a_conflict_and_a_replaced_member_is_stale(c: Cluster, client: Client) -> None:

    beating = c.tasks.create_task(beat(client, "r1"))
    with pytest.raises(Conflict):
        await Client(c, "w0", "another").register("r2")
    beating.cancel()
    await until_removed(c, "w0")
    await Client(c, "w0", "another").register("r2")
    with pytest.raises(StaleIncarnation):
        await client.heartbeat("r1")
    with pytest.raises(StaleIncarnation):
        await client.register("r1")


@in_cluster(registered, "w0", "r1", members=2)
async def test_a_session_and_a_call_meet_at_a_barrier(c: Cluster, client: Client) -> None:
    member = await c.member("w1").connect("r2")
    place = (await member.world()).place
    mine = 1 - place.first_rank
    with pytest.raises(Refused, match="does not run"):
        await client.wait("r3", place.first_rank)
    with pytest.raises(Refused, match="no such generation yet"):
        await client.wait("r3", mine, generation=2)
    with pytest.raises(NotFound, match="not registered"):
        await Client(c, "stranger").wait("r3", mine)
    client.incarnation += 1
    with pytest.raises(StaleIncarnation):
        await client.wait("r3", mine)
    client.incarnation -= 1
    waiting = c.tasks.create_task(client.wait("r3", mine))
    await asyncio.sleep(1)
    member.arrive([place.first_rank])
    assert (await waiting).result == (await member.outcome()).result
    gives_up = c.tasks.create_task(client.wait("r1", mine, 2))
    await asyncio.sleep(0.5)
    gives_up.cancel()
    member.arrive([place.first_rank], round_=2)
    await member.outcome(2)
    assert (await client.wait("r2", mine, 2)).round == 2, "a retry gets the same round's outcome"
    await client.heartbeat("r1")


@in_cluster(registered, "w0", "r1", members=2)
async def test_a_barrier_outlasts_its_wait_calls_and_the_replica_that_served_them(
    c: Cluster, client: Client
) -> None:
    member = await c.member("w1").connect("r2")
    theirs = (await member.world()).place.first_rank
    clock = asyncio.get_running_loop().time
    beating = c.tasks.create_task(beat(client, "r1", "r2"))
    for replica in ("r1", "r3"):
        began = clock()
        with pytest.raises(Unavailable, match="still open"):
            await client.wait(replica, 1 - theirs)
        assert clock() - began == pytest.approx(WAIT_S, abs=0.1)
    waiting = c.tasks.create_task(client.wait("r3", 1 - theirs))
    await asyncio.sleep(1)
    c["r3"].kill()
    waiting.cancel()
    member.arrive([theirs])
    assert (await client.wait("r1", 1 - theirs)).result == barriers_pb2.BARRIER_RESULT_RELEASED
    sent_away = c.tasks.create_task(refused(client.wait("r2", 1 - theirs, 2)))
    await asyncio.sleep(1)
    began = clock()
    c["r2"].service.part()
    assert isinstance(await sent_away, Unavailable)
    assert clock() == began, "a replica that stops keeps nobody waiting"
    beating.cancel()


@in_rig(cluster, members=2)
async def test_a_timed_out_broken_or_stale_round_raises_its_own_error(c: Cluster) -> None:
    clients = [Client(c, f"w{i}") for i in range(2)]
    for client in clients:
        await client.register("r1")
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    world = await clients[0].call("r1", "get_world", worlds_pb2.GetWorldRequest(job="job"))
    rank = {m.worker_id: m.first_rank for m in world.members}
    late = await refused(clients[0].wait("r2", rank["w0"], timeout_ms=500))
    assert isinstance(late, BarrierTimeout)
    assert list(late.missing) == [f"rank {rank['w1']}"]
    assert type(await refused(clients[1].wait("r3", rank["w1"], timeout_ms=500))) is BarrierTimeout
    waiting = c.tasks.create_task(refused(clients[0].wait("r1", rank["w0"], 2)))
    await asyncio.sleep(1)
    leave = members_pb2.LeaveRequest(job="job", worker_id="w1", incarnation=clients[1].incarnation)
    await clients[1].call("r2", "leave", leave)
    assert type(await waiting) in {BarrierBroken, StaleGeneration}
    await c["r3"].see(lambda view: JobView(view, JOB).head().record.generation > 1)  # type: ignore[union-attr]  # there is one
    assert type(await refused(clients[0].wait("r3", rank["w0"], 3))) is StaleGeneration


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_leave_removes_the_member_and_may_be_repeated(c: Cluster, client: Client) -> None:
    request = members_pb2.LeaveRequest(job="job", worker_id="w0", incarnation=client.incarnation)
    for replica in ("r2", "r1", "r3"):
        await client.call(replica, "leave", request)
    assert c.worker("w0") is None


@in_cluster(Client, "w0", members=2)
async def test_a_unary_member_registers_a_dataset_and_reads_assignment_and_recovery(
    c: Cluster, client: Client
) -> None:
    dataset = datasets_pb2.Dataset(name="imagenet", shards=10, uri="s3://x/{shard}")
    register = datasets_pb2.RegisterDatasetRequest(job="job", dataset=dataset)
    await client.register("r1")
    for replica in ("r1", "r2"):
        await client.call(replica, "register_dataset", register)
    register.dataset.shards = 11
    with pytest.raises(Conflict):
        await client.call("r1", "register_dataset", register)
    ask = datasets_pb2.GetAssignmentRequest(job="job")
    assert (await client.call("r3", "get_assignment", ask)).assign_epoch == 0
    await c.member("w1").connect("r2")
    await c["r1"].see(lambda view: view.get(JOB.assignment("imagenet")) is not None)
    answer = await client.call("r1", "get_assignment", ask)
    shards = {worker: list(s.index) for worker, s in answer.owners.items()}
    assert sorted(shard for owned in shards.values() for shard in owned) == list(range(10))
    one = datasets_pb2.GetAssignmentRequest(job="job", worker_id="w1", dataset="imagenet")
    only = await client.call("r1", "get_assignment", one)
    assert {w: list(s.index) for w, s in only.owners.items()} == {"w1": shards["w1"]}
    recovery = await client.call(
        "r1", "get_recovery", recovery_pb2.RecoveryRequest(job="job", worker_id="w1")
    )
    assert list(recovery.shards[0].shards) == shards["w1"]
    assert (recovery.world.generation, len(recovery.ranks)) == (1, 1)
    assert not recovery.HasField("checkpoint")
    missing = datasets_pb2.GetAssignmentRequest(job="job", dataset="other")
    with pytest.raises(NotFound):
        await client.call("r1", "get_assignment", missing)


@in_cluster(Client, "w0", replicas=1, members=1)
async def test_jobs_are_listed_and_an_unknown_one_is_not_found(c: Cluster, client: Client) -> None:
    await client.register("r1")
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    (job,) = (await client.call("r1", "list_jobs", worlds_pb2.ListJobsRequest())).jobs
    assert (job.name, job.workers, job.world.generation, job.has_latest) == ("job", 1, 1, False)
    assert (await client.call("r1", "get_job", worlds_pb2.GetJobRequest(job="job"))).job == job
    for name, request in (
        ("get_job", worlds_pb2.GetJobRequest(job="other")),
        ("get_world", worlds_pb2.GetWorldRequest(job="other")),
        ("list_members", members_pb2.ListMembersRequest(job="other")),
        ("list_barriers", barriers_pb2.ListBarriersRequest(job="other")),
        ("list_checkpoints", checkpoints_pb2.ListCheckpointsRequest(job="other")),
        ("list_datasets", datasets_pb2.ListDatasetsRequest(job="other")),
        ("get_recovery", recovery_pb2.RecoveryRequest(job="other", worker_id="w0")),
    ):
        with pytest.raises(NotFound, match="other"):
            await client.call("r1", name, request)


def bare(worker: str) -> members_pb2.HeartbeatRequest:
    """Return the heartbeat of a stub that knows no other call; the servicer fills in the job."""
    return members_pb2.HeartbeatRequest(job="job", worker_id=worker)


@in_cluster(Client, "w0", members=1)
async def test_bare_heartbeats_register_a_member_and_keep_it_alive_at_any_replica(
    c: Cluster,
    client: Client,
) -> None:
    first = await client.call("r1", "heartbeat", bare("w0"))
    assert first.phase == worlds_pb2.JOB_PHASE_RUNNING
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    await client.call("r1", "heartbeat", bare("w0"))
    incarnations = set()
    for replica in ("r2", "r3", "r1", "r2", "r3"):
        await asyncio.sleep(DETECT_S * 0.9)
        answer = await client.call(replica, "heartbeat", bare("w0"))
        incarnations.add(answer.place.incarnation)
        assert (answer.place.slots, answer.world.generation) == (1, 1)
    assert len(incarnations - {0}) == len(incarnations) == 1


@in_cluster(Client, "w0", members=1)
async def test_bare_heartbeats_of_several_workers_make_one_world_that_outlives_each_of_them(
    c: Cluster,
    client: Client,
) -> None:
    beats = [
        asyncio.create_task(_bare_beat(client, "w0", "r1")),
        asyncio.create_task(_bare_beat(client, "w1", "r2")),
    ]
    await c["r1"].see(_two_ranks)
    for _ in range(5):  # more losses than a job without a commit may have
        beats[1].cancel()
        await until_removed(c, "w1")
        beats[1] = asyncio.create_task(_bare_beat(client, "w1", "r3"))
        await c["r1"].see(_two_ranks)
    answer = await client.call("r1", "heartbeat", bare("w0"))
    assert (answer.phase, answer.world.size) == (worlds_pb2.JOB_PHASE_RUNNING, 2)
    for beat_ in beats:
        beat_.cancel()


def _two_ranks(view: View) -> bool:
    world = JobView(view, JOB).world()
    return world is not None and world.head.size == 2


async def _bare_beat(client: Client, worker: str, replica: str) -> None:
    while True:
        await client.call(replica, "heartbeat", bare(worker))
        await asyncio.sleep(1)


@in_cluster(Client, "w0", members=1)
async def test_a_bare_heartbeat_takes_no_name_from_a_process_that_lives(c: Cluster, client: Client) -> None:
    await client.register("r1")
    beats = asyncio.create_task(beat(client, "r1"))
    assert isinstance(await refused(client.call("r2", "heartbeat", bare("w0"))), Conflict)
    beats.cancel()
    with_boot = members_pb2.HeartbeatRequest(job="job", worker_id="w9", boot="b")
    assert isinstance(await refused(client.call("r1", "heartbeat", with_boot)), NotFound)


@in_cluster(registered, "w0", "r1", members=1)
async def test_every_replica_knows_the_age_of_unary_heartbeats_while_it_is_polled(
    c: Cluster,
    client: Client,
) -> None:
    beats = c.tasks.create_task(beat(client, "r1", "r2"))
    looker: Any = c["r3"].service.live
    for _ in range(6):
        looker.look("job", None)
        await asyncio.sleep(1)
    assert now() - not_none(looker.last_seen("job", "w0", client.incarnation)) < 2.5
    beats.cancel()
    silent = now()
    for _ in range(4):
        looker.look("job", None)
        await asyncio.sleep(1)
    last_heartbeat = not_none(looker.last_seen("job", "w0", client.incarnation))
    assert silent - 1.5 < last_heartbeat < silent + 0.5, "it grows while the client is silent"


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_heartbeat_response_carries_the_notice_and_the_later_pause(
    c: Cluster, client: Client
) -> None:
    await c["r1"].see(lambda view: view.get(JOB.head) is not None)
    c.store.execute(release(JOB, BEGIN_BARRIER))
    placed = await client.heartbeat("r1")
    assert (placed.place.worker_id, placed.world.generation, placed.HasField("notice")) == ("w0", 1, False)
    stop = worlds_pb2.StopJobRequest(
        job="job", action=worlds_pb2.STOP_ACTION_PAUSE, reason="why", grace_ms=5000
    )
    await client.call("r2", "stop_job", stop)
    await c["r1"].see(lambda view: view.get(JOB.notice(1)) is not None)
    answer = await client.heartbeat("r1")
    assert (answer.notice.action, answer.notice.reason) == (worlds_pb2.STOP_ACTION_PAUSE, "why")
    exit_ = members_pb2.ReportRankExitRequest(
        job="job", worker_id="w0", incarnation=client.incarnation, generation=1, rank=0, code=75
    )
    await client.call("r3", "report_rank_exit", exit_)
    await c["r1"].see(lambda view: view.get(JOB.phase) is not None)
    paused = await client.heartbeat("r1")
    assert (paused.phase, paused.phase_reason) == (worlds_pb2.JOB_PHASE_PAUSED, "paused: why")
    assert (paused.HasField("place"), paused.HasField("notice")) == (False, False)


@in_cluster(registered, "w0", "r1", members=1)
async def test_a_malformed_member_key_ends_no_replica_once_its_member_is_silent(
    c: Cluster, client: Client
) -> None:
    c.put(JOB.worker("w0"), b"by hand")
    await c["r1"].see(lambda view: not_none(view.get(JOB.worker("w0"))).value == b"by hand")
    await asyncio.sleep(DETECT_S + 2)
    assert len(c.alive) == 3
    c.delete(JOB.worker("w0"))
    assert client.incarnation
