from __future__ import annotations

import asyncio
import threading

import pytest

from strata.client.event_loop import BackgroundLoop, shared
from strata.errors import NotFound, Unavailable


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_process_has_one_event_loop_in_a_daemon_thread() -> None:
    async def thread() -> threading.Thread:
        return threading.current_thread()

    where = shared().call(thread())
    assert shared() is shared()
    assert where is not threading.current_thread()
    assert where.daemon


def test_results_and_errors_come_through() -> None:
    async def fails() -> None:
        raise NotFound("nothing")

    with pytest.raises(NotFound):
        shared().call(fails())
    assert shared().call(asyncio.sleep(0, "x")) == "x"


def test_a_call_that_times_out_is_cancelled() -> None:
    ended = threading.Event()

    async def waits() -> None:
        try:
            await forever()
        finally:
            ended.set()

    with pytest.raises(Unavailable, match=r"within 0\.05 s"):
        shared().call(waits(), timeout_s=0.05)
    assert ended.wait(5)


def test_a_timeout_error_raised_by_the_callee_is_passed_on() -> None:
    async def fails() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        shared().call(fails(), timeout_s=5)


def test_stopping_runs_the_final_callbacks_cancels_the_rest_and_refuses_calls() -> None:
    loop, printed = BackgroundLoop(), []

    async def last() -> None:
        printed.append("last")

    async def stubborn() -> None:
        try:
            await forever()
        finally:
            printed.append("cancelled")

    waiting = loop.submit(stubborn())
    loop.call(asyncio.sleep(0))
    loop.at_stop(last)
    other = last
    loop.at_stop(other)
    loop.forget_at_stop(other)
    loop.stop()
    loop.stop()
    assert printed == ["last", "cancelled"]
    assert waiting.cancelled()
    with pytest.raises(Unavailable):
        loop.call(asyncio.sleep(0))
    with pytest.raises(Unavailable):
        loop.soon(lambda: None)


def test_a_blocking_call_inside_the_loop_is_a_bug() -> None:
    loop = shared()

    async def calls() -> None:
        loop.call(asyncio.sleep(0))

    with pytest.raises(RuntimeError, match="inside its own event loop"):
        loop.call(calls())
