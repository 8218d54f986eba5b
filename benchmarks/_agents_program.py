"""Some of the agents of `benchmarks.agents`: real sessions with their own credentials, in one process.

Each input line is a request for the agents' state. The output line has the number of connected agents, the number of
agents with a place, and their generations.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path

from strata.client import MemberSession, parse_endpoints
from strata.config import Credentials
from strata.errors import StrataError
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Welcome, WorldUpdate
from strata.v1.worlds_pb2 import JobSpec


class Silent:
    """An observer that does nothing: the program reads the state from the session."""

    def on_connected(self, welcome: Welcome) -> None: ...

    def on_disconnected(self, reason: StrataError) -> None: ...

    def on_world(self, update: WorldUpdate) -> None: ...

    def on_outcome(self, outcome: BarrierOutcome) -> None: ...

    def on_checkpoint(self, checkpoint: Checkpoint) -> None: ...


def agent(endpoints: str, certificates: Path, worker: str, members: int) -> MemberSession:
    """Return the session of one agent, whose certificate is in a folder of `certificates`."""
    mine = Credentials(
        ca_file=certificates / worker / "ca.pem",
        cert_file=certificates / worker / "cert.pem",
        key_file=certificates / worker / "key.pem",
    )
    registration = Registration(
        job="bench",
        worker_id=worker,
        boot=worker,
        slots=8,
        spec=JobSpec(min_workers=members, max_workers=members),
    )
    return MemberSession(
        parse_endpoints(endpoints, mine), registration, Silent(), rng=random.Random(worker), credentials=mine
    )


async def hold(endpoints: str, certificates: Path, first: int, count: int, members: int) -> None:
    """Run the agents until stdin ends."""
    sessions = [
        agent(endpoints, certificates, f"w-{number}", members) for number in range(first, first + count)
    ]
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(session.run()) for session in sessions]
        while await loop.run_in_executor(None, sys.stdin.readline):
            worlds = [session.world for session in sessions if session.connected]
            placed = [world for world in worlds if world is not None and world.HasField("place")]
            answer = {
                "connected": len(worlds),
                "placed": len(placed),
                "generations": sorted({world.world.generation for world in placed}),
            }
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
        for task in running:
            task.cancel()


if __name__ == "__main__":
    where, folder, *numbers = sys.argv[1:]
    asyncio.run(hold(where, Path(folder), *map(int, numbers)))
