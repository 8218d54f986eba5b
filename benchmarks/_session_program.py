"""The bare server and the clients of `benchmarks.session_messages`."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import grpc.aio
import uvloop

from strata.v1 import members_pb2, session_pb2, worlds_pb2
from strata.v1.members_pb2_grpc import MembersServicer, MembersStub, add_MembersServicer_to_server
from strata.v1.session_pb2_grpc import SessionsServicer, SessionsStub, add_SessionsServicer_to_server

IN_FLIGHT = 8
BATCH = 100


def say(value: object) -> None:
    """Send one line to the parent."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Bare(SessionsServicer, MembersServicer):
    """Answers every call with the same world, which is as large as the coordinator's, and does nothing else."""

    def __init__(self, members: int) -> None:
        world = worlds_pb2.World(generation=1, size=members, members=members, reason="all members are here")
        places = [
            worlds_pb2.WorldMember(
                worker_id=f"w-0-{n}", incarnation=100 + n, group_rank=n, slots=1, first_rank=n
            )
            for n in range(members)
        ]
        self.world = worlds_pb2.GetWorldResponse(world=world, members=places)
        self.alive = members_pb2.HeartbeatResponse(world=world)

    async def Register(self, request: Any, context: Any) -> Any:  # noqa: N802  # the proto's name
        return members_pb2.RegisterResponse(incarnation=1)

    async def Heartbeat(self, request: Any, context: Any) -> Any:  # noqa: N802  # the proto's name
        return self.alive

    async def Session(  # type: ignore[override]  # noqa: N802  # it reads and writes by its context
        self, request_iterator: Any, context: Any
    ) -> None:
        while (up := await context.read()) is not grpc.aio.EOF:
            if up.HasField("call"):
                down = session_pb2.Down()
                down.reply.id = up.call.id
                down.reply.get_world.CopyFrom(self.world)
                await context.write(down)
            elif up.HasField("hello"):
                await context.write(session_pb2.Down(welcome=session_pb2.Welcome(incarnation=1)))


async def server(address: str, members: int) -> None:
    """Serve until killed."""
    made = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    bare = Bare(members)  # type: ignore[abstract]  # it answers what is measured
    add_SessionsServicer_to_server(bare, made)
    add_MembersServicer_to_server(bare, made)
    made.add_insecure_port(address)
    await made.start()
    gc.freeze()
    say("ready")
    await made.wait_for_termination()


class Stream:
    """One session, and this client's operations on it."""

    def __init__(self, call: Any, heartbeat: Any, member: Any, messages: int) -> None:
        self.call = call
        self.heartbeat = heartbeat
        self.member = member
        self.messages = messages

    async def progress(self) -> None:
        """Send progress, and after every batch make a call and wait for its answer."""
        ranks = [members_pb2.RankProgress(rank=0, step=12_345, phase="train")]
        progress = session_pb2.Up(progress=session_pb2.Progress(generation=1, ranks=ranks))
        for done in range(1, self.messages + 1):
            if done % BATCH:
                await self.call.write(progress)
            else:
                await self.ask()
                await self.reply()

    async def echo(self) -> None:
        """Make calls, with `IN_FLIGHT` calls in flight at all times."""
        for _ in range(IN_FLIGHT):
            await self.ask()
        for done in range(self.messages):
            await self.reply()
            if done < self.messages - IN_FLIGHT:
                await self.ask()

    async def unary(self) -> None:
        """Send heartbeats, with `IN_FLIGHT` calls in flight at all times."""

        async def beat(count: int) -> None:
            for _ in range(count):
                await self.heartbeat(self.member)

        await asyncio.gather(*(beat(self.messages // IN_FLIGHT) for _ in range(IN_FLIGHT)))

    async def ask(self) -> None:
        call = session_pb2.Call(id=1, get_world=worlds_pb2.GetWorldRequest())
        await self.call.write(session_pb2.Up(call=call))

    async def reply(self) -> None:
        while not (await self.call.read()).HasField("reply"):
            pass


async def kept_alive(made: list[Stream]) -> None:
    """Send a heartbeat of each stream every second, whatever is being measured."""
    while True:
        await asyncio.sleep(1)
        for stream in made:
            await stream.heartbeat(stream.member)


async def client(address: str, number: int, streams: int, messages: int, members: int) -> None:
    """Hold sessions and carry out the parent's requests."""
    spec = worlds_pb2.JobSpec(min_workers=members, max_workers=members)
    async with AsyncExitStack() as stack:
        made = []
        for index in range(streams):
            options = [("grpc.use_local_subchannel_pool", 1)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(address, options=options))
            call: Any = SessionsStub(channel).Session()
            worker = f"w-{number}-{index}"
            member = members_pb2.Registration(job="bench", worker_id=worker, boot=worker, slots=1, spec=spec)
            await call.write(session_pb2.Up(hello=session_pb2.Hello(member=member)))
            await call.read()
            # a standalone process without a session, beside the session
            stub: Any = MembersStub(channel)
            alone = members_pb2.Registration(job="beats", worker_id=worker, boot=worker, slots=1, spec=spec)
            registered = await stub.Register(members_pb2.RegisterRequest(registration=alone))
            heartbeat = members_pb2.HeartbeatRequest(
                job="beats", worker_id=worker, boot=worker, incarnation=registered.incarnation
            )
            made.append(Stream(call, stub.Heartbeat, heartbeat, messages))
        say("ready")
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            idle = tasks.create_task(kept_alive(made))
            while line := await loop.run_in_executor(None, sys.stdin.readline):
                await asyncio.gather(*(getattr(stream, line.strip())() for stream in made))
                say("done")
            idle.cancel()


def main() -> None:
    """Run the server or client that the command line names."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        match sys.argv[1:]:
            case ["server", address, members]:
                runner.run(server(address, int(members)))
            case ["client", address, *numbers]:
                runner.run(client(address, *map(int, numbers)))


if __name__ == "__main__":
    main()
