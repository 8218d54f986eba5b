"""The relay between ranks and the agent's session to a replica, over links in memory, in virtual time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata.errors import ClusterRestored, InvalidArgument, Refused, StaleGeneration, StrataError
from strata.session.served import serve
from strata.testing.links import pair
from strata.testing.virtual_time import in_virtual_time
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.session_pb2 import Up, WorldUpdate
from strata.v1.worlds_pb2 import GetWorldResponse, World
from strata.wire.errors import unpack
from tests.unit.agent.relay_rig import GRACE_S, arrivals, news, node, place, up


@in_virtual_time()
async def test_a_rank_receives_its_welcome_and_its_world() -> None:
    async with node() as it:
        it.upstream.world = WorldUpdate(world=World(generation=1, size=4))
        link = await it.dial(3)
        welcome = (await link.recv()).welcome
        assert (welcome.incarnation, welcome.replica, welcome.detect_s) == (77, "w", 5.0)
        assert (welcome.token.uid, welcome.token.revision) == ("u", 9)
        assert (await link.recv()).world.world.generation == 1


@pytest.mark.parametrize(
    ("hello", "refusal"),
    [
        ({"rank": 2, "generation": 2}, StaleGeneration),
        ({"rank": 4}, Refused),
        ({"rank": 2, "job": "other"}, Refused),
        ({"rank": 2, "worker": "other"}, Refused),
    ],
)
@in_virtual_time()
async def test_a_hello_with_the_wrong_generation_rank_job_or_worker_is_refused(
    hello: dict[str, Any], refusal: type[StrataError]
) -> None:
    async with node() as it:
        link = await it.dial(**hello)
        with pytest.raises(refusal):
            await link.recv()


@in_virtual_time()
async def test_no_rank_is_admitted_between_two_generations() -> None:
    async with node() as it:
        it.relay.set_place(None)
        link = await it.dial(2)
        with pytest.raises(StaleGeneration, match="none"):
            await link.recv()


@in_virtual_time()
async def test_only_ranks_are_served() -> None:
    async with node() as it:
        ours, theirs = pair()
        served = asyncio.create_task(serve(theirs, it.relay.accept))
        ours.send(up(hello={"member": {"worker_id": "w"}}))
        with pytest.raises(InvalidArgument, match="only ranks"):
            await ours.recv()
        await served


@in_virtual_time()
async def test_arrivals_reach_the_replica_and_outcomes_reach_every_rank_of_the_generation() -> None:
    async with node() as it:
        two, three = await it.attached(2), await it.attached(3)
        two.send(arrivals(2))
        three.send(up(tick={"sequence": 1}))
        await asyncio.sleep(0.1)
        ((arrival, _),) = it.upstream.arrived
        assert (arrival.name, arrival.round, list(arrival.ranks)) == ("b", 4, [2])
        it.relay.on_outcome(BarrierOutcome(name="b", generation=1, round=4))
        it.relay.on_outcome(BarrierOutcome(name="of another", generation=2, round=1))
        it.relay.on_outcome(BarrierOutcome(name="b", generation=1, round=5))
        for link in (two, three):
            rounds = [(await news(link)).outcomes.outcomes[0].round for _ in range(2)]
            assert rounds == [4, 5]


@pytest.mark.parametrize(
    "message",
    [arrivals(2, ranks=[3]), arrivals(2, ranks=[2, 3]), arrivals(2, generation=2)],
    ids=["another's", "another's too", "of another generation"],
)
@in_virtual_time()
async def test_a_rank_arrives_for_itself_only(message: Up) -> None:
    async with node() as it:
        link = await it.attached(2)
        link.send(message)
        refused = (await news(link)).arrival_refused
        assert isinstance(unpack(refused.error), InvalidArgument)
        assert (refused.name, refused.round) == ("b", 4)
        assert not it.upstream.arrived


@in_virtual_time()
async def test_an_arrival_refused_by_the_replica_is_refused_to_the_rank() -> None:
    async with node() as it:
        link = await it.attached(2)
        link.send(arrivals(2))
        await asyncio.sleep(0.1)
        it.upstream.arrived[0][1].set_exception(Refused("other participants"))
        refused = (await news(link)).arrival_refused
        assert unpack(refused.error).message == "other participants"
        assert list(refused.ranks) == [2]


@in_virtual_time()
async def test_the_replicas_answers_and_errors_reach_the_rank_unchanged() -> None:
    async with node() as it:
        link = await it.attached(2)
        it.upstream.answer = GetWorldResponse(world=World(generation=5))
        link.send(up(call={"id": 11, "get_world": {"job": "j"}}))
        reply = (await news(link)).reply
        assert (reply.id, reply.get_world.world.generation, reply.token.revision) == (11, 5, 9)
        it.upstream.answer = Refused("not now")
        link.send(up(call={"id": 12, "get_world": {"job": "j"}}))
        reply = (await news(link)).reply
        assert (reply.id, unpack(reply.error).message) == (12, "not now")
        link.send(up(call={"id": 13}))
        assert isinstance(unpack((await news(link)).reply.error), InvalidArgument)
        assert len(it.upstream.requests) == 2


@in_virtual_time()
async def test_a_restored_control_plane_ends_the_generation_of_a_rank() -> None:
    async with node() as it:
        link = await it.attached(2)
        link.send(arrivals(2))
        await asyncio.sleep(0.1)
        it.upstream.arrived[0][1].set_exception(ClusterRestored("it was restored"))
        assert type(unpack((await news(link)).arrival_refused.error)) is StaleGeneration
        it.upstream.answer = ClusterRestored("it was restored")
        link.send(up(call={"id": 12, "get_world": {"job": "j"}}))
        assert type(unpack((await news(link)).reply.error)) is StaleGeneration


@in_virtual_time()
async def test_a_rank_of_an_ending_generation_cannot_request_a_stop_of_the_job() -> None:
    async with node() as it:
        link = await it.attached(2)
        it.relay.set_place(None)
        link.send(up(call={"id": 11, "stop_job": {"job": "j", "generation": 1}}))
        assert isinstance(unpack((await news(link)).reply.error), StaleGeneration)
        assert not it.upstream.requests


@in_virtual_time()
async def test_a_rank_cannot_report_exit_codes_other_than_75_and_78_or_another_ranks_exit() -> None:
    async with node() as it:
        link = await it.attached(2)
        for rank_exit in (
            {"rank": 2},
            {"rank": 2, "code": 1},
            {"rank": 3, "code": 75},
            {"rank": 3, "code": 78},
        ):
            link.send(up(rank_exit={"id": 1, "generation": 1, **rank_exit}))
            assert isinstance(unpack((await news(link)).reply.error), Refused)
        assert not it.stopped
        assert not it.lasting


@in_virtual_time()
async def test_a_rank_exit_with_78_is_reported_as_a_lasting_error() -> None:
    async with node() as it:
        link = await it.attached(2)
        link.send(up(rank_exit={"id": 1, "rank": 2, "generation": 1, "code": 78, "reason": "no bucket"}))
        assert not (await news(link)).reply.HasField("error")
        assert it.lasting == [(2, 1, "no bucket")]
        assert not it.stopped


@in_virtual_time()
async def test_a_rank_exit_with_75_is_reported_as_a_requested_stop() -> None:
    async with node() as it:
        link = await it.attached(2)
        link.send(up(rank_exit={"id": 1, "rank": 2, "generation": 1, "code": 75}))
        assert not (await news(link)).reply.HasField("error")
        assert it.stopped == [(2, 1)]


@in_virtual_time()
async def test_a_rank_reports_progress_only_for_itself_and_its_generation() -> None:
    async with node() as it:
        link = await it.attached(2)
        for generation, ranks in ((1, [2, 3]), (2, [2]), (1, [3]), (1, [2])):
            reports = [{"rank": r} for r in ranks]
            link.send(up(progress={"generation": generation, "ranks": reports}))
        await asyncio.sleep(0.1)
        assert it.upstream.reported == [(1, [2]), (1, [2])]


@in_virtual_time()
async def test_ranks_of_an_old_generation_receive_the_newer_world() -> None:
    async with node() as it:
        link = await it.attached(2)
        it.relay.on_checkpoint(Checkpoint(generation=1, step=20))
        it.relay.on_checkpoint(Checkpoint(generation=2, step=30))
        it.relay.set_place(None)
        it.relay.on_world(WorldUpdate(world=World(generation=2)))
        assert (await news(link)).checkpoint.step == 20
        assert (await news(link)).world.world.generation == 2


@in_virtual_time()
async def test_a_rank_disconnected_beyond_the_grace_is_evicted() -> None:
    async with node() as it:
        link = await it.attached(2)
        link.break_off()
        await asyncio.sleep(GRACE_S * 0.9)
        assert it.evicted == []
        await asyncio.sleep(GRACE_S * 0.2)
        assert it.evicted == [(2, 1)]


@in_virtual_time()
async def test_a_rank_that_reconnects_within_the_grace_is_not_evicted() -> None:
    async with node() as it:
        (await it.attached(2)).break_off()
        await asyncio.sleep(GRACE_S * 0.9)
        await it.attached(2)
        await asyncio.sleep(GRACE_S * 5)
        assert it.evicted == []


@in_virtual_time()
async def test_a_rank_that_left_or_is_of_an_old_generation_is_not_evicted() -> None:
    async with node() as it:
        left, of_the_past = await it.attached(2), await it.attached(3)
        left.send(up(leave={"reason": "done"}))
        assert await left.recv() is None
        of_the_past.break_off()
        await asyncio.sleep(GRACE_S * 0.5)
        it.relay.set_place(place(2))
        await asyncio.sleep(GRACE_S * 5)
        assert it.evicted == []


@in_virtual_time()
async def test_a_second_session_of_a_rank_takes_over_from_the_first() -> None:
    async with node() as it:
        first = await it.attached(2)
        second = await it.attached(2)
        assert await first.recv() is None
        it.relay.on_checkpoint(Checkpoint(generation=1, step=20))
        assert (await news(second)).checkpoint.step == 20
        await asyncio.sleep(GRACE_S * 5)
        assert it.evicted == []


@in_virtual_time()
async def test_a_rank_that_reads_nothing_is_disconnected_but_not_evicted() -> None:
    """A debugger holds this rank, while the other ranks continue and every rank's link gets the messages."""
    async with node() as it:
        link = await it.attached(2)
        link.stall()
        for _ in range(5_000):
            it.relay.on_checkpoint(Checkpoint(generation=1, step=20))
        await asyncio.sleep(GRACE_S * 5)
        assert it.evicted == []
        await it.attached(2)


