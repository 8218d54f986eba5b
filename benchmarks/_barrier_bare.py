"""A server of `benchmarks.barrier` that counts arrivals and then releases all: one process without durable state.

Its times show the cost of the messages alone in Python's gRPC.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
from typing import Any

import grpc.aio
import uvloop

from strata.v1 import barriers_pb2, session_pb2, worlds_pb2
from strata.v1.session_pb2_grpc import SessionsServicer, add_SessionsServicer_to_server


class Bare(SessionsServicer):
    """Gives each session a rank, and releases all sessions once each has arrived."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._ranks = itertools.count()
        self._arrived: list[Any] = []

    async def Session(  # type: ignore[override]  # noqa: N802  # the proto's name; it reads and writes by its context
        self, request_iterator: Any, context: Any
    ) -> None:
        while (up := await context.read()) is not grpc.aio.EOF:
            if up.HasField("hello"):
                place = worlds_pb2.WorldMember(first_rank=next(self._ranks), slots=1)
                world = session_pb2.WorldUpdate(world=worlds_pb2.World(generation=1), place=place)
                await context.write(session_pb2.Down(world=world))
            elif up.HasField("arrivals"):
                self._arrived.append(context)
                if len(self._arrived) == self._members:
                    await self._release(up.arrivals.arrivals[0])

    async def _release(self, last: barriers_pb2.Arrival) -> None:
        outcome = barriers_pb2.BarrierOutcome(
            job=last.job,
            name=last.name,
            generation=last.generation,
            round=last.round,
            result=barriers_pb2.BARRIER_RESULT_RELEASED,
        )
        down = session_pb2.Down(outcomes=session_pb2.Outcomes(outcomes=[outcome]))
        arrived, self._arrived = self._arrived, []
        await asyncio.gather(*(context.write(down) for context in arrived))


async def main(members: int) -> None:
    """Serve on a free port, print the address, and run until killed."""
    server = grpc.aio.server()
    add_SessionsServicer_to_server(Bare(members), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    gc.freeze()
    sys.stdout.write(f"127.0.0.1:{port}\n")
    sys.stdout.flush()
    await server.wait_for_termination()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(int(sys.argv[1])))
