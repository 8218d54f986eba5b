"""This node's slots: the ranks of at most one generation run in them at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path

from strata.launch.environment import Place
from strata.launch.ranks import Exited, RankGroup, inherited_environment
from strata.launch.rendezvous import Meeting, ReservedPort
from strata.launch.starting import Starter


class Slots:
    """Has `starter` start a process a slot for each generation, and holds what lasts as long as one.

    `on_exit` hears of every rank that ended by itself. `folder` is private to this supervisor.
    """

    def __init__(
        self, starter: Starter, *, count: int, prepare_after_s: float, folder: Path, on_exit: Exited
    ) -> None:
        self._starter = starter
        self._count = count
        self._prepare_after_s = prepare_after_s
        self._folder = folder
        self._on_exit = on_exit
        self._port: ReservedPort | None = None
        self._starts = 0
        self._preparing: asyncio.TimerHandle | None = None
        self.ranks: RankGroup | None = None
        """Those of the current generation; None between two of them."""

    def offer(self, address: str) -> Meeting:
        """Return where the next generation meets if rank 0 is here: a fresh port, kept until `end`."""
        self._port = ReservedPort()
        return Meeting(address, self._port.port)

    def start(self, place: Place) -> None:
        """Start the ranks of `place`; `ConfigError` when the command cannot be run at all."""
        self.ranks = RankGroup(place, folder=self._folder, on_exit=self._on_exit)
        self.ranks.start(self._starter, inherited=inherited_environment(), restarts=self._starts)
        self._starts += 1
        self.prepare(self._prepare_after_s)

    def prepare(self, after_s: float = 0.0) -> None:
        """Get ready for the ranks of the next generation, after so long."""
        if self._preparing is not None:
            self._preparing.cancel()
        loop = asyncio.get_running_loop()
        self._preparing = loop.call_later(after_s, self._starter.prepare, self._count)

    async def end(self, grace_s: float, *, urgent: asyncio.Event) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace, or as soon as it is `urgent`."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            await _stop(ranks, grace_s, urgent)
        if self._port is not None:
            self._port.close()
            self._port = None

    def kill(self) -> None:
        """Send SIGKILL to every rank and all that was prepared; does not wait."""
        if self._preparing is not None:
            self._preparing.cancel()
        self._starter.close()
        if self.ranks is not None:
            self.ranks.kill()


async def _stop(ranks: RankGroup, grace_s: float, urgent: asyncio.Event) -> None:
    stopping = asyncio.create_task(ranks.stop(grace_s))
    hurry = asyncio.create_task(urgent.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    hurry.cancel()
    if not stopping.done():
        ranks.kill()
    await stopping
