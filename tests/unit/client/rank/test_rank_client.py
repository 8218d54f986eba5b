from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest

from strata import errors
from strata.client.rank.barriers import RoundBook, payloads_of
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, placed
from strata.core.stop.save_hold import SaveHold
from strata.errors import Unauthenticated, Unavailable
from strata.testing.virtual_time import in_virtual_time
from strata.v1.barriers_pb2 import (
    BARRIER_RESULT_BROKEN,
    BARRIER_RESULT_RELEASED,
    BARRIER_RESULT_TIMED_OUT,
    Arrival,
    BarrierOutcome,
)
from strata.v1.checkpoints_pb2 import Checkpoint, HoldSavesRequest
from strata.v1.members_pb2 import RankProgress, TrainingReport
from strata.v1.session_pb2 import ArrivalRefused, Down, Outcomes, Welcome, WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, RestorePoint
from strata.wire.errors import pack
from tests.unit.client.fake_rank import of_rank, rank_client
from tests.unit.client.fake_replica import Rig, done, rig


def barrier(
    client: RankClient, name: str = "b", payload: bytes = b"", **more: Any
) -> asyncio.Task[dict[int, bytes]]:
    ranks, timeout_s = more.get("ranks", ()), more.get("timeout_s")
    return asyncio.create_task(client._barrier(name, payload, ranks, timeout_s))


def left_open(client: RankClient, name: str = "b") -> None:
    """Enter a barrier and ignore how it ends; the session's end may break it."""
    barrier(client, name).add_done_callback(lambda call: call.cancelled() or call.exception())


async def arrived(r: Rig, number: int) -> Arrival:
    """Return the only arrival in the `number`-th message of arrivals."""
    (one,) = (await r.serving.next("arrivals", after=number)).arrivals
    return cast("Arrival", one)


def reports_of(r: Rig) -> list[RankProgress]:
    """Return a list that collects the progress reports which the rank passes to its session."""
    reports: list[RankProgress] = []
    r.session.progress = lambda _generation, ranks: reports.extend(ranks)  # type: ignore[method-assign,assignment]  # passed on
    return reports


def end(r: Rig, arrival: Arrival, result: Any, *missing: int) -> None:
    outcome = BarrierOutcome(
        name=arrival.name,
        generation=arrival.generation,
        round=arrival.round,
        result=result,
        missing=missing,
        reason="1 of 2 arrived",
    )
    r.serving.send(Down(outcomes=Outcomes(outcomes=[outcome])))


@of_rank()
async def test_each_call_is_the_next_round_of_its_name(r: Rig, client: RankClient) -> None:
    for number, (name, round_) in enumerate([("a", 1), ("a", 2), ("b", 1), ("a", 3)]):
        call = barrier(client, name, b"mine")
        arrival = await arrived(r, number)
        assert (arrival.name, arrival.round, list(arrival.ranks)) == (name, round_, [0])
        r.serving.release(arrival, r0=b"mine", r1=b"other")
        assert await call == {0: b"mine", 1: b"other"}


@of_rank()
async def test_rounds_begin_after_the_barrier_floors_of_the_world(r: Rig, client: RankClient) -> None:
    r.serving.world(1, barrier_floors={"a": 4})
    await asyncio.sleep(0.01)
    left_open(client, "a")
    assert (await arrived(r, 0)).round == 5


@of_rank()
async def test_a_local_deadline_is_unavailable_and_the_retry_is_the_same_round(
    r: Rig, client: RankClient
) -> None:
    call = barrier(client, timeout_s=2.0)
    arrival = await arrived(r, 0)
    assert arrival.timeout_ms == 2000
    with pytest.raises(errors.Unavailable, match="no outcome"):
        await call
    retry = barrier(client, timeout_s=2.0)
    await asyncio.sleep(0.1)
    assert len(r.serving.all("arrivals")) == 1, "it has arrived already"
    r.serving.release(arrival)
    assert await retry == {}
    left_open(client)
    assert (await arrived(r, 1)).round == 2


@in_virtual_time()
async def test_an_abandoned_round_logs_no_unhandled_error() -> None:
    """From Python 3.14 on, asyncio hands the failure of a shielded future to the loop, which prints it."""
    logged: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: logged.append(context))
    async with rank_client() as (r, client):
        with pytest.raises(errors.Unavailable, match="no outcome"):
            await barrier(client, timeout_s=2.0)
        interrupted = barrier(client, "c")
        await arrived(r, 1)
        interrupted.cancel()
        await asyncio.wait((interrupted,))
    await asyncio.sleep(0.1)
    assert not logged


