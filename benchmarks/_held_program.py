"""The idle members of `benchmarks.held`: sessions that read what they are told and say nothing."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import uvloop

from strata.v1 import members_pb2, session_pb2, worlds_pb2
from strata.v1.session_pb2_grpc import SessionsStub

AT_ONCE = 16
"""Sessions that a process opens at a time: with two cores for all of it, 256 in all made replicas lag, turn
unready and send members on, which these do not follow."""


def say(value: object) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


async def hold(endpoints: list[str], first: int, count: int, job_size: int, a_channel: int) -> None:
    """Hold the members `first` and up, each by a stream of its own; `a_channel` streams share one."""
    alive = 0
    channels: dict[tuple[str, int], Any] = {}
    room = asyncio.Semaphore(AT_ONCE)
    all_in_worlds = asyncio.Event()

    async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:

        async def member(number: int) -> None:
            nonlocal alive
            address = endpoints[number % len(endpoints)]
            key = (address, number // len(endpoints) // a_channel)
            if key not in channels:
                options = [("grpc.use_local_subchannel_pool", 1)]
                channels[key] = await stack.enter_async_context(
                    grpc.aio.insecure_channel(address, options=options)
                )
            spec = worlds_pb2.JobSpec(min_workers=job_size, max_workers=job_size)
            registration = members_pb2.Registration(
                job=f"job-{number // job_size}",
                worker_id=f"w-{number}",
                boot=f"b-{number}",
                slots=1,
                spec=spec,
            )
            async with room:
                call: Any = SessionsStub(channels[key]).Session()
                await call.write(session_pb2.Up(hello=session_pb2.Hello(member=registration)))
                await call.read()
            settled = False
            said = ""
            while (down := await call.read()) is not grpc.aio.EOF:
                if down.WhichOneof("message") in {"moved", "ended"}:
                    said = str(down)
                if not settled and down.HasField("world") and down.world.world.size == job_size:
                    settled = True
                    alive += 1
                    if alive == count:
                        all_in_worlds.set()
            raise RuntimeError(f"member {number} lost its session: {said} {await call.details()}")

        held = [tasks.create_task(member(number)) for number in range(first, first + count)]
        await all_in_worlds.wait()
        say("held")
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
        for task in held:
            task.cancel()


def main() -> None:
    """Hold what the command line says until a line comes."""
    endpoints, *numbers = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold(endpoints.split(","), *map(int, numbers)))


if __name__ == "__main__":
    main()
