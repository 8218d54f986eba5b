"""One agent of `benchmarks.barrier_agents`: real except for its ranks, which the client process simulates."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from strata.agent.agent import Agent, AgentConfig
from strata.agent.serving import AgentObserver, serving_ranks_of
from strata.client import MemberSession, parse_endpoints
from strata.client.rank.inspection import RankLog
from strata.config import HealthConfig
from strata.observe import configure
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JobSpec


class Played:
    """Ranks that the client process simulates: the agent neither observes nor signals them."""

    def on_world(self, update: WorldUpdate) -> None: ...

    def rank_attached(self, rank: int, generation: int) -> None: ...

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None: ...

    def rank_stepped(self, rank: int, generation: int) -> None: ...

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None: ...

    def rank_stopped(self, rank: int, generation: int) -> None: ...

    def rank_dumps_core(self, rank: int, generation: int, reason: str) -> None: ...

    def may_request_stop(self) -> bool:
        return True

    def evict(self, rank: int, generation: int, reason: str) -> None:
        raise RuntimeError(f"rank {rank} is to be killed: {reason}")

    async def stack(self, rank: int) -> str | None:
        return None

    def process(self, rank: int) -> str:
        return ""

    def logs(self, rank: int) -> Sequence[RankLog]:
        return ()

    def become_unfit(self, reason: str) -> None: ...


async def serve(endpoints: str, worker: str, slots: int, members: int, folder: Path) -> None:
    """Be a member of `slots` ranks until stdin ends; print the socket at which the ranks attach."""
    addresses = parse_endpoints(endpoints)
    changed = asyncio.Event()
    observer = AgentObserver(on_change=changed.set)
    registration = Registration(
        job="ranks",
        worker_id=worker,
        boot=worker,
        slots=slots,
        spec=JobSpec(min_workers=members, max_workers=members),
    )
    session = MemberSession(addresses, registration, observer, rng=random.Random(worker))
    config = AgentConfig(
        job="ranks",
        worker_id=worker,
        endpoints=addresses,
        shown_endpoints=endpoints,
        join_timeout_s=60.0,
        preempt="job",
        preempt_grace_s=25.0,
    )
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(session.run())
        await session.wait_connected()
        agent = Agent(config, session, socket=folder / "s", detect_s=5.0)
        async with serving_ranks_of(agent, session, observer, Played(), HealthConfig(), devices=None):
            while session.world is None or not session.world.HasField("place"):
                await changed.wait()
                changed.clear()
            agent.set_place(agent.place(session.world, master_addr="", master_port=0))
            first, generation = session.world.place.first_rank, session.world.world.generation
            facts = {"socket": str(agent.socket), "worker": worker, "first": first, "generation": generation}
            sys.stdout.write(json.dumps(facts) + "\n")
            sys.stdout.flush()
            await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
        running.cancel()


if __name__ == "__main__":
    where, name, count, of = sys.argv[1:]
    configure(level="error")
    with tempfile.TemporaryDirectory() as made:
        asyncio.run(serve(where, name, int(count), int(of), Path(made)))