@of_rank()
async def test_an_outcome_that_came_between_two_calls_is_delivered_and_not_skipped(
    r: Rig, client: RankClient
) -> None:
    call = barrier(client)
    arrival = await arrived(r, 0)
    call.cancel()  # the waiting thread was interrupted
    r.serving.release(arrival, r1=b"x")
    await asyncio.sleep(0.1)
    r.serving.world(1, barrier_floors={"b": 1})
    await asyncio.sleep(0.1)
    assert await barrier(client) == {1: b"x"}
    left_open(client)
    assert (await arrived(r, 1)).round == 2


@of_rank()
async def test_a_broken_round_ends_and_its_error_names_the_missing_ranks(r: Rig, client: RankClient) -> None:
    call = barrier(client)
    end(r, await arrived(r, 0), BARRIER_RESULT_TIMED_OUT, 1)
    with pytest.raises(errors.BarrierTimeout) as timeout:
        await call
    assert timeout.value.missing == ("rank 1",)
    call = barrier(client)
    second = await arrived(r, 1)
    assert second.round == 2
    end(r, second, BARRIER_RESULT_BROKEN, 1)
    with pytest.raises(errors.BarrierBroken) as broken:
        await call
    assert not isinstance(broken.value, errors.BarrierTimeout)


@of_rank()
async def test_a_newer_world_makes_every_call_stale_until_it_is_joined(r: Rig, client: RankClient) -> None:
    first = barrier(client)
    r.serving.release(await arrived(r, 0))
    await first
    waiting = barrier(client)
    await arrived(r, 1)
    r.serving.world(2, rank=1)
    with pytest.raises(errors.StaleGeneration):
        await waiting
    with pytest.raises(errors.StaleGeneration):
        await client._barrier("b", b"", (), None)
    with pytest.raises(errors.StaleGeneration):
        client.check()
    with pytest.raises(errors.StaleGeneration):
        client.progress(1)
    await client._rejoin(10)
    assert (client.generation, client.rank) == (2, 1)
    client.check()
    again = barrier(client)
    arrival = await arrived(r, 2)
    assert (arrival.generation, arrival.round, list(arrival.ranks)) == (2, 1, [1])
    r.serving.release(arrival)
    await again


@of_rank()
async def test_a_rejoin_logs_its_wait_only_if_it_waits(
    r: Rig, client: RankClient, caplog: pytest.LogCaptureFixture
) -> None:
    client._session._observer = client._shared_session.watcher
    r.serving.world(2, rank=1)
    await asyncio.sleep(0.01)
    await client._rejoin(10)
    assert "waiting" not in caplog.text
    with pytest.raises(errors.Unavailable, match="newer than generation 2") as error:
        await client._rejoin(10)
    assert "StaleGeneration" in error.value.hint
    assert "waiting up to 10 s" in caplog.text
    assert (client.generation, client.rank) == (2, 1)
    client.check()


@of_rank()
async def test_a_refused_arrival_does_not_count(r: Rig, client: RankClient) -> None:
    with pytest.raises(errors.QuotaExceeded):
        await client._barrier("b", b"x" * 5000, (), None)
    call = barrier(client)
    first = await arrived(r, 0)
    refusal = ArrivalRefused(
        name="b", generation=1, round=1, ranks=[0], error=pack(errors.QuotaExceeded("too many"))
    )
    r.serving.send(Down(arrival_refused=refusal))
    with pytest.raises(errors.QuotaExceeded, match="too many"):
        await call
    left_open(client)
    assert first.round == (await arrived(r, 1)).round == 1


@of_rank()
async def test_check_raises_after_a_failed_job_or_an_ended_session(r: Rig, client: RankClient) -> None:
    r.serving.world(1, phase=JOB_PHASE_FAILED, phase_reason="three generations without a step")
    await asyncio.sleep(0.01)
    with pytest.raises(errors.JobFailed, match="three generations"):
        client.check()
    r.session._finish(errors.StaleIncarnation("replaced"))
    with pytest.raises(errors.StaleIncarnation):
        client.check()


@in_virtual_time()
async def test_a_standalone_trainer_waits_for_a_world_with_a_place() -> None:
    async with rig() as r:
        watcher = RankObserver()
        r.session._observer = watcher
        waiting = asyncio.create_task(placed(r.session, watcher, job="j", worker_id="w", after=0))
        r.serving.world(1, rank=None)
        await asyncio.sleep(1)
        assert not waiting.done()
        r.serving.world(2, rank=1, size=4)
        place = await waiting
        assert (place.generation, place.rank, place.world_size, place.restore_point) == (2, 1, 4, None)
        later = asyncio.create_task(placed(r.session, watcher, job="j", worker_id="w", after=2))
        update = WorldUpdate()
        update.world.generation = 3
        update.world.restore.CopyFrom(RestorePoint(step=9, attempt="x"))
        update.place.first_rank = 0
        r.serving.send(Down(world=update))
        restored = (await later).restore_point
        assert restored is not None
        assert restored.step == 9
        never = asyncio.create_task(placed(r.session, watcher, job="j", worker_id="w", after=3))
        r.serving.world(3, rank=None, phase=JOB_PHASE_DONE)
        with pytest.raises(errors.Refused, match="done"):
            await never