@pytest.mark.parametrize("connected", [True, False])
@in_virtual_time()
async def test_ticks_report_whether_a_coordinator_serves(connected: bool) -> None:
    async with node() as it:
        it.upstream.connected = connected
        link = await it.attached(2)
        assert (await link.recv()).tick.ready is connected


@in_virtual_time()
async def test_a_rank_moves_to_a_newer_generation_in_process() -> None:
    async with node() as it:
        mover = await it.attached(3, in_process=True)
        other = await it.attached(2)
        assert it.relay.in_process() == {1}, "by local rank"
        it.relay.set_place(None)
        newer = place(2, first_rank=0)
        it.relay.set_place(newer)
        it.relay.move(newer, {1})
        received = (await news(mover)).place
        assert (received.world.generation, received.member.first_rank, received.local_rank) == (2, 0, 1)
        again = await it.attached(1, generation=2, in_process=True)
        assert it.attachments == [(3, 1), (2, 1), (1, 2)]
        assert await mover.recv() is None, "its session of the old generation is over"
        assert it.relay.in_process() == {1}
        await it.attached(0, generation=2)
        assert await other.recv() is None, "whatever rank it was: this one has its slot"
        it.relay.on_world(WorldUpdate(world=World(generation=2)))
        assert (await news(again)).HasField("world")
