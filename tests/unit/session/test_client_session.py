from __future__ import annotations

import asyncio

import pytest

from strata import errors
from strata.session.pending_requests import CALLS_AT_ONCE
from strata.session.served import Limits
from strata.testing.virtual_time import in_virtual_time
from strata.v1.barriers_pb2 import Arrival
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.common_pb2 import Token
from strata.v1.members_pb2 import RankProgress
from strata.v1.session_pb2 import ArrivalRefused, Done, Down, Ended, Reply, Up
from strata.v1.worlds_pb2 import GetWorldRequest, GetWorldResponse, World
from strata.wire.errors import pack
from tests.unit.client.fake_replica import UID, Rig, arrival, rig
from tests.unit.coordinator.rig import in_rig


@in_rig(rig, 2)
async def test_a_member_sends_its_incarnation_and_token_in_each_hello(r: Rig) -> None:
    (hello,) = r.serving.hellos
    assert (hello.member.worker_id, hello.member.boot, hello.member.incarnation) == ("w", "boot-1", 0)
    assert hello.token == Token()
    assert (r.session.incarnation, r.session.token.uid, r.session.token.revision) == (7, "uid-1", 100)
    r.serving.down()
    now = await r.reconnected(2)
    assert now.hellos[-1].member.incarnation == 7
    assert now.hellos[-1].token == Token(uid="uid-1", revision=100)


@in_rig(rig, 2)
async def test_open_arrivals_are_sent_to_the_next_replica_with_their_age(r: Rig) -> None:
    _ = r.session.arrive(arrival(payloads=[b"x"], phases=["step"], timeout_ms=9000))
    await r.serving.next("arrivals")
    await asyncio.sleep(2)
    r.serving.down()
    now = await r.reconnected(2)
    (again,) = (await now.next("arrivals")).arrivals
    assert 2000 <= again.age_ms < 2200
    assert (list(again.payloads), list(again.phases), again.timeout_ms) == ([b"x"], ["step"], 9000)


@in_rig(rig)
async def test_arrivals_of_one_moment_go_as_one_message_a_round(r: Rig) -> None:
    futures = [
        r.session.arrive(arrival(rank=rank, payloads=[b"%d" % rank] if rank else (), timeout_ms=5000 - rank))
        for rank in (3, 0, 2)
    ]
    _ = r.session.arrive(arrival("other", rank=0))
    await r.serving.until(lambda: bool(r.serving.all("arrivals")))
    (message,) = r.serving.all("arrivals")
    merged, other = message.arrivals
    assert (merged.name, list(merged.ranks), list(merged.payloads)) == ("b", [0, 2, 3], [b"", b"2", b"3"])
    assert merged.timeout_ms == 4997, "the first to time out counts"
    assert (other.name, list(other.ranks)) == ("other", [0])
    r.serving.release(merged, r2=b"2")
    assert [(await future).payloads for future in futures] == [{2: b"2"}] * 3
    assert len(r.observer.outcomes) == 1


@in_rig(rig)
async def test_only_new_arrivals_are_sent_and_a_repeated_one_is_the_same_arrival(r: Rig) -> None:
    first = r.session.arrive(arrival(rank=0))
    await r.serving.next("arrivals")
    assert r.session.arrive(arrival(rank=0)) is first
    _ = r.session.arrive(arrival(rank=1))
    second = await r.serving.next("arrivals", after=1)
    assert [list(a.ranks) for a in second.arrivals] == [[1]]


@in_rig(rig)
async def test_a_refused_arrival_fails_alone(r: Rig) -> None:
    good, bad = r.session.arrive(arrival(rank=0)), r.session.arrive(arrival(rank=1))
    sent = (await r.serving.next("arrivals")).arrivals[0]
    refusal = pack(errors.InvalidArgument("not yours"))
    r.serving.send(
        Down(
            arrival_refused=ArrivalRefused(job="j", name="b", generation=1, round=1, ranks=[1], error=refusal)
        )
    )
    with pytest.raises(errors.InvalidArgument, match="not yours"):
        await bad
    assert not good.done()
    r.serving.release(sent)
    await good


