"""Frozen simulated programs, as the programs connected to them see it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strata.errors import Unavailable
from strata.testing.links import MemoryLink, Switchboard
from strata.testing.processes import Process
from strata.testing.virtual_time import in_virtual_time, run
from strata.v1.session_pb2 import Tick


def now() -> float:
    return asyncio.get_running_loop().time()


@in_virtual_time()
async def test_a_frozen_program_runs_nothing_and_catches_up_in_order() -> None:
    process, ran = Process("p"), list[tuple[int, float]]()

    async def tick() -> None:
        for number in range(6):
            await asyncio.sleep(1)
            ran.append((number, now()))

    began = now()
    async with asyncio.TaskGroup() as tasks:
        process.start(tick(), tasks=tasks)
        await asyncio.sleep(2.5)
        process.freeze()
        await asyncio.sleep(10)
        assert [number for number, _ in ran] == [0, 1]
        process.thaw()
    assert process.held == 1, "the timer that fell due"
    assert [number for number, _ in ran] == list(range(6))
    assert ran[2][1] - began == pytest.approx(12.5, abs=0.001)


@in_virtual_time()
async def test_tasks_of_a_frozen_program_freeze_with_it_and_others_continue() -> None:
    process, ran = Process("p"), list[str]()

    async def later(name: str, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        ran.append(name)

    async with asyncio.TaskGroup() as tasks:

        async def main() -> None:
            tasks.create_task(later("child", 1))
            asyncio.get_running_loop().call_later(1, ran.append, "timer")

        process.start(main(), tasks=tasks)
        tasks.create_task(later("other", 2))
        await asyncio.sleep(0.5)
        process.freeze()
        await asyncio.sleep(3)
        assert ran == ["other"]
        process.thaw()
    assert sorted(ran) == ["child", "other", "timer"]


class Two:
    """A program that dials another one; the other one counts the ticks it receives."""

    def __init__(self, tasks: asyncio.TaskGroup, address: str) -> None:
        self.address = address
        self.board = Switchboard(delay_s=0.001)
        self.caller, self.callee = Process("a"), Process("b")
        self.received: list[int] = []
        self.ends: dict[str, float] = {}
        self.link: MemoryLink | None = None
        self.tasks = tasks

    def end(self) -> None:
        for process in (self.caller, self.callee):
            process.thaw()
            if process.task is not None:
                process.task.cancel()

    async def serve(self, link: MemoryLink) -> None:
        while (message := await link.recv()) is not None:
            self.received.append(message.sequence)
        self.ends["b"] = now()

    async def listen(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self.board.listen(self.address, self.serve, tasks.create_task)
            await asyncio.sleep(1000)

    async def dial(self) -> None:
        try:
            async with self.board.dial("a", self.address) as self.link:
                await self.link.recv()
        except Unavailable:
            self.ends["a"] = now()

    async def begin(self, *, dial: bool = True) -> None:
        self.callee.start(self.listen(), tasks=self.tasks)
        await asyncio.sleep(0.1)
        if dial:
            self.caller.start(self.dial(), tasks=self.tasks)
            await asyncio.sleep(0.1)

    def send(self, sequence: int) -> None:
        assert self.link is not None
        self.link.send(Tick(sequence=sequence))


@asynccontextmanager
async def two_programs(*, dial: bool = True, address: str = "b") -> AsyncIterator[Two]:
    async with asyncio.TaskGroup() as tasks:
        two = Two(tasks, address)
        await two.begin(dial=dial)
        yield two
        two.end()


@in_virtual_time()
async def test_a_program_frozen_for_less_than_the_keepalive_loses_nothing() -> None:
    async with two_programs() as two:
        two.callee.freeze()
        two.send(1)
        await asyncio.sleep(2)
        assert two.received == []
        two.callee.thaw()
        await asyncio.sleep(1)
        assert (two.received, two.ends) == ([1], {})


@pytest.mark.parametrize("fault", ["frozen", "blocked there", "blocked back"])
def test_an_end_whose_pings_get_no_answer_breaks_within_the_keepalive(fault: str) -> None:
    async def scenario() -> None:
        async with two_programs() as two:
            began = now()
            match fault:
                case "frozen":
                    two.callee.freeze()
                case "blocked there":
                    two.board.block("a", "b")
                case _:
                    two.board.block("b", "a")
            await asyncio.sleep(6)
            assert 2 < two.ends["a"] - began <= 4
            two.callee.thaw()
            two.board.unblock("a", "b")
            two.board.unblock("b", "a")
            await asyncio.sleep(1)
            assert "b" in two.ends, "the other end learns of it at last"

    run(scenario())


@in_virtual_time()
async def test_a_link_within_one_host_outlives_a_program_that_is_frozen_for_long() -> None:
    async with two_programs(address="a/socket") as two:
        two.callee.freeze()
        two.send(1)
        await asyncio.sleep(60)
        two.callee.thaw()
        await asyncio.sleep(1)
        assert (two.received, two.ends) == ([1], {})


@in_virtual_time()
async def test_messages_sent_into_a_block_arrive_after_it() -> None:
    async with two_programs() as two:
        two.board.block("a", "b")
        for sequence in (1, 2, 3):
            two.send(sequence)
        await asyncio.sleep(1)
        assert two.received == []
        two.board.unblock("a", "b")
        await asyncio.sleep(1)
        assert two.received == [1, 2, 3]


@in_virtual_time()
async def test_dialing_a_frozen_program_waits_a_limited_time() -> None:
    async with two_programs(dial=False) as two:
        two.callee.freeze()
        began = now()
        with pytest.raises(Unavailable, match="did not answer"):
            async with two.board.dial("a", "b"):
                pass
        assert now() - began == pytest.approx(2.0, abs=0.01)
        assert two.board.answers("a", "b"), "its kernel accepts"
        asyncio.get_running_loop().call_later(1, two.callee.thaw)
        async with two.board.dial("a", "b"):
            pass


@in_virtual_time()
async def test_messages_that_take_longer_keep_their_order() -> None:
    async with two_programs() as two:
        lags = iter([0.5, 0.0, 0.2, 0.0])
        two.board.lag_s = lambda sender, receiver: next(lags, 0.0)
        for sequence in range(4):
            two.send(sequence)
        await asyncio.sleep(1)
        assert two.received == [0, 1, 2, 3]


@in_virtual_time()
async def test_a_plain_connect_is_accepted_refused_or_unanswered() -> None:
    async with two_programs() as two:
        assert two.board.answers("a", "b") is True
        assert two.board.answers("a", "c") is False
        two.board.reject("a", "b")
        assert two.board.answers("a", "b") is False
        two.board.mend("a", "b")
        two.board.block("b", "a")
        assert two.board.answers("a", "b") is None
