"""The rank processes of one generation on one node: started once, watched, ended together."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence

from strata.errors import ConfigError
from strata.launch.children import Child
from strata.launch.environment import Place, rank_environment
from strata.observe import get_logger

log = get_logger()

Exited = Callable[[int, int, int, str], None]
"""Called with (generation, rank, exit code or minus the signal, reason) when a rank ends itself."""


class RankGroup:
    """The ranks that this member runs in one generation. A rank is started at most once.

    The exit of a rank is reported once, to `on_exit`, unless `stop` ended it. `doom` names why
    a rank is about to be killed, so that its exit carries that reason.
    """

    def __init__(self, place: Place, *, on_exit: Exited) -> None:
        self.place = place
        self._on_exit = on_exit
        self._children: dict[int, Child] = {}
        self._doomed: dict[int, str] = {}
        self._stopping = False
        self._watchers: list[asyncio.Task[None]] = []

    def start(self, command: Sequence[str], *, inherited: Mapping[str, str], restarts: int) -> None:
        """Start one process a slot; `ConfigError` when the command cannot be run at all."""
        for local_rank, rank in enumerate(self.place.ranks):
            environment = rank_environment(
                self.place, local_rank=local_rank, inherited=inherited, restarts=restarts
            )
            try:
                child = Child.start(command, name=f"rank {rank}", env=environment)
            except OSError as error:
                self.kill()
                raise ConfigError(
                    f"cannot run {command[0]!r}: {error}",
                    hint="the command after -- must be a program on this node",
                ) from error
            self._children[rank] = child
            log.info("rank.started", rank=rank, pid=child.pid, generation=self.place.generation)
            self._watchers.append(asyncio.create_task(self._watch(rank, child), name=f"watch rank {rank}"))

    def pid(self, rank: int) -> int | None:
        """Return the process id of a rank, or None when it does not run here."""
        child = self._children.get(rank)
        return child.pid if child is not None and child.poll() is None else None

    @property
    def running(self) -> bool:
        """Whether any rank still runs."""
        return any(child.poll() is None for child in self._children.values())

    def doom(self, rank: int, reason: str) -> None:
        """Kill one rank that can do nothing more, for `reason`."""
        child = self._children.get(rank)
        if child is not None and child.poll() is None and rank not in self._doomed:
            self._doomed[rank] = reason
            log.warning("rank.killed", rank=rank, pid=child.pid, reason=reason)
            child.kill()

    def signal(self, number: int) -> None:
        """Send a signal to every rank's process."""
        for child in self._children.values():
            child.send_signal(number)

    def kill(self) -> None:
        """Send SIGKILL to every rank and all it started; does not wait."""
        self._stopping = True
        for child in self._children.values():
            child.kill()

    async def stop(self, grace_s: float) -> None:
        """End every rank: SIGTERM, at most `grace_s` to comply, then SIGKILL; none is reported."""
        self._stopping = True
        async with asyncio.TaskGroup() as group:
            for child in self._children.values():
                group.create_task(child.stop_async(grace_s))
        await asyncio.gather(*self._watchers)

    async def join(self) -> None:
        """Return once every rank has ended."""
        await asyncio.gather(*self._watchers)

    async def _watch(self, rank: int, child: Child) -> None:
        code = await child.join_async()
        if self._stopping:
            return
        reason = self._doomed.get(rank, child.describe())
        log.info("rank.ended", rank=rank, pid=child.pid, code=code, reason=reason)
        self._on_exit(self.place.generation, rank, code, reason)


def inherited_environment() -> dict[str, str]:
    """Return this process's environment, which ranks inherit but for what Strata sets."""
    return dict(os.environ)