@of_rank()
async def test_clients_of_a_shared_session_share_its_rounds_and_the_last_one_leaves(
    r: Rig, first: RankClient
) -> None:
    r.serving.answer = lambda up: (
        r.serving.links[-1].close() if up.WhichOneof("message") == "leave" else done(up)
    )
    second = RankClient(first._shared_session, first._loop)
    for number, client in enumerate([first, second, first]):
        call = barrier(client)
        arrival = await arrived(r, number)
        assert arrival.round == number + 1
        r.serving.release(arrival)
        await call
    await first._detach()
    with pytest.raises(errors.Unavailable, match="closed"):
        first.check()
    second.check()
    assert not r.serving.all("leave")
    await second._detach()
    assert r.serving.all("leave")


@in_virtual_time()
async def test_a_failing_observer_callback_does_not_stop_the_others() -> None:
    watcher, seen = RankObserver(), []

    def broken(_: Checkpoint) -> None:
        raise ZeroDivisionError

    watcher.checkpoint_callbacks += [broken, lambda checkpoint: seen.append(checkpoint.step)]
    watcher.on_checkpoint(Checkpoint(step=3))
    assert seen == [3]


def test_a_round_open_here_is_not_skipped_by_a_floor() -> None:
    with asyncio.Runner() as runner:
        book = RoundBook()
        book.floors({"a": 2})
        assert book.next_round("a") == 3
        pending: asyncio.Future[BarrierOutcome] = runner.get_loop().create_future()
        book.arrived("a", pending)
        book.floors({"a": 9, "b": 1})
        assert (book.next_round("a"), book.next_round("b")) == (3, 2)
        book.delivered("a", BarrierOutcome(round=3))
        assert book.pending("a") is None
        assert book.next_round("a") == 4


def test_a_released_outcome_has_payloads_and_an_unknown_result_is_refused() -> None:
    released = BarrierOutcome(result=BARRIER_RESULT_RELEASED, payloads={1: b"x"})
    assert payloads_of(released) == {1: b"x"}
    with pytest.raises(errors.Refused):
        payloads_of(BarrierOutcome(name="b"))


@of_rank()
async def test_a_report_carries_the_newest_step_and_the_times_of_all_steps(
    r: Rig, client: RankClient
) -> None:
    reports = reports_of(r)
    for step in range(1, 41):
        client.progress(step, "step", own_s=0.25 if step > 5 else 9.0, data_wait_s=0.05)
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    assert reports[0].step == 1, "the first one at once"
    assert len(reports) <= 4, "at most five a second"
    assert not reports[0].step_times.median_compute_us, "it warms up"
    last = reports[-1]
    assert (last.step, last.step_us) == (40, 250_000)
    assert (last.step_times.median_compute_us, last.step_times.median_data_wait_us) == (200_000, 50_000)
    assert last.step_times.best_compute_us == 200_000
    client.progress(41, "eval")
    await asyncio.sleep(0.2)
    assert (reports[-1].step, reports[-1].phase) == (41, "eval")
    client.progress(42)
    client.progress(43)
    client._reports.send()  # as `close` does
    assert reports[-1].step == 43


@of_rank()
async def test_steps_that_follow_each_other_wake_the_background_thread_up_once(
    r: Rig, client: RankClient
) -> None:
    woken = 0
    soon = client._loop.soon

    def counted(callback: Callable[[], None]) -> None:
        nonlocal woken
        woken += 1
        soon(callback)

    client._loop.soon = counted  # type: ignore[method-assign]
    for step in range(1, 200):
        client.progress(step, "step", own_s=0.02)
        await asyncio.sleep(0.02)
    assert woken == 1
    await asyncio.sleep(1.0)
    client.progress(200, "step", own_s=0.02)
    assert woken == 2, "after a pause nobody is awake"


