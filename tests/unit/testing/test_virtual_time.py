import asyncio
import time

import pytest

from strata.testing.virtual_time import (
    EPOCH_S,
    DeadlockError,
    StandstillError,
    VirtualTimeLoop,
    VirtualTimeOverError,
    in_virtual_time,
    run,
)


def now() -> float:
    return asyncio.get_running_loop().time()


def test_hours_pass_in_no_time_and_exactly() -> None:
    async def main() -> float:
        await asyncio.sleep(3_600 * 24 * 3)
        return now()

    begin = time.monotonic()
    assert run(main(), limit_s=1e6) == pytest.approx(EPOCH_S + 3 * 86_400, abs=1e-5)
    assert time.monotonic() - begin < 1


def test_no_timer_fires_early() -> None:
    async def main() -> None:
        for _ in range(200):
            due = now() + 0.1
            fired = asyncio.Event()
            asyncio.get_running_loop().call_at(due, fired.set)
            await fired.wait()
            assert now() >= due

    run(main())


def test_timers_come_in_order() -> None:
    async def main() -> list[float]:
        order: list[float] = []

        async def sleeper(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            order.append(delay_s)

        async with asyncio.TaskGroup() as group:
            for delay_s in (3.0, 1.0, 2.0, 1.5):
                group.create_task(sleeper(delay_s))
        return order

    assert run(main()) == [1.0, 1.5, 2.0, 3.0]


async def tie() -> tuple[int, ...]:
    order: list[int] = []

    async def sleeper(number: int) -> None:
        await asyncio.sleep(1)
        order.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(5):
            group.create_task(sleeper(number))
    return tuple(order)


def test_a_seed_decides_ties_and_decides_them_again() -> None:
    orders = [run(tie(), seed=seed) for seed in range(20)]
    assert orders == [run(tie(), seed=seed) for seed in range(20)]
    assert len(set(orders)) > 10


def test_ready_callbacks_keep_their_order() -> None:
    async def main() -> list[int]:
        order: list[int] = []
        for number in range(10):
            asyncio.get_running_loop().call_soon(order.append, number)
        await asyncio.sleep(0.001)
        return order

    for seed in range(5):
        assert run(main(), seed=seed) == list(range(10))


def test_waiting_for_ever_is_found_and_the_waiter_named() -> None:
    async def waits_for_nobody() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(waits_for_nobody(), name="the-waiter")

    with pytest.raises(DeadlockError, match=r"(?s)tasks:.*the-waiter at .*test_virtual_time.py:\d+"):
        run(main())


def test_a_program_that_never_waits_is_named() -> None:
    """No timer is ever due then, so a seed of the simulation would never end."""

    async def main() -> None:
        ready = asyncio.Event()
        ready.set()
        asyncio.get_running_loop().call_later(1, ready.clear)
        while True:
            await ready.wait()
            await asyncio.sleep(0)

    with pytest.raises(
        StandstillError, match=r"(?s)the clock has not moved; tasks:.*test_virtual_time.py:\d+"
    ):
        run(main())


def test_running_for_ever_is_found() -> None:
    async def main() -> None:
        while True:  # noqa: ASYNC110 - the test needs an endless loop
            await asyncio.sleep(60)

    with pytest.raises(VirtualTimeOverError):
        run(main(), limit_s=3_600)


def test_timeouts_work() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.Event().wait()
        return now()

    assert run(main()) == pytest.approx(EPOCH_S + 30, abs=1e-5)


def test_an_error_leaves_and_tasks_are_cancelled() -> None:
    cancelled: list[bool] = []

    async def other() -> None:
        try:
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def main() -> None:
        task = asyncio.create_task(other())
        await asyncio.sleep(1)
        assert not task.done()
        raise KeyError("x")

    with pytest.raises(KeyError):
        run(main())
    assert cancelled == [True]


def test_threads_and_sockets_are_refused() -> None:
    async def thread() -> None:
        await asyncio.to_thread(print)

    async def socket() -> None:
        await asyncio.open_connection("127.0.0.1", 1)

    with pytest.raises(RuntimeError, match="no threads"):
        run(thread())
    with pytest.raises((RuntimeError, NotImplementedError)):
        run(socket())


@in_virtual_time(seed=3)
async def test_a_test_may_run_in_virtual_time() -> None:
    assert isinstance(asyncio.get_running_loop(), VirtualTimeLoop)
    await asyncio.sleep(3_600)