@in_rig(rig)
async def test_a_newer_world_ends_older_rounds_as_stale(r: Rig) -> None:
    old, new = r.session.arrive(arrival(generation=1)), r.session.arrive(arrival(generation=2))
    r.serving.world(2)
    with pytest.raises(errors.StaleGeneration):
        await old
    assert not new.done()
    with pytest.raises(errors.StaleGeneration):
        _ = r.session.arrive(arrival(generation=1))
    assert r.session.world is not None
    assert r.session.world.place.worker_id == "w"


@in_rig(rig)
async def test_arrivals_that_could_never_count_are_refused_at_once(r: Rig) -> None:
    r.serving.world(1, size=1024)
    await asyncio.sleep(0.01)
    for wrong, error in [
        (arrival(payloads=[b"x" * 513]), errors.QuotaExceeded),
        (arrival(payloads=[b"x", b"y"]), errors.InvalidArgument),
        (arrival(participants=[1, 2]), errors.InvalidArgument),
        (arrival("no/slash"), errors.InvalidArgument),
    ]:
        with pytest.raises(error):
            _ = r.session.arrive(wrong)
    _ = r.session.arrive(arrival(participants=[0, 1], payloads=[b"x" * 4096]))
    with pytest.raises(errors.InvalidArgument, match="other participants"):
        _ = r.session.arrive(arrival(rank=1))


@in_rig(rig, 2)
async def test_calls_are_submitted_again_under_their_id_and_answered_once(r: Rig) -> None:
    call = asyncio.create_task(r.session.call(GetWorldRequest(job="j")))
    first = await r.serving.next("call")
    r.serving.down()
    now = await r.reconnected(2)
    assert await now.next("call") == first
    reply = GetWorldResponse(world=World(generation=4))
    for _ in range(2):
        now.send(Down(reply=Reply(id=first.id, get_world=reply, token=Token(uid="uid-1", revision=250))))
    assert (await call).world.generation == 4
    now.world(4)  # as of revision 100
    await asyncio.sleep(0.1)
    assert r.session.token.revision == 250, "nobody goes back in time"
    assert not await _sent_again(r.session, now)


async def _sent_again(session: object, replica: object) -> bool:
    before = len(replica.received)  # type: ignore[attr-defined]
    await asyncio.sleep(0.5)
    return any(up.WhichOneof("message") != "tick" for up in replica.received[before:])  # type: ignore[attr-defined]


@in_rig(rig)
async def test_errors_are_typed_and_retryable_errors_are_retried(r: Rig) -> None:
    refusals = [errors.Unavailable("no etcd"), errors.NotLeader("not me"), errors.NotFound("no such job")]

    def answer(up: Up) -> Down | None:
        if up.WhichOneof("message") != "call":
            return None
        return Down(reply=Reply(id=up.call.id, error=pack(refusals.pop(0))))

    r.serving.answer = answer
    with pytest.raises(errors.NotFound, match="no such job"):
        await r.session.call(GetWorldRequest(job="j"))
    assert len({call.id for call in r.serving.all("call")}) == 1


@in_virtual_time()
async def test_a_thousand_calls_at_once_never_meet_the_limit_of_a_session() -> None:
    """An agent makes the calls of all its ranks. A replica refuses calls above a session's limit, without a retry."""
    most = 0

    def answer(up: Up) -> Down | None:
        nonlocal most
        waiting.append(up.call.id) if up.WhichOneof("message") == "call" else None
        most = max(most, len(waiting))
        return None

    waiting: list[int] = []
    async with rig() as r:
        r.serving.answer = answer
        calls = [
            asyncio.create_task(r.session.call(GetWorldRequest(job=f"j{i}"), timeout_s=None))
            for i in range(1000)
        ]
        for _ in range(1000):
            await r.serving.until(lambda: bool(waiting))
            await asyncio.sleep(0.001)
            r.serving.send(Down(reply=Reply(id=waiting.pop(0), get_world=GetWorldResponse())))
        await asyncio.gather(*calls)
    assert most <= CALLS_AT_ONCE < Limits().calls


