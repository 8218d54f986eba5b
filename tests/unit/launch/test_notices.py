"""The local agent on a stop notice for its generation, and on a signal."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import pytest

from strata.agent import agent
from strata.core.exit_codes import DO_NOT_REQUEUE
from strata.errors import Unavailable
from strata.launch import stopping
from strata.launch.stopping import StopRequest
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    JOB_PHASE_PAUSED,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PAUSE,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_SCALE,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
)
from tests.unit.launch.stage import FOREVER, Exit, Stage, shell, stage, update

TERM, USR1, INT = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT
FINISHING = shell("read _ < $FIFO; exit 0")
"""A rank that ends with 0, as a finished training does, once the test writes to the FIFO."""
OBEDIENT = shell("trap 'exit 143' TERM; read _ < $FIFO; exit 75")
"""A rank that ends with 75, as after its last save, once the test writes to the FIFO; with 143 after SIGTERM."""


def notice(
    action: Any = STOP_ACTION_PREEMPT,
    *,
    generation: int = 1,
    grace_s: float = 20.0,
    workers: tuple[str, ...] = (),
) -> StopNotice:
    return StopNotice(
        generation=generation,
        action=action,
        reason="a test asks",
        worker_ids=workers,
        grace_ms=round(1000 * grace_s),
    )


@pytest.fixture
def stopped(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that lets the obedient rank end."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    monkeypatch.setenv("FIFO", str(fifo))

    async def stop() -> None:
        await asyncio.to_thread(fifo.write_text, "\n")

    return stop


async def reported(it: Stage, **more: Any) -> None:
    """Run the ranks of generation 1, let them support graceful stop, and deliver a stop notice."""
    await it.enter(update(1))
    it.local_agent.rank_supports_graceful_stop(0, 1)
    it.local_agent.on_world(update(1, revision=101, notice=notice(**more)))


async def test_ranks_that_support_notices_stop_themselves_and_the_member_leaves_with_75(stopped: Any) -> None:
    async with stage(*OBEDIENT) as it:
        await reported(it)
        await stopped()
        assert await it.done == 75
        assert it.upstream.exits.get_nowait() == Exit(1, 0, 75, "exited with 75")
        assert it.upstream.left.get_nowait() == "a test asks"


@pytest.mark.parametrize("action", [STOP_ACTION_PAUSE, STOP_ACTION_SCALE])
async def test_ranks_that_stay_wait_until_the_next_world_ends_them(action: Any) -> None:
    async with stage(*FOREVER) as it:
        await reported(it, action=action)
        if action == STOP_ACTION_PAUSE:
            waiting = update(2, first_rank=None, phase=JOB_PHASE_PAUSED)
            waiting.world.forming = True
            it.local_agent.on_world(waiting)
        assert (await it.enter(update(3))).generation == 3
        assert it.upstream.left.empty()
        assert it.upstream.exits.empty()


async def test_a_signal_while_ranks_wait_for_the_next_world_ends_the_agent() -> None:
    async with stage(*FOREVER) as it:
        await reported(it, action=STOP_ACTION_PAUSE)
        await asyncio.sleep(0)
        it.local_agent.request_stop(INT)
        assert await it.done == 128 + INT


async def test_leaving_ranks_end_by_themselves_even_if_the_next_world_has_formed(stopped: Any) -> None:
    """The next world is formed as soon as the last step of the ranks is saved."""
    async with stage(*OBEDIENT) as it:
        await reported(it)
        await asyncio.sleep(0)
        it.local_agent.on_world(update(2, first_rank=None, notice=notice(generation=2)))
        await asyncio.sleep(0)
        await stopped()
        assert await it.done == 75
        assert it.upstream.exits.get_nowait() == Exit(1, 0, 75, "exited with 75")


async def test_a_drain_stops_only_the_named_worker(stopped: Any) -> None:
    async with stage(*OBEDIENT) as it:
        await reported(it, action=STOP_ACTION_DRAIN, workers=("w2",))
        assert (await it.enter(update(2))).generation == 2
        it.local_agent.rank_supports_graceful_stop(0, 2)
        drain = notice(STOP_ACTION_DRAIN, generation=2, workers=("w",))
        it.local_agent.on_world(update(2, revision=201, notice=drain))
        await stopped()
        assert await it.done == 75


@pytest.mark.parametrize(
    ("supports_graceful_stop", "grace_s"),
    [(False, 20.0), (True, 0.0), (True, 0.01)],
    ids=["heedless", "at once", "too late"],
)
async def test_a_rank_that_misses_its_stop_deadline_is_killed_and_counts_as_stopped(
    supports_graceful_stop: bool, grace_s: float
) -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(1))
        if supports_graceful_stop:
            it.local_agent.rank_supports_graceful_stop(0, 1)
        it.local_agent.on_world(update(1, revision=101, notice=notice(grace_s=grace_s)))
        assert await it.done == 75
        exit_ = it.upstream.exits.get_nowait()
        assert (exit_.code, exit_.reason) == (75, "ended without a common step: a test asks")


async def test_ranks_that_do_not_leave_are_ended_soon_after_their_generation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stopping, "LEAVE_S", 0.01)
    async with stage(*FOREVER) as it:
        await reported(it, grace_s=1000)
        await asyncio.sleep(0)
        it.local_agent.on_world(update(2, first_rank=None, notice=notice(generation=2)))
        assert await it.done == 75


async def test_an_agent_does_not_wait_for_ranks_of_a_failed_generation() -> None:
    async with stage(*FOREVER) as it:
        await reported(it, grace_s=1000, action=STOP_ACTION_PAUSE)
        assert (await it.enter(update(2))).generation == 2


@pytest.mark.parametrize("how", ["a notice", "a signal", "a signal once they have ended"])
@pytest.mark.parametrize(
    ("phase", "status"), [(JOB_PHASE_DONE, 0), (JOB_PHASE_FAILED, DO_NOT_REQUEUE), (None, 75)]
)
async def test_ranks_that_finished_before_they_stopped_end_as_the_job_does(
    how: str, phase: Any, status: int, stopped: Any
) -> None:
    async with stage(*FINISHING) as it:
        await it.enter(update(1))
        it.local_agent.rank_supports_graceful_stop(0, 1)
        if how == "a notice":
            it.local_agent.on_world(update(1, revision=101, notice=notice()))
        elif how == "a signal":
            it.local_agent.request_stop(TERM)
            _, answer = await it.upstream.calls.get()
            answer.set_result(StopJobResponse(notice=notice()))
        await stopped()
        assert (await it.upstream.exits.get()).code == 0
        if how == "a signal once they have ended":
            it.local_agent.request_stop(TERM)
        await asyncio.sleep(0)
        it.local_agent.on_world(update(2) if phase is None else update(1, revision=150, phase=phase))
        assert await it.done == status


async def test_a_first_signal_ends_the_wait_for_the_job_outcome(
    stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "REPORT_S", 0.01)
    async with stage(*FINISHING, preempt_grace_s=1000.0) as it:
        await reported(it)
        it.upstream.deaf = asyncio.Event()
        looks = asyncio.Event()
        after_all = it.local_agent._done_after_all

        async def looked(*given: Any) -> Any:
            looks.set()
            return await after_all(*given)

        it.local_agent._done_after_all = looked  # type: ignore[method-assign, assignment]  # to see that it waits
        await stopped()
        await looks.wait()
        it.local_agent.request_stop(TERM)
        assert await it.done == 75, "though nobody hears how its rank ended"


async def test_a_first_signal_ends_the_wait_for_delivery_of_the_exit_reports(
    stopped: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with stage(*OBEDIENT) as it:
        it.upstream.deaf = asyncio.Event()
        waits: list[float | None] = []
        waiting = asyncio.Event()

        async def never_delivered(limit_s: float | None = None) -> None:
            waits.append(limit_s)
            if len(waits) == 2:
                waiting.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(it.local_agent._reports, "wait_delivered", never_delivered)
        await reported(it)
        await stopped()
        await waiting.wait()
        it.local_agent.request_stop(TERM)
        assert await it.done == 75


# -- signals ------------------------------------------------------------------------------------


async def signalled(it: Stage, number: int) -> tuple[StopJobRequest, asyncio.Future[Any]]:
    await it.enter(update(1))
    it.local_agent.rank_supports_graceful_stop(0, 1)
    it.local_agent.request_stop(number)
    request, answer = await it.upstream.calls.get()
    assert isinstance(request, StopJobRequest)
    return request, answer


@pytest.mark.parametrize("number", [TERM, USR1])
async def test_a_signal_preempts_all_ranks_and_the_status_is_75(number: signal.Signals, stopped: Any) -> None:
    async with stage(*OBEDIENT) as it:
        request, answer = await signalled(it, number)
        assert (request.job, request.action, request.generation) == ("j", STOP_ACTION_PREEMPT, 1)
        assert (request.reason, request.grace_ms) == (f"{number.name} to w", 25_000)
        answer.set_result(StopJobResponse(notice=notice()))
        await stopped()
        assert await it.done == 75
        assert it.upstream.left.get_nowait() == f"{number.name}: a test asks"


async def test_a_rank_about_to_announce_graceful_stop_is_waited_for(stopped: Any) -> None:
    async with stage(*OBEDIENT) as it:
        await it.enter(update(1))
        it.local_agent.rank_attached(0, 1)
        it.local_agent.request_stop(TERM)
        await asyncio.sleep(0)
        it.local_agent.rank_supports_graceful_stop(0, 1)
        _, answer = await it.upstream.calls.get()
        answer.set_result(StopJobResponse(notice=notice()))
        await stopped()
        assert await it.done == 75


async def test_a_notice_requested_by_the_ranks_themselves_counts() -> None:
    """The agent passed the signal on to its ranks, and the ranks reached a coordinator although the agent could not."""
    async with stage(*shell("trap 'exit 75' TERM; while :; do sleep 0.1; done")) as it:
        _, answer = await signalled(it, TERM)
        it.local_agent.on_world(update(1, revision=101, notice=notice()))
        answer.set_exception(Unavailable("no coordinator"))
        assert await it.done == 75


async def test_a_member_may_leave_alone(stopped: Any) -> None:
    async with stage(*OBEDIENT, preempt="member") as it:
        request, answer = await signalled(it, TERM)
        assert (request.action, list(request.worker_ids)) == (STOP_ACTION_DRAIN, ["w"])
        answer.set_result(StopJobResponse(notice=notice(STOP_ACTION_DRAIN, workers=("w",))))
        await stopped()
        assert await it.done == 75


async def test_ranks_that_are_still_starting_count_as_stopped_and_the_status_is_75() -> None:
    """They have not called strata.init yet, so no rank of the generation has begun a step."""
    async with stage(*FOREVER, wait_graceful_stop_support=True) as it:
        await it.enter(update(1))
        it.local_agent.request_stop(TERM)
        request, answer = await it.upstream.calls.get()
        assert isinstance(request, StopJobRequest)
        answer.set_result(StopJobResponse(notice=notice()))
        assert await it.done == 75
        assert it.upstream.exits.get_nowait().code == 75
        assert it.upstream.left.get_nowait() == "SIGTERM: a test asks"


async def test_a_restarted_rank_that_supported_graceful_stop_counts_as_starting() -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(1))
        it.local_agent.rank_supports_graceful_stop(0, 1)
        await it.enter(update(2))
        it.local_agent.request_stop(TERM)
        _, answer = await it.upstream.calls.get()
        answer.set_result(StopJobResponse(notice=notice(generation=2)))
        assert await it.done == 75


async def test_ranks_without_graceful_stop_end_with_the_signal_status() -> None:
    async with stage(*FOREVER) as it:
        await it.enter(update(1))
        it.local_agent.request_stop(TERM)
        assert await it.done == 128 + TERM
        assert it.upstream.calls.empty()


async def test_without_a_notice_the_signal_is_handed_on() -> None:
    async with stage(*FOREVER) as it:
        _, answer = await signalled(it, TERM)
        answer.set_result(StopJobResponse())
        assert await it.done == 75, "it goes on from the last checkpoint once it is requeued"
        assert it.upstream.left.get_nowait() == "stopped by SIGTERM"


async def test_an_undelivered_stop_request_is_sent_again_once_a_coordinator_returns() -> None:
    """The agent's ranks have ended meanwhile.

    Without the report, this member would count as dead, and its generation as failed.
    """
    async with stage(*FOREVER) as it:
        _, answer = await signalled(it, TERM)
        answer.set_exception(Unavailable("no coordinator"))
        request, answer = await it.upstream.calls.get()
        assert isinstance(request, StopJobRequest)
        assert (request.action, request.generation) == (STOP_ACTION_PREEMPT, 1)
        assert it.upstream.left.empty()
        answer.set_result(StopJobResponse(notice=notice()))
        assert await it.done == 75
        assert it.upstream.exits.get_nowait().code == 75
        assert it.upstream.left.get_nowait() == "stopped by SIGTERM"


@pytest.mark.parametrize("why", ["nobody comes back", "a second signal"])
async def test_an_undeliverable_stop_request_does_not_block_the_agents_exit(why: str) -> None:
    async with stage(*FOREVER) as it:
        _, answer = await signalled(it, TERM)
        answer.set_exception(Unavailable("no coordinator"))
        _, answer = await it.upstream.calls.get()
        if why == "a second signal":
            it.local_agent.request_stop(TERM)
        else:
            answer.set_exception(Unavailable("no coordinator"))
        assert await it.done == 75
        assert it.upstream.left.get_nowait() == "stopped by SIGTERM"


async def test_the_agent_waits_until_rank_exits_are_delivered(stopped: Any) -> None:
    async with stage(*OBEDIENT) as it:
        it.upstream.deaf = asyncio.Event()
        await reported(it)
        await stopped()
        await it.upstream.exits.get()
        await asyncio.sleep(0)
        assert it.upstream.left.empty()
        it.upstream.deaf.set()
        assert await it.done == 75


@pytest.mark.parametrize("when", ["while asking", "while waiting"])
async def test_a_second_signal_is_obeyed_at_once(when: str) -> None:
    async with stage(*shell("trap '' TERM; while :; do sleep 1000; done"), stop_grace_s=1000) as it:
        _, answer = await signalled(it, TERM)
        if when == "while waiting":
            answer.set_result(StopJobResponse(notice=notice(grace_s=1000)))
            await asyncio.wait({answer})
        it.local_agent.request_stop(TERM)
        assert await it.done == 128 + TERM


async def test_ctrl_c_means_this_member_only() -> None:
    async with stage(*shell("trap '' TERM; while :; do sleep 1000; done"), stop_grace_s=1000) as it:
        await it.enter(update(1))
        it.local_agent.rank_supports_graceful_stop(0, 1)
        it.local_agent.request_stop(INT)
        assert await it.rank_socket.places.get() is None, "ranks that hear SIGTERM may not ask for all"
        assert not it.done.done()
        it.local_agent.request_stop(INT)
        assert await it.done == 128 + INT
        assert it.upstream.calls.empty()


@pytest.mark.parametrize(
    ("numbers", "urgent"),
    [
        ((TERM,), False),
        ((TERM, TERM), True),
        ((INT, TERM), True),
        ((USR1, TERM), False),
        ((USR1, USR1), True),
        ((USR1, TERM, TERM), True),
    ],
)
def test_a_repeated_signal_is_urgent_but_sigterm_after_a_warning_signal_is_not(
    numbers: tuple[int, ...], urgent: bool
) -> None:
    request = StopRequest()
    for number in numbers:
        request.on_signal(number)
    assert (request.number, request.urgent.is_set()) == (numbers[0], urgent)
