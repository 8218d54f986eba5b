"""The serving half of a replica over links in memory: the shipped `Service` on faked links.

A replica accepts members at its own name: `board.dial("me", "r1")` opens a session with replica r1.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from strata.coordinator.leadership.takeover import Prober
from strata.coordinator.peers.links import Dial
from strata.coordinator.service import Service
from strata.core.leadership.takeover import Probe
from strata.errors import Unavailable
from strata.testing.links import Switchboard


def memory_dial(board: Switchboard, caller: str) -> Dial:
    """Return the function that opens links from the replica `caller` to its peers."""
    return lambda address: board.dial(caller, peer_address(address))


def peer_address(address: str) -> str:
    """Return the address at which the replica at `address` accepts links of peers."""
    return f"{address}/peers"


def memory_probe(board: Switchboard, caller: str) -> Prober:
    """Return the function by which replica `caller` tests a plain connect, for example before it deposes a leader."""

    async def probe(address: str) -> Probe:
        await asyncio.sleep(board.delay_s)
        answer = board.answers(caller, peer_address(address))
        return Probe.UNCLEAR if answer is None else Probe.ANSWERED if answer else Probe.REFUSED

    return probe


class MemoryServing:
    """A `Serving`: it accepts sessions at the replica's name, and links of peers at the name's `peer_address`."""

    def __init__(self, board: Switchboard, name: str, service: Service) -> None:
        self._board = board
        self._name = name
        self.service = service
        self._tasks: asyncio.TaskGroup | None = None
        self._vanished = False

    async def start(self) -> str:
        self._board.listen(self._name, self.service.serve_member, self._spawn)
        self._board.listen(peer_address(self._name), self.service.serve_peer, self._spawn)
        return self._name

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            try:
                await self.service.run()
            finally:
                self._tasks = None  # no new task starts during the shutdown

    async def stop(self) -> None:
        if self._vanished:
            return
        self.service.part()
        await asyncio.sleep(3 * self._board.delay_s)  # messages already sent arrive first
        self.vanish()

    def vanish(self) -> None:
        """Break all links immediately, as a killed process does."""
        self._vanished = True  # another run of the replica may listen under this name from now on
        self._board.hang_up(self._name)
        self._board.hang_up(peer_address(self._name))

    def _spawn(self, logic: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if self._tasks is None:
            logic.close()
            raise Unavailable(f"{self._name} does not serve")
        return self._tasks.create_task(logic)
