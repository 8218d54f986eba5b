"""The workers of one torchrun agent, as far as their agent can know them: torch starts them, and waits for them.

What is known of a worker is what it said when it attached: its process. That torch's agent ends it, or starts it again, shows in
its process only.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from strata.agent.environment import Place
from strata.agent.health.stack_request import dump_stacks, process_state
from strata.agent.rank_process import RankProcess
from strata.agent.relay import Relay
from strata.client.rank.inspection import RankLog
from strata.integrations.torchrun import orphans
from strata.observe import get_logger
from strata.v1.session_pb2 import WorldUpdate

log = get_logger()

CORE_S: Final = 30.0
"""How long a worker may write its core before it is killed: torch's agent waits for its end, and its peers with it."""


class Workers:
    """The workers of the generation joined last (`agent.serving.Ranks`)."""

    def __init__(self) -> None:
        self._dumping = asyncio.Lock()
        self.relay: Relay | None = None
        """Where they attach, once they can."""
        self.folder = Path()
        """Where they say where their threads are."""
        self.unfit = ""
        """Why this agent is not to get a place any more; empty while it is."""
        self.stopped: set[int] = set()
        """Those that have stopped as they were asked to, whatever they end with."""
        self.lasting: dict[int, str] = {}
        """Why a worker is about to end, where another try would meet the same: its exit code counts as 78."""
        self.evicted: dict[int, str] = {}
        """Those that were killed from here, and why: torchrun knows of a SIGKILL only."""
        self._place: Place | None = None
        self._heeding: set[int] = set()

    def begin(self, place: Place | None) -> None:
        """Know nothing of workers before those of `place`."""
        self._place = place
        for known in (self._heeding, self.stopped, self.lasting, self.evicted):
            known.clear()

    @property
    def heeding(self) -> bool:
        """Whether every worker stops by itself when its generation is asked to. Any thread."""
        place = self._place
        return place is not None and self._heeding.issuperset(place.ranks)

    def stacks(self, generation: int, rank: str) -> str:
        """Return the file in which a worker says where its threads stand."""
        return str(self.folder / f"stacks-{generation}-{rank}.txt")

    def _process(self, rank: int) -> RankProcess | None:
        return self.relay.process(rank) if self.relay is not None else None

    # -- what the agent tells and asks

    def on_world(self, update: WorldUpdate) -> None:
        pass  # the member reads it

    def rank_attached(self, rank: int, generation: int) -> None:
        self.lasting.pop(rank, None)

    def rank_stepped(self, rank: int, generation: int) -> None:
        self.lasting.pop(rank, None)

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None:
        self._heeding.add(rank)

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None:
        self.lasting[rank] = reason

    def rank_stopped(self, rank: int, generation: int) -> None:
        self.stopped.add(rank)
        self.lasting.pop(rank, None)

    def may_ask_to_stop(self) -> bool:
        """Tell whether no worker that attached in this generation has ended.

        torchrun ends the workers of a node by SIGTERM when one of them has failed. To those who heed
        it that looks like a scheduler's, and they would stop the whole training.
        """
        if self._place is None:
            return False
        processes = map(self._process, self._place.ranks)
        return all(process.alive for process in processes if process is not None)

    def rank_dumps_core(self, rank: int, generation: int, reason: str) -> None:
        """Let a worker write its core for a while; torch's agent waits for its end, and counts it as a failure."""
        log.warning("rank.dumps_core", rank=rank, generation=generation, reason=reason)
        asyncio.get_running_loop().call_later(CORE_S, self._cut_off, self._process(rank), rank, reason)

    def _cut_off(self, process: RankProcess | None, rank: int, reason: str) -> None:
        if process is not None and process is self._process(rank):
            self._kill(process, rank, reason)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """End a worker, and what torch's agent started of which it is a part; torch's agent then finds it ended."""
        if (process := self._process(rank)) is not None:
            self._kill(process, rank, reason)

    def _kill(self, process: RankProcess, rank: int, reason: str) -> None:
        if process.alive:
            self.evicted.setdefault(rank, reason)
            log.warning("rank.killed", rank=rank, pid=process.pid, reason=reason)
            orphans.end_child_above(process.pid)
            process.send_signal(signal.SIGKILL)

    async def stack(self, rank: int) -> str | None:
        place, process = self._place, self._process(rank)
        if place is None or process is None or not process.alive:
            return None
        async with self._dumping:  # all that ask have one file
            return await dump_stacks(process, Path(self.stacks(place.generation, str(rank))))

    def process(self, rank: int) -> str:
        process = self._process(rank)
        return process_state(process.pid) if process is not None and process.alive else ""

    def logs(self, rank: int) -> Sequence[RankLog]:
        """Return nothing: where a worker's output goes is torchrun's affair."""
        return ()

    def become_unfit(self, reason: str) -> None:
        self.unfit = reason