@in_rig(rig)
async def test_a_call_without_an_answer_is_unavailable_and_a_late_answer_is_ignored(r: Rig) -> None:
    with pytest.raises(errors.Unavailable, match="within 3 s"):
        await r.session.call(GetWorldRequest(job="j"), timeout_s=3)
    (call,) = r.serving.all("call")
    r.serving.send(Down(reply=Reply(id=call.id, done=Done())))
    await asyncio.sleep(0.1)
    assert r.session.connected
    with pytest.raises(errors.InvalidArgument):
        await r.session.call(World())


@in_rig(rig, 2)
async def test_the_exit_of_a_rank_is_sent_until_it_is_durable(r: Rig) -> None:
    exit_ = asyncio.create_task(r.session.rank_exit(generation=3, rank=1, code=-9, reason="killed"))
    first = await r.serving.next("rank_exit")
    assert (first.generation, first.rank, first.code) == (3, 1, -9)
    await asyncio.sleep(100)
    assert not exit_.done()
    r.serving.down()
    now = await r.reconnected(2)
    assert await now.next("rank_exit") == first
    now.send(Down(reply=Reply(id=first.id, done=Done())))
    await exit_


@in_rig(rig, 2)
async def test_the_newest_progress_is_sent_and_sent_again_after_a_reconnect(r: Rig) -> None:
    for step in range(50):
        r.session.progress(1, [RankProgress(rank=0, step=step), RankProgress(rank=1, step=step)])
    first = await r.serving.next("progress")
    assert [(p.rank, p.step) for p in first.ranks] == [(0, 49), (1, 49)]
    await asyncio.sleep(2)
    assert len(r.serving.all("progress")) == 1
    r.session.progress(2, [RankProgress(rank=5, step=1)])
    await r.serving.next("progress", after=1)
    await asyncio.sleep(2)
    r.serving.down()
    now = await r.reconnected(2)
    again = await now.next("progress")
    assert (again.generation, [p.rank for p in again.ranks]) == (2, [5])
    assert 2000 <= again.ranks[0].age_ms < 2500


@in_rig(rig, 2)
async def test_a_control_plane_that_was_restored_ends_the_session(r: Rig) -> None:
    for replica in r.replicas:
        replica.uid = f"{UID}.1.77aa"
    waiting = r.session.arrive(arrival())
    r.serving.down()
    with pytest.raises(errors.ClusterRestored):
        await waiting
    with pytest.raises(errors.ClusterRestored):
        await r.running
    with pytest.raises(errors.ClusterRestored):
        _ = r.session.arrive(arrival())


@in_rig(rig, 2)
async def test_a_session_at_another_cluster_waits_for_its_own_cluster(r: Rig) -> None:
    """If etcd lost its data, the session waits until an operator restores it."""
    for replica in r.replicas:
        replica.uid = "uid-2"
    waiting = r.session.arrive(arrival())
    r.serving.down()
    await asyncio.sleep(120)
    assert not r.running.done()
    assert not waiting.done()
    assert isinstance(r.observer.disconnections[-1], errors.ClusterReplaced)
    assert sum(len(replica.hellos) for replica in r.replicas) < 150, "it does not hammer"
    for replica in r.replicas:
        replica.uid = UID
    r.serving.up()
    there = await r.reconnected(len(r.observer.connected) + 1)
    assert (await there.next("arrivals")).arrivals[0].name == "b"


@in_rig(rig, 2)
async def test_an_ended_message_ends_the_session_for_good(r: Rig) -> None:
    call = asyncio.create_task(r.session.call(GetWorldRequest(job="j")))
    await r.serving.next("call")
    r.serving.send(Down(ended=Ended(error=pack(errors.StaleIncarnation("replaced")))))
    with pytest.raises(errors.StaleIncarnation):
        await call
    with pytest.raises(errors.StaleIncarnation):
        await r.running
    assert isinstance(r.session.error, errors.StaleIncarnation)


