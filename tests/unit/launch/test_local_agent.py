"""The local agent with a fake session, and tiny real commands as ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import signal

import pytest
from structlog.testing import capture_logs

from strata.agent.rendezvous import JOIN_BARRIER, Meeting
from strata.core.exit_codes import DO_NOT_REQUEUE
from strata.errors import ConfigError, StaleGeneration
from strata.launch.exit_status import exit_status
from strata.v1.barriers_pb2 import (
    BARRIER_RESULT_BROKEN,
    BARRIER_RESULT_RELEASED,
    BARRIER_RESULT_TIMED_OUT,
    BarrierOutcome,
)
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, RestorePoint
from tests.unit.launch.stage import FOREVER, Exit, shell, stage, update


async def test_each_slot_runs_a_process_with_its_place_in_the_environment() -> None:
    script = (
        'test "$LOCAL_RANK/$LOCAL_WORLD_SIZE/$WORLD_SIZE/$GROUP_RANK" = "$((RANK - 2))/2/4/1" &&'
        ' test "$MASTER_ADDR:$MASTER_PORT/$STRATA_GENERATION" = "192.0.2.1:4711/3" && exit $((40 + RANK))'
    )
    async with stage(*shell(script)) as it:
        await it.enter(update(3, first_rank=2, slots=2))
        exits = {await it.upstream.exits.get(), await it.upstream.exits.get()}
    assert exits == {Exit(3, 2, 42, "exited with 42"), Exit(3, 3, 43, "exited with 43")}


async def test_ranks_start_only_once_all_members_have_arrived() -> None:
    async with stage("true") as it:
        it.local_agent.on_world(update(1, first_rank=2, slots=2))
        arrival, outcome = await it.upstream.arrivals.get()
        assert (arrival.job, arrival.name, arrival.generation, arrival.round) == ("j", JOIN_BARRIER, 1, 1)
        assert list(arrival.ranks) == [2, 3]
        assert list(arrival.payloads) == [b"", b""], "only rank 0's member says where to meet"
        assert it.upstream.exits.empty()
        payloads = {0: Meeting("192.0.2.9", 99).encode()}
        outcome.set_result(BarrierOutcome(result=BARRIER_RESULT_RELEASED, payloads=payloads))
        place = await it.started()
        assert (place.master_addr, place.master_port) == ("192.0.2.9", 99)
        assert (await it.upstream.exits.get()).code == 0


async def test_rank_0_s_member_offers_a_fresh_port_each_generation() -> None:
    async with stage(*FOREVER) as it:
        it.local_agent.on_world(update(1))
        first = Meeting.decode((await it.join()).payloads[0])
        it.local_agent.on_world(update(2))
        second = Meeting.decode((await it.join()).payloads[0])
    assert first.address == second.address == "192.0.2.1"
    assert first.port != second.port


async def test_a_signal_is_reported_as_its_negative() -> None:
    async with stage(*shell("kill -9 $$")) as it:
        await it.enter(update(1))
        assert await it.upstream.exits.get() == Exit(1, 0, -9, "was ended by SIGKILL")


async def test_a_newer_world_ends_the_ranks_and_starts_them_again() -> None:
    async with stage(*shell('test "$TORCHELASTIC_RESTART_COUNT" = 1 && exit 5; exec sleep 1000')) as it:
        await it.enter(update(1))
        place = await it.enter(update(2, first_rank=1))
        assert (place.generation, list(place.ranks)) == (2, [1])
        exit_ = await it.upstream.exits.get()
    assert (exit_.generation, exit_.code) == (2, 5), "the end of the old generation's rank is no news"


async def test_no_rank_may_attach_between_two_generations() -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(1))
        it.local_agent.on_world(update(2))
        assert await it.rank_socket.places.get() is None
        await it.join()
        assert (await it.started()).generation == 2


async def test_a_newer_world_during_the_join_barrier_is_followed() -> None:
    async with stage("true") as it:
        it.local_agent.on_world(update(1))
        _, abandoned = await it.upstream.arrivals.get()
        assert (await it.enter(update(2))).generation == 2
        assert abandoned.cancelled()


async def test_a_stale_join_waits_for_the_next_world() -> None:
    async with stage("true") as it:
        it.local_agent.on_world(update(1))
        _, outcome = await it.upstream.arrivals.get()
        outcome.set_exception(StaleGeneration("generation 1 has ended"))
        assert (await it.enter(update(2))).generation == 2


async def test_a_join_that_a_death_broke_waits_for_the_next_world() -> None:
    async with stage("true") as it:
        it.local_agent.on_world(update(1))
        arrival, outcome = await it.upstream.arrivals.get()
        outcome.set_result(
            BarrierOutcome(name=arrival.name, result=BARRIER_RESULT_BROKEN, reason="rank 3 went")
        )
        assert (await it.enter(update(2))).generation == 2


async def test_a_join_barrier_timeout_ends_the_generation() -> None:
    async with stage("true") as it:
        it.local_agent.on_world(update(1, first_rank=2))
        arrival, outcome = await it.upstream.arrivals.get()
        assert arrival.timeout_ms == 300_000
        outcome.set_result(
            BarrierOutcome(
                name=arrival.name, result=BARRIER_RESULT_TIMED_OUT, reason="rank 3 is missing", missing=[3]
            )
        )
        exit_ = await it.upstream.exits.get()
        assert (exit_.generation, exit_.rank, exit_.code) == (1, 2, 1)
        assert "rank 3 is missing" in exit_.reason
        assert (await it.enter(update(2))).generation == 2


async def test_an_older_update_changes_nothing() -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(2, revision=50))
        it.local_agent.on_world(update(1, revision=40))
        it.local_agent.on_world(update(1, revision=40, phase=JOB_PHASE_FAILED))
        assert (await it.enter(update(3, revision=60))).generation == 3
        assert it.upstream.exits.empty()


@pytest.mark.parametrize("forming", [False, True])
async def test_without_a_place_nothing_is_started(forming: bool) -> None:
    async with stage("true") as it:
        waiting = update(1, first_rank=0 if forming else None)
        waiting.world.forming = forming
        it.local_agent.on_world(waiting)
        assert (await it.enter(update(2))).generation == 2
        assert (await it.upstream.exits.get()).generation == 2


@pytest.mark.parametrize(
    ("waits", "printed"),
    [
        ("1 of at least 2 members are here", "waits: 1 of at least 2 members are here"),
        ("", "the job has the 2 members it takes; this one stands by"),
    ],
)
async def test_an_agent_without_a_place_logs_why(waits: str, printed: str) -> None:
    with capture_logs() as logs:
        async with stage("true") as it:
            without = update(1, first_rank=None)
            without.waits = waits
            it.local_agent.on_world(without)
            assert await it.rank_socket.places.get() is None, "it has begun to follow"
            await it.enter(update(2))
    assert [log["reason"] for log in logs if log["event"] == "world.waiting"] == [printed]


async def test_losing_a_place_ends_the_ranks() -> None:
    async with stage(*shell("trap 'exit 9' TERM; sleep 1000 & wait")) as it:
        await it.enter(update(1))
        it.local_agent.on_world(update(2, first_rank=None))
        assert await it.rank_socket.places.get() is None
        it.local_agent.on_world(update(3, first_rank=None, phase=JOB_PHASE_DONE))
        assert await it.done == 0
        assert it.upstream.exits.empty()


async def test_a_job_that_is_done_ends_with_0() -> None:
    async with stage("true") as it:
        await it.enter(update(1))
        await it.upstream.exits.get()
        it.local_agent.on_world(update(1, phase=JOB_PHASE_DONE, revision=101))
        assert await it.done == 0
        assert it.upstream.left.get_nowait() == "the job has ended"


@pytest.mark.parametrize(
    ("script", "status"), [("exit 7", 7), ("kill -SEGV $$", 128 + signal.SIGSEGV), ("exec sleep 1000", None)]
)
async def test_a_failed_job_is_not_requeued_and_logs_the_rank_status(script: str, status: int | None) -> None:
    with capture_logs() as logs:
        await failed_job(script, status)
    (ended,) = (line for line in logs if line["event"] == "job.ended")
    assert ended.get("rank_status") == status


async def failed_job(script: str, status: int | None) -> None:
    async with stage(*shell(script)) as it:
        await it.enter(update(1))
        if status is not None:
            await it.upstream.exits.get()
        it.local_agent.on_world(update(1, phase=JOB_PHASE_FAILED, revision=101))
        assert await it.done == DO_NOT_REQUEUE


async def test_the_exit_code_is_that_of_the_first_failed_rank_of_the_last_generation() -> None:
    async with stage("true") as it:
        reports = it.local_agent._reports
        reports.report(1, 0, 6, "exited with 6")
        reports.report(2, 0, 7, "exited with 7")
        reports.report(2, 1, 1, "exited with 1")
        assert reports.first_code == 7


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_is_handed_on_and_ends_the_run(number: signal.Signals) -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(1))
        it.local_agent.request_stop(number)
        assert await it.done == 128 + number
        assert number.name in it.upstream.left.get_nowait()
        assert it.upstream.exits.empty()


async def test_a_second_signal_does_not_wait_for_the_grace() -> None:
    async with stage(*shell("trap '' TERM INT; while :; do sleep 1000; done"), stop_grace_s=1000) as it:
        await it.enter(update(1))
        it.local_agent.request_stop(signal.SIGTERM)
        it.local_agent.request_stop(signal.SIGTERM)
        assert await it.done == 128 + signal.SIGTERM


async def test_signals_are_obeyed_during_the_grace_of_a_restart() -> None:
    async with stage(*shell("trap '' TERM INT; while :; do sleep 1000; done")) as it:
        it.local_agent._config = dataclasses.replace(it.local_agent._config, restart_grace_s=1000)
        await it.enter(update(1))
        it.local_agent.on_world(update(2))
        assert await it.rank_socket.places.get() is None
        it.local_agent.request_stop(signal.SIGTERM)
        it.local_agent.request_stop(signal.SIGTERM)
        assert await it.done == 128 + signal.SIGTERM
        assert it.upstream.arrivals.empty(), "who stops does not join the new world"


async def test_a_rank_that_will_not_stop_is_killed_after_the_grace() -> None:
    async with stage(*shell("trap '' TERM INT; while :; do sleep 1000; done"), stop_grace_s=0.1) as it:
        await it.enter(update(1))
        it.local_agent.request_stop(signal.SIGTERM)
        assert await it.done == 128 + signal.SIGTERM


@pytest.mark.parametrize("when", ["before any world", "at the barrier"])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 128 + signal.SIGINT), (signal.SIGTERM, 75)])
async def test_a_signal_is_obeyed_while_waiting(when: str, number: int, status: int) -> None:
    """A member that is preempted before its ranks started must be requeued, whatever its command is."""
    async with stage("true") as it:
        if when == "at the barrier":
            it.local_agent.on_world(update(1))
            await it.upstream.arrivals.get()
        it.local_agent.request_stop(number)
        assert await it.done == status


async def test_a_silent_rank_is_killed_with_the_reason() -> None:
    async with stage(*shell("kill -STOP $$; sleep 1000")) as it:
        await it.enter(update(2, slots=2, size=2))
        it.local_agent.evict(0, 1, "frozen")
        it.local_agent.evict(1, 2, "frozen")
        exit_ = await it.upstream.exits.get()
        assert exit_ == Exit(2, 1, -9, "frozen")
        assert it.upstream.exits.empty(), "what was said of an older generation counts for nothing"


@pytest.mark.parametrize("command", ["/no/such/program", "no-such-program"])
async def test_a_command_that_cannot_run_is_a_config_error(command: str) -> None:
    async with stage(command) as it:
        it.local_agent.on_world(update(1))
        await it.join()
        with pytest.raises(ConfigError, match=command):
            await it.done


async def test_the_restore_point_is_passed_to_the_ranks() -> None:
    point = RestorePoint(step=40, attempt="a", record_generation=1, path="file:///c", manifest_digest="d")
    async with stage(*shell('test -n "$STRATA_RESTORE" && exit 40')) as it:
        await it.enter(update(1, restore=point))
        assert (await it.upstream.exits.get()).code == 40


@pytest.mark.parametrize(("new", "step", "warned"), [(True, 40, 1), (True, 0, 0), (False, 40, 0)])
async def test_new_on_an_unfinished_job_warns_once_that_it_has_no_effect(
    new: bool, step: int, warned: int
) -> None:
    point = RestorePoint(step=step) if step else None
    with capture_logs() as logs:
        async with stage(*FOREVER, new=new) as it:
            await it.enter(update(2, restore=point))
            await it.enter(update(3, restore=RestorePoint(step=50)))
    warnings = [log for log in logs if log["event"] == "new.without_effect"]
    assert len(warnings) == warned
    for log in warnings:
        assert log["log_level"] == "warning"
        assert log["reason"] == "--new has no effect: job j is unfinished and goes on from step 40"
        assert "--job" in log["hint"]
        assert "strata jobs delete j" in log["hint"]


def test_the_exit_status_follows_the_shell_convention() -> None:
    assert [exit_status(code) for code in (0, 7, -9, -15)] == [0, 7, 137, 143]


@pytest.mark.parametrize("forming", [False, True], ids=["a standby", "no world yet"])
async def test_a_member_without_ranks_whose_device_has_failed_leaves(forming: bool) -> None:
    """A member without ranks cannot be drained, and would get ranks once another member is lost."""
    async with stage(*FOREVER) as it:
        world = update(1, first_rank=None)
        world.world.forming = forming
        it.local_agent.on_world(world)
        await asyncio.sleep(0)
        it.local_agent.become_unfit("device 1: XID 79: the GPU has fallen off the bus")
        assert await it.done == 75
        assert "XID 79" in it.upstream.left.get_nowait()


async def test_a_member_with_ranks_whose_device_has_failed_waits_to_be_drained() -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(1))
        it.local_agent.become_unfit("device 1: XID 79")
        it.local_agent.on_world(update(1, revision=101))
        await asyncio.sleep(0)
        assert not it.done.done()
        it.local_agent.on_world(update(2, first_rank=None))
        assert await it.done == 75
