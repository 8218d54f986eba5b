"""Processes of ranks as their agent sees them through the kernel, and the rules for agents and ranks.

A process is alive, stopped by a signal (state T), or has ended. The rules (PROTOCOLS 5.6; docs/client.md for the
third):

1. An agent evicts a live rank only if the agent saw the rank stopped for `DETECT_S`, or if the rank has had no
   connection for `GRACE_S`. In these cases the agent must evict the rank.
2. A process attaches as a rank only if no other live process has attached as that rank of that generation.
3. A rank must end within `ENDS_S` of its own running time after its agent has ended. After that the rank does
   nothing in its generation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from strata.core.members.rank_liveness import STOPPED, Sampling, StopCount, Verdict
from strata.testing.links import Switchboard
from strata.testing.processes import Process, current

DETECT_S = 5.0
GRACE_S = 1.0
ENDS_S = 1.0
SLACK_S = 0.01
LATE_S = 0.75
"""Tolerance for a late eviction: an agent samples four times a second."""
SAMPLING = Sampling.derive(DETECT_S)


def now_s() -> float:
    return asyncio.get_running_loop().time()


class Program(Process):
    """A process. It records when it was stopped, when it last continued, and when it was killed."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.stopped_s: float | None = None
        self.went_on_s = float("-inf")
        self.thaws = 0
        """How often the process continued."""
        self.slept_s = float("-inf")
        """When the process last continued after a stop so long that its own watch over other processes must notice
        the stop."""
        self.killed_s: float | None = None

    @property
    def alive(self) -> bool:
        return super().alive and self.killed_s is None

    def freeze(self) -> None:
        if not self.frozen:
            self.stopped_s = now_s()
        super().freeze()

    def thaw(self) -> None:
        if self.stopped_s is not None:
            self.thaws += 1
            self.went_on_s = now_s()
            if self.went_on_s - self.stopped_s > SAMPLING.max_gap_s:
                self.slept_s = self.went_on_s
            self.stopped_s = None
        super().thaw()

    def killed(self) -> None:
        """End the process as SIGKILL would, even if it is stopped. The caller closes its links."""
        if self.killed_s is None:
            self.killed_s = now_s()
        self.thaw()
        if self.task is not None:
            self.task.cancel()


class RankProcess(Program):
    """One process that is a rank or claims to be a rank; to a relay it is a `strata.agent.rank_process.RankProcess`."""

    exiting = False
    """False, because a simulated process ends immediately: the kernel has no memory to free."""

    def __init__(
        self, pid: int, generation: int, rank: int, *, agent: Program, board: Switchboard, host: str
    ) -> None:
        super().__init__(f"{host}/{pid}")
        self.pid = pid
        self.generation = generation
        self.rank = rank
        self.agent = agent
        self.cut_off = False
        """Whether the process's connections to the agent fail, although the agent listens."""
        self.detached_s: float | None = None
        """Since when the process has no session; None if it never had a session, or has one now."""
        self.doomed = ""
        """The agent's reason for killing the process."""
        self._sessions = 0
        self._board = board

    @property
    def address(self) -> str:
        return self.name

    @property
    def attached(self) -> bool:
        """Whether the process has a session with its agent."""
        return self._sessions > 0

    def opened(self) -> None:
        """Note that the agent admitted the process."""
        self._sessions += 1
        self.detached_s = None

    def ended(self) -> None:
        """Note that one of the process's sessions is over."""
        self._sessions -= 1
        if not self._sessions:
            self.detached_s = now_s()

    def kill(self) -> None:
        """Kill the process, which also closes its socket."""
        self._board.hang_up(self.address)
        self.killed()