@in_rig(rig)
async def test_leaving_is_confirmed_and_ends_the_session(r: Rig) -> None:

    def answer(up: Up) -> None:
        if up.WhichOneof("message") == "leave":
            r.serving.links[-1].close()

    r.serving.answer = answer
    r.session.progress(1, [RankProgress(rank=0, step=1)])
    r.session.progress(1, [RankProgress(rank=0, step=2)])
    await r.session.leave("done")
    await r.running
    assert [rank.step for report in r.serving.all("progress") for rank in report.ranks][-1:] == [2]
    assert r.serving.all("leave")[0].reason == "done"
    assert r.session.error is None
    with pytest.raises(errors.StaleIncarnation, match="client was closed"):  # no retry
        _ = r.session.arrive(arrival())
    await r.session.leave("again")


@in_rig(rig)
async def test_leaving_without_an_answer_takes_5_s(r: Rig) -> None:
    loop = asyncio.get_running_loop()
    began = loop.time()
    await r.session.leave("done")
    assert 4.9 < loop.time() - began < 5.5
    await r.running


@in_rig(rig, 2)
async def test_a_leave_is_sent_to_the_next_replica_if_the_first_one_dies(r: Rig) -> None:
    leaving = asyncio.create_task(r.session.leave("done"))
    await r.serving.next("leave")
    first, second = r.serving, r.others[0]
    second.answer = lambda up: second.links[-1].close() if up.WhichOneof("message") == "leave" else None
    first.down()
    await leaving
    assert second.all("leave")
    assert [first.hellos[0].leaving, second.hellos[0].leaving] == [False, True]
    await r.running


@pytest.mark.parametrize(
    "refusal", [errors.Refused("job j is done"), errors.StaleIncarnation("w is another")]
)
@in_rig(rig, 2)
async def test_leaving_succeeds_if_the_next_replica_does_not_know_the_member(
    r: Rig, refusal: errors.StrataError
) -> None:
    """The first replica removed the member and died before it answered.

    The job is done, so the missing member is no failure.
    """
    leaving = asyncio.create_task(r.session.leave("done"))
    await r.serving.next("leave")
    r.others[0].refuse_hello = refusal
    r.serving.down()
    await leaving
    await r.running
    assert r.session.error is None


@in_rig(rig)
async def test_checkpoints_reach_the_observer_and_unknown_messages_are_ignored(r: Rig) -> None:
    r.serving.send(Down())
    r.serving.send(Down(checkpoint=Checkpoint(step=5)))
    await asyncio.sleep(0.1)
    assert [c.step for c in r.observer.checkpoints] == [5]


@in_rig(rig, 1)
async def test_a_request_above_the_message_limit_is_refused_at_once(r: Rig) -> None:
    with pytest.raises(errors.QuotaExceeded, match="bytes"):
        await r.session.call(GetWorldRequest(job="j" * (4 << 20)))
    assert r.session.connected


@in_rig(rig, 1)
async def test_arrivals_after_a_reconnect_are_split_below_the_message_limit(r: Rig) -> None:
    """A hundred ranks arrive at twelve barriers, with payloads of the largest allowed size."""
    waiting = []
    for number in range(12):
        name, ranks = f"b{number}", list(range(100))
        waiting.append(
            r.session.arrive(
                Arrival(
                    job="j",
                    name=name,
                    generation=1,
                    round=1,
                    ranks=ranks,
                    payloads=[b"x" * 4096] * 100,
                    participants=ranks,
                )
            )
        )
    r.serving.down()
    r.serving.up()
    now = await r.reconnected(2)
    received = [await now.next("arrivals")]
    while sum(len(up.arrivals) for up in received) < 12:
        received.append(await now.next("arrivals", after=len(received)))
    assert {a.name for up in received for a in up.arrivals} == {f"b{n}" for n in range(12)}
    assert max(up.ByteSize() for up in received) < 2 << 20
    assert not any(outcome.done() for outcome in waiting)
