"""The idle members of `benchmarks.held`: sessions that read messages and send none."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import uvloop

from strata.v1 import members_pb2, session_pb2, worlds_pb2
from strata.v1.session_pb2_grpc import SessionsStub

AT_ONCE = 16
"""Sessions that a process opens at a time. With 256 in all, on two cores, replicas lagged and redirected members."""


def say(value: object) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def hold(endpoints: list[str], first: int, count: int, job_size: int, a_channel: int) -> None:
    """Hold the members from `first` on, each on its own stream; `a_channel` streams share a channel."""
    alive = 0
    channels: dict[tuple[str, int], Any] = {}
    opening = asyncio.Semaphore(AT_ONCE)
    all_in_worlds = asyncio.Event()

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:

        async def channel_to(address: str, number: int) -> Any:
            key = (address, number // len(endpoints) // a_channel)
            if key not in channels:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channels[key] = await stack.enter_async_context(
                    grpc.aio.insecure_channel(address, options=options)
                )
            return channels[key]

        async def member(number: int) -> None:
            nonlocal alive
            settled = False
            registration = members_pb2.Registration(
                job=f"job-{number // job_size}",
                worker_id=f"w-{number}",
                boot=f"b-{number}",
                slots=1,
                spec=worlds_pb2.JobSpec(min_workers=job_size, max_workers=job_size),
            )
            for turn in itertools.count(
                number
            ):  # a member that an unhealthy replica redirects connects to the next replica
                async with opening:
                    channel = await channel_to(endpoints[turn % len(endpoints)], number)
                    call: Any = SessionsStub(channel).Session()
                    await call.write(session_pb2.Up(hello=session_pb2.Hello(member=registration)))
                    first = await call.read()
                if first is grpc.aio.EOF or first.HasField("ended"):
                    raise RuntimeError(f"member {number} is refused: {first} {await call.details()}")
                registration.incarnation = first.welcome.incarnation
                while (down := await call.read()) is not grpc.aio.EOF and not down.HasField("moved"):
                    if not settled and down.HasField("world") and down.world.world.size == job_size:
                        settled = True
                        alive += 1
                        if alive == count:
                            all_in_worlds.set()
                call.cancel()

        held = [tasks.create_task(member(number)) for number in range(first, first + count)]
        await all_in_worlds.wait()
        say("held")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for task in held:
            task.cancel()


def main() -> None:
    """Hold the members of the command line until an input line arrives."""
    endpoints, *numbers = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold(endpoints.split(","), *map(int, numbers)))


if __name__ == "__main__":
    main()