class Watch:
    """Replaces `strata.agent.health.liveness.Liveness`: the shipped rule, over simulated processes, not /proc."""

    def __init__(self, on_frozen: Callable[[int, int, str], None]) -> None:
        self._on_frozen = on_frozen
        self._watched: dict[tuple[int, int], tuple[RankProcess, StopCount]] = {}

    def watch(self, rank: int, generation: int, process: RankProcess) -> None:
        self._watched[generation, rank] = (process, StopCount(SAMPLING))

    def forget(self) -> None:
        self._watched.clear()

    async def run(self) -> None:
        """Sample all processes until cancelled."""
        while True:
            now, due_s = now_s(), now_s() + SAMPLING.interval_s
            for (generation, rank), (process, count) in list(self._watched.items()):
                state = STOPPED if process.frozen else "S"
                if not process.alive:
                    del self._watched[generation, rank]
                elif count.sample(now, state, switches=process.thaws) is Verdict.FROZEN:
                    del self._watched[generation, rank]
                    self._on_frozen(rank, generation, SAMPLING.frozen)
                else:
                    due_s = min(due_s, count.due_s(now))
            await asyncio.sleep(due_s - now_s())


@dataclass(slots=True)
class RankRules:
    """Returns the violation of a rule, or None."""

    processes: list[RankProcess] = field(default_factory=list)
    """All processes of the run."""
    _holders: dict[tuple[int, int], list[RankProcess]] = field(default_factory=dict)
    """(generation, rank) -> processes that attached."""

    def attached(self, process: RankProcess) -> str | None:
        """Judge whether an agent may admit this process."""
        holders = self._holders.setdefault((process.generation, process.rank), [])
        others = [other.name for other in holders if other is not process and other.alive]
        holders.append(process)
        if others:
            return f"{process.name} attached as {_rank(process)}, and {others[0]} was that rank and lives"
        return None

    def evicted(self, process: RankProcess, reason: str) -> str | None:
        """Judge whether an agent may kill this process for this reason."""
        now = now_s()
        if not process.alive:
            return None
        if reason == SAMPLING.frozen:
            if process.stopped_s is None:
                return f"{process.name} was evicted as frozen, and was not stopped"
            seen_s = now - max(process.stopped_s, process.agent.slept_s)
            if seen_s < DETECT_S - SLACK_S:
                return f"{process.name} was evicted as frozen after {seen_s:.3f} s that its agent saw of its stop"
        elif process.detached_s is None or now - process.detached_s < GRACE_S - SLACK_S:
            return f"{process.name} was evicted ({reason}), and its connection was up within the grace"
        return None

    def acts(self, what: str) -> str | None:
        """Judge whether this running program may act in its generation."""
        process = current()
        if isinstance(process, RankProcess) and (late_s := _orphaned_s(process)) > ENDS_S + SLACK_S:
            return f"{what} by {process.name}, whose agent had ended {late_s:.3f} s before"
        return None

    def overdue(self) -> list[str]:
        """Return the overdue evictions and ends of ranks."""
        now, wrong = now_s(), []
        self.processes = [process for process in self.processes if process.alive]
        for process in self.processes:
            agent = process.agent
            if _orphaned_s(process) > ENDS_S + SLACK_S and not process.frozen:
                wrong.append(f"{process.name} runs {_orphaned_s(process):.3f} s after its agent ended")
            if not agent.alive or agent.frozen:
                continue
            for since_s, limit_s, what in (
                (process.stopped_s, DETECT_S, "is stopped"),
                (process.detached_s, GRACE_S, "has no connection"),
            ):
                known = process.attached or process.detached_s is not None
                if known and since_s is not None:
                    for_s = now - max(since_s, agent.went_on_s)
                    if for_s > limit_s + LATE_S:
                        wrong.append(f"{process.name} {what} for {for_s:.3f} s, and its agent lets it live")
        return wrong


def _orphaned_s(process: RankProcess) -> float:
    """Return for how long a process could have known that its agent has ended."""
    ended_s = process.agent.killed_s
    return 0.0 if ended_s is None else now_s() - max(ended_s, process.went_on_s)


def _rank(process: RankProcess) -> str:
    return f"rank {process.rank} of generation {process.generation}"
