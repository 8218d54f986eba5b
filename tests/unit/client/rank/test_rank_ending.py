"""How a rank reports its end, and which answers it waits for."""

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, cast

import pytest

from strata import errors
from strata.client.event_loop import BackgroundLoop
from strata.client.rank import rank_client as rank
from strata.client.rank.rank_client import RankClient
from strata.client.rank.shared_session import RankObserver, RankPlace, SharedSession
from strata.testing import virtual_time
from strata.testing.virtual_time import in_virtual_time
from strata.v1.session_pb2 import Down, Ended
from strata.wire.errors import pack
from tests.unit.client.fake_rank import NoThread, of_rank, rank_client
from tests.unit.client.fake_replica import Rig, done, rig


async def closing(code: int, *, owns_member: bool = True) -> None:
    tells = {0, 75} if owns_member else {75, 78}
    async with rank_client(owns_member=owns_member) as (r, client):
        r.serving.answer = lambda up: (
            r.serving.links[-1].close() if up.WhichOneof("message") == "leave" else done(up)
        )
        await client._close(code, "why")
        exits = [(x.generation, x.rank, x.code, x.reason) for x in r.serving.all("rank_exit")]
        assert exits == ([(1, 0, code, "why" if code == 78 else "")] if code in tells else [])
        assert [leave.reason for leave in r.serving.all("leave")] == ["why"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(0), 0),
        (SystemExit(3), 1),
        (SystemExit("no"), 1),
        (errors.Preempted("stopped after step 3"), 75),
        (KeyboardInterrupt(), 1),
        (ValueError("no"), 1),
    ],
    ids=repr,
)
def test_the_exception_that_leaves_the_block_sets_the_exit_code(
    error: BaseException | None, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = RankPlace(job="j", worker_id="w", generation=1, rank=0, world_size=1)
    shared_session = SharedSession(
        session=cast("Any", None), watcher=RankObserver(), place=place, owns_member=True
    )
    client = RankClient(shared_session, cast("BackgroundLoop", NoThread()))
    closed: list[int] = []
    monkeypatch.setattr(client, "close", lambda *, code=0, reason="": closed.append(code))
    with contextlib.suppress(BaseException), client:
        if error is not None:
            raise error
    assert closed == [code]


def test_a_standalone_rank_reports_only_exit_codes_0_and_75() -> None:
    virtual_time.run(closing(0))
    virtual_time.run(closing(75))
    virtual_time.run(closing(1))
    virtual_time.run(closing(78))


def test_a_rank_reports_to_its_agent_only_exit_codes_75_and_78() -> None:
    for code in (0, 1, 75, 78):
        virtual_time.run(closing(code, owns_member=False))


@in_virtual_time()
async def test_a_rank_logs_that_it_waits_for_a_coordinator_to_receive_its_exit(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The rank also logs this if it loses its replica after it has sent the report.

    The loss may go unnoticed for a while.
    """
    async with rank_client() as (r, client):
        closing = asyncio.create_task(client._close(0, "why"))
        await r.serving.next("rank_exit")
        await asyncio.sleep(5.0)
        assert [record.getMessage() for record in caplog.records] == [
            "no coordinator receives how this rank ended; waiting up to 60 s for one"
        ]
        assert not await closing
    caplog.clear()
    async with rank_client() as (r, client):
        r.serving.answer = done
        assert await client._close(0, "why")
        await asyncio.sleep(5.0)
    assert not caplog.records


@pytest.mark.parametrize(
    ("refusal", "reported"),
    [
        (errors.StaleGeneration("a newer world"), True),
        (errors.JobDone("by the others"), True),
        (errors.StaleIncarnation("the agent has ended"), False),
        (errors.Refused("no"), False),
    ],
    ids=repr,
)
@pytest.mark.parametrize("before", [False, True])
@of_rank()
async def test_a_refused_exit_counts_as_delivered_only_if_newer_state_is_the_reason(
    r: Rig, client: RankClient, refusal: errors.StrataError, reported: bool, before: bool
) -> None:
    ended = Down(ended=Ended(error=pack(refusal)))
    if before:
        r.serving.send(ended)
        await asyncio.wait({r.running})
    r.serving.answer = lambda up: ended if up.WhichOneof("message") == "rank_exit" else None
    assert await client._close(0, "why") is reported


def ending(code: int, *, answered: bool, interrupted: bool) -> tuple[Rig, BaseException | None]:
    """Close a client in its own thread; `answered` says whether a replica receives the report of the rank's exit."""
    background = BackgroundLoop()
    stack = AsyncExitStack()

    async def opened() -> tuple[Rig, RankClient]:
        r = await stack.enter_async_context(rig(1))
        place = RankPlace(job="j", worker_id="w", generation=1, rank=0, world_size=1)
        shared_session = SharedSession(
            session=r.session, watcher=RankObserver(), place=place, owns_member=True
        )
        return r, RankClient(shared_session, background)

    r, client = background.call(opened())

    async def collect_garbage() -> None:
        await asyncio.wait({r.running})
        await stack.aclose()
        r.replicas[0].down()
        await asyncio.gather(*r.replicas[0]._tasks, return_exceptions=True)

    background.at_stop(collect_garbage)
    if answered:
        r.serving.answer = done
    waiting = background.submit(r.serving.next("rank_exit"))
    error: list[BaseException] = []

    class Interrupted(Future[Any]):
        """A future for the main thread whose wait ends when a signal handler of the program raises."""

        def result(self, timeout: float | None = None) -> Any:
            if threading.current_thread() is not thread:
                return super().result(timeout)
            waiting.result()
            raise KeyboardInterrupt

    def close() -> None:
        try:
            client.close(code=code, reason="why")
        except BaseException as raised:  # noqa: BLE001  # the test looks at it
            error.append(raised)

    if interrupted:
        submit = background.submit

        def handing_out(coroutine: Any) -> Any:
            future = submit(coroutine)
            wrapped: Future[Any] = Interrupted()
            future.add_done_callback(lambda ended: wrapped.set_result(ended.result()))
            return wrapped

        background.submit = handing_out  # type: ignore[method-assign]  # in the role of the program's signal handler
    thread = threading.Thread(target=close)
    thread.start()
    waiting.result()
    thread.join(20)
    assert not thread.is_alive()
    background.stop()
    return r, error[0] if error else None


def test_a_close_in_the_loop_thread_is_refused_and_can_be_repeated() -> None:
    background = BackgroundLoop()
    place = RankPlace(job="j", worker_id="w", generation=1, rank=0, world_size=1)
    shared_session = SharedSession(
        session=cast("Any", None), watcher=RankObserver(), place=place, owns_member=True
    )
    client = RankClient(shared_session, background)
    background.forget_at_stop(client._detach)
    raised: Future[BaseException | None] = Future()

    def close() -> None:
        try:
            client.close()
        except BaseException as error:  # noqa: BLE001  # the test looks at it
            raised.set_result(error)
        else:
            raised.set_result(None)

    background.soon(close)
    assert isinstance(raised.result(20), RuntimeError)
    assert not client._closed
    background.stop()


def test_a_finished_training_with_an_undelivered_exit_ends_with_75(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rank, "EXIT_REPORT_S", 0.2)
    _, error = ending(0, answered=False, interrupted=False)
    assert isinstance(error, errors.Preempted)
    assert error.code == 75


@pytest.mark.parametrize(("code", "answered"), [(75, False), (0, True)])
def test_a_delivered_exit_or_one_with_75_stays_the_program_s_own(
    code: int, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "EXIT_REPORT_S", 0.2)
    assert ending(code, answered=answered, interrupted=False)[1] is None


def test_a_rank_interrupted_while_it_reports_its_exit_delivers_it_and_leaves() -> None:
    r, error = ending(0, answered=True, interrupted=True)
    assert isinstance(error, KeyboardInterrupt)
    assert [(x.rank, x.code) for x in r.replicas[0].all("rank_exit")] == [(0, 0)]
    assert [leave.reason for leave in r.replicas[0].all("leave")] == ["why"]