@of_rank()
async def test_a_training_report_is_built_only_if_it_is_sent(r: Rig, client: RankClient) -> None:
    reports = reports_of(r)
    made: list[int] = []

    def training(samples: int) -> Callable[[], TrainingReport]:
        return lambda: made.append(samples) or TrainingReport(samples=samples)  # type: ignore[func-returns-value]

    client.progress(1, "step", training=training(1))
    await asyncio.sleep(0.05)
    client.progress(2, "step", training=training(2))
    client.progress(3, "step", training=training(3))
    await asyncio.sleep(0.5)
    assert [(each.step, each.training.samples) for each in reports] == [(1, 1), (3, 3)]
    assert made == [1, 3]
    assert {each.age_ms for each in reports} == {0}, (
        "replicas take what they hear of a rank in the order of its time"
    )


@of_rank()
async def test_progress_of_an_ended_generation_is_not_sent_in_the_next(r: Rig, client: RankClient) -> None:
    reports = reports_of(r)
    client.progress(7, "step")
    client._shared_session.place = replace(client._shared_session.place, generation=2)
    await asyncio.sleep(0.5)
    assert reports == []
    client.progress(5, "step")
    await asyncio.sleep(0.5)
    assert [each.step for each in reports] == [5]


@of_rank()
async def test_a_step_is_reported_even_if_its_training_report_cannot_be_built(
    r: Rig, client: RankClient
) -> None:
    reports = reports_of(r)
    client.progress(1, "step", training=lambda: TrainingReport(samples=2**70))
    await asyncio.sleep(0.1)
    client.progress(2, "step")
    await asyncio.sleep(0.5)
    assert [(each.step, each.HasField("training")) for each in reports] == [(1, False), (2, False)]


# -- a rank that cannot save reports it with each progress report, and once for the record


HOLD = SaveHold(step=20, reason="disk full", host="a", held_s=3.0)


async def last_report(r: Rig, number: int) -> RankProgress:
    """Return the rank's report in the `number`-th message of progress."""
    (report,) = (await r.serving.next("progress", after=number - 1)).ranks
    assert isinstance(report, RankProgress)
    return report


def calls(r: Rig) -> list[HoldSavesRequest]:
    return [call.hold_saves for call in r.serving.all("call") if call.HasField("hold_saves")]


@of_rank()
async def test_every_report_of_the_rank_carries_the_save_hold_until_it_ends(
    r: Rig, client: RankClient
) -> None:
    client.progress(20, "step")
    assert not (await last_report(r, 1)).HasField("save_hold")
    client.hold_saves(HOLD)
    report = await last_report(r, 2)
    assert (report.step, report.phase) == (20, "step"), "without a step of its own"
    assert (report.save_hold.step, report.save_hold.reason, report.save_hold.host) == (20, "disk full", "a")
    await asyncio.sleep(60)
    client.progress(24, "step")
    report = await last_report(r, 3)
    assert report.step == 24
    assert 62_900 <= report.save_hold.held_ms <= 64_000, "it is as old as it is by now"
    client.hold_saves(None)
    assert not (await last_report(r, 4)).HasField("save_hold")


@of_rank(2)
async def test_a_save_hold_is_recorded_once_despite_failovers_and_not_after_it_ends(
    r: Rig, client: RankClient
) -> None:
    client.hold_saves(HOLD)
    await asyncio.sleep(1)
    (request,) = calls(r)
    assert (request.step, request.reason, request.host, request.author.rank) == (20, "disk full", "a", 0)
    r.serving.down()
    await asyncio.sleep(5)
    assert len(calls(r)) == 1, "told again to the replica that took over"
    assert (await last_report(r, 1)).save_hold.step == 20, "and shown by it"
    client.hold_saves(None)
    await asyncio.sleep(1)
    r.serving.down()
    await asyncio.sleep(5)
    assert (await last_report(r, 2)).HasField("save_hold") is False
    assert len(calls(r)) == 1, "what it had heard before, and nothing since"


@of_rank()
async def test_a_hold_after_the_session_ended_raises_no_error(r: Rig, client: RankClient) -> None:
    await r.session.leave()
    client.hold_saves(HOLD)
    await asyncio.sleep(1)


# -- a rank logs each kind of connection failure once, not once a try or an endpoint


def test_failed_tries_at_several_endpoints_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    watcher = RankObserver()
    with caplog.at_level(logging.WARNING, logger="strata.client"):
        for _ in range(3):
            for endpoint in ("a:1", "b:2", "c:3"):
                watcher.on_disconnected(Unavailable(f"{endpoint}: connection refused"))
        assert len(caplog.records) == 1
        watcher.on_disconnected(Unauthenticated("the token was revoked"))
        assert len(caplog.records) == 2, "another kind of trouble is news"
        watcher.on_connected(Welcome(replica="r1"))
        assert "connected again" in caplog.records[-1].getMessage()
        watcher.on_disconnected(Unavailable("a:1: connection refused"))
        assert len(caplog.records) == 4, "a new outage is told anew"
