"""This node's slots: a rank process for each, of at most one generation at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

from strata.agent.environment import Place
from strata.agent.rendezvous import Meeting, ReservedPort
from strata.client.rank.inspection import RankLog
from strata.launch.ranks import Exited, Program, RankGroup, RankProcess

RENEW_S: Final = 5.0
"""How often to check whether prepared processes have ended."""
RENEWALS: Final = 3
"""How many prepared processes per slot are replaced if they end soon after each other: more would end soon too."""
LASTING_S: Final = 120.0
"""Once all prepared processes have run for this long, the count of replacements begins again."""


class Slots:
    """Runs one process per slot in each generation, and keeps the resources that outlive a generation.

    `on_exit` is called for every rank that ended by itself.
    """

    def __init__(self, program: Program, *, count: int, prepare_after_s: float, on_exit: Exited) -> None:
        self._program = program
        self._count = count
        self._prepare_after_s = prepare_after_s
        self._on_exit = on_exit
        self._port: ReservedPort | None = None
        self._starts = 0
        self._preparing: asyncio.TimerHandle | None = None
        self._prepared = 0
        """Number of waiting processes started since `prepare`, or since all of them last ran for `LASTING_S`."""
        self._prepared_at = 0.0
        """Time of the last start of a waiting process."""
        self._kept: dict[int, RankProcess] = {}
        """By local rank: processes of the previous generation that will be ranks of the next one."""
        self.ranks: RankGroup | None = None
        """The ranks of the current generation; None between two generations."""

    @property
    def used(self) -> bool:
        """Whether ranks were ever started here."""
        return self._starts > 0

    def offer(self, address: str) -> Meeting:
        """Return the rendezvous address of the next generation if rank 0 is here: a new port, reserved until `end`."""
        self._port = ReservedPort()
        return Meeting(address, self._port.port)

    def start(self, place: Place) -> frozenset[int]:
        """Start the ranks of `place`; return the local ranks whose processes were kept by `end` and must attach again.

        `ConfigError` if the command cannot be run at all.
        """
        adopted = {local: process for local, process in self._kept.items() if process.child.poll() is None}
        self._kept.clear()
        self.ranks = RankGroup(place, self._program, restarts=self._starts, on_exit=self._on_exit)
        self.ranks.start(adopted)
        self._starts += 1
        self.prepare(self._prepare_after_s)
        return frozenset(adopted)

    def prepare(self, after_s: float = 0.0) -> None:
        """Prepare processes for the ranks of the next generation after `after_s`, and replace those that end."""
        self._prepared = 0
        self._prepare_in(after_s)

    def _prepare_in(self, seconds: float) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
        self._preparing = asyncio.get_running_loop().call_later(seconds, self._prepare_now)

    def _prepare_now(self) -> None:
        now = asyncio.get_running_loop().time()
        if now - self._prepared_at >= LASTING_S:
            self._prepared = min(self._prepared, self._count)
        if (started := self._program.starter.prepare(self._count)) > 0:
            self._prepared_at = now
        self._prepared += started
        if 0 < self._prepared < self._count * (1 + RENEWALS):
            self._prepare_in(RENEW_S)

    async def end(
        self, grace_s: float, *, urgent: asyncio.Event, keep: Collection[int] = frozenset()
    ) -> None:
        """End the ranks: SIGTERM, then SIGKILL after the grace, or immediately when `urgent` is set.

        The processes of the local ranks in `keep` live on for the next generation.
        """
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            self._kept |= ranks.release(keep)
        leaving = [self._kept.pop(local) for local in list(self._kept) if local not in keep]
        stopping = asyncio.create_task(_stop(ranks, leaving, grace_s))
        shorten_deadline = asyncio.create_task(urgent.wait())
        await asyncio.wait({stopping, shorten_deadline}, return_when=asyncio.FIRST_COMPLETED)
        shorten_deadline.cancel()
        if not stopping.done():
            for process in leaving:
                process.child.kill()
            if ranks is not None:
                ranks.kill()
        await stopping
        if self._port is not None:
            self._port.close()
            self._port = None

    def logs(self, rank: int) -> Sequence[RankLog]:
        """Return the remembered log files of a rank, the newest first, also of ended processes."""
        return self._program.logs.of(rank)

    def kill(self) -> None:
        """Send SIGKILL to every rank and every prepared process; does not wait."""
        if self._preparing is not None:
            self._preparing.cancel()
        self._program.starter.close()
        for process in self._kept.values():
            process.child.kill()
        if self.ranks is not None:
            self.ranks.kill()


async def _stop(ranks: RankGroup | None, processes: Sequence[RankProcess], grace_s: float) -> None:
    async with asyncio.TaskGroup() as tasks:
        if ranks is not None:
            tasks.create_task(ranks.stop(grace_s))
        for process in processes:
            tasks.create_task(process.child.stop_async(grace_s))
