"""The workers of one torchrun agent, as far as their agent can know them: torch starts them, and waits for them.

What is known of a worker is what it said when it attached: its process. That torch's agent ends it, or starts it again, shows in
its process only.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from strata.agent.environment import Place
from strata.agent.relay import Relay
from strata.agent.reports import ExitReports
from strata.agent.stack_dump import dump_stacks, process_state
from strata.client.inspection import RankLog
from strata.core.exit_codes import PREEMPTED
from strata.integrations.torchrun import orphans
from strata.observe import get_logger
from strata.v1.session_pb2 import WorldUpdate

log = get_logger()


class Workers:
    """The workers of the generation joined last (`agent.serving.Ranks`)."""

    def __init__(self, reports: ExitReports) -> None:
        self._reports = reports
        self.relay: Relay | None = None
        """Where they attach, once they can."""
        self.folder = Path()
        """Where they say where their threads are."""
        self.unfit = ""
        """Why this agent is not to get a place any more; empty while it is."""
        self.stopped: set[int] = set()
        """Those that have stopped as they were asked to, whatever they end with."""
        self.evicted: dict[int, str] = {}
        """Those that were killed from here, and why: torchrun knows of a SIGKILL only."""
        self._place: Place | None = None
        self._heeding: set[int] = set()

    def begin(self, place: Place | None) -> None:
        """Know nothing of workers before those of `place`."""
        self._place = place
        for known in (self._heeding, self.stopped, self.evicted):
            known.clear()

    @property
    def heeding(self) -> bool:
        """Whether every worker stops by itself when its generation is asked to. Any thread."""
        place = self._place
        return place is not None and self._heeding.issuperset(place.ranks)

    def stacks(self, generation: int, rank: str) -> str:
        """Return the file in which a worker says where its threads stand."""
        return str(self.folder / f"stacks-{generation}-{rank}.txt")

    def _pid(self, rank: int) -> int | None:
        return self.relay.pid(rank) if self.relay is not None else None

    # -- what the agent tells and asks

    def on_world(self, update: WorldUpdate) -> None:
        pass  # the member reads it

    def rank_attached(self, rank: int, generation: int) -> None:
        pass

    def rank_stepped(self, rank: int, generation: int) -> None:
        pass

    def rank_heeds_notices(self, rank: int, generation: int) -> None:
        self._heeding.add(rank)

    def rank_stopped(self, rank: int, generation: int) -> None:
        self.stopped.add(rank)

    def may_ask_to_stop(self) -> bool:
        """Tell whether no worker that attached in this generation has ended.

        torchrun ends the workers of a node by SIGTERM when one of them has failed. To those who heed
        it that looks like a scheduler's, and they would stop the whole training.
        """
        pids = [self._pid(rank) for rank in (self._place.ranks if self._place is not None else ())]
        return self._place is not None and all(orphans.is_alive(pid) for pid in pids if pid is not None)

    def rank_dumps_core(self, rank: int, generation: int, reason: str) -> None:
        """Report a worker as ended. Torch's agent, which waits for the end of the process, finds the newer world."""
        code = PREEMPTED if rank in self.stopped else -signal.SIGABRT
        self._reports.report(generation, rank, code, reason)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """End a worker; torch's agent then finds it ended."""
        if (pid := self._pid(rank)) is not None:
            self.evicted.setdefault(rank, reason)
            log.warning("rank.killed", rank=rank, pid=pid, reason=reason)
            orphans.end_child(pid)

    async def stack(self, rank: int) -> str | None:
        place, pid = self._place, self._pid(rank)
        if place is None or pid is None:
            return None
        return await dump_stacks(_Worker(pid), Path(self.stacks(place.generation, str(rank))))

    def process(self, rank: int) -> str:
        return process_state(self._pid(rank))

    def logs(self, rank: int) -> Sequence[RankLog]:
        """Return nothing: where a worker's output goes is torchrun's affair."""
        return ()

    def become_unfit(self, reason: str) -> None:
        self.unfit = reason


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker that attached, as the process it said it is (`agent.stack_dump.Process`)."""

    pid: int

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
