"""`Workers`: the workers of one torchrun agent, which torch's agent starts, waits for and ends.

Strata knows a worker only by the process that attached. If torch's agent ends or restarts a worker, Strata sees it only
in the state of that process.
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
"""How long a worker may write its core dump before it is killed: torch's agent and the worker's peers wait for that."""


class Workers:
    """The workers of the generation joined last (`agent.serving.Ranks`)."""

    def __init__(self) -> None:
        self._dumping = asyncio.Lock()
        self.relay: Relay | None = None
        """The relay of the socket to which workers attach, once it is open."""
        self.folder = Path()
        """The folder in which workers write the stacks of their threads."""
        self.unfit = ""
        """Why this agent must get no further place; "" while it may."""
        self.stopped: set[int] = set()
        """The ranks that have stopped in response to a notice, whatever their exit code."""
        self.lasting: dict[int, str] = {}
        """By rank, the permanent error that is about to end a worker; the worker's exit code then counts as 78."""
        self.evicted: dict[int, str] = {}
        """The ranks that this agent killed, with the reason: torchrun knows only of a SIGKILL."""
        self._place: Place | None = None
        self._heeding: set[int] = set()

    def begin(self, place: Place | None) -> None:
        """Start a generation with the workers of `place`: forget those of the previous generation."""
        self._place = place
        for known in (self._heeding, self.stopped, self.lasting, self.evicted):
            known.clear()

    @property
    def supports_graceful_stop(self) -> bool:
        """Whether every worker supports graceful stop. Any thread."""
        place = self._place
        return place is not None and self._heeding.issuperset(place.ranks)

    def stacks(self, generation: int, rank: str) -> str:
        """Return the file into which a worker writes the stacks of its threads."""
        return str(self.folder / f"stacks-{generation}-{rank}.txt")

    def _process(self, rank: int) -> RankProcess | None:
        return self.relay.process(rank) if self.relay is not None else None

    # -- calls from the agent

    def on_world(self, update: WorldUpdate) -> None:
        pass  # `AgentMember` reads the world from the session

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

    def may_request_stop(self) -> bool:
        """Return whether all workers that attached in this generation are still alive.

        If one worker of a node has failed, torchrun ends the others by SIGTERM. Workers that support graceful
        stop take this SIGTERM for a scheduler's signal, and would stop the whole training.
        """
        if self._place is None:
            return False
        processes = map(self._process, self._place.ranks)
        return all(process.alive for process in processes if process is not None)

    def rank_dumps_core(self, rank: int, generation: int, reason: str) -> None:
        """Give a worker `CORE_S` to write its core dump; torch's agent waits for the worker's end, and counts a
        failure.
        """
        log.warning("rank.dumps_core", rank=rank, generation=generation, reason=reason)
        asyncio.get_running_loop().call_later(CORE_S, self._cut_off, self._process(rank), rank, reason)

    def _cut_off(self, process: RankProcess | None, rank: int, reason: str) -> None:
        if process is not None and process is self._process(rank):
            self._kill(process, rank, reason)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Kill a worker and the child of torch's agent that it descends from; torch's agent then finds it ended."""
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
        async with self._dumping:  # concurrent requests share one file
            return await dump_stacks(process, Path(self.stacks(place.generation, str(rank))))

    def process(self, rank: int) -> str:
        process = self._process(rank)
        return process_state(process.pid) if process is not None and process.alive else ""

    def logs(self, rank: int) -> Sequence[RankLog]:
        """Return nothing: torchrun handles its workers' output."""
        return ()

    def become_unfit(self, reason: str) -> None:
        self.unfit = reason
