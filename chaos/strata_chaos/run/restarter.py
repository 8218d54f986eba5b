"""The service manager of a run: restarts coordinators and etcd members that ended by themselves.

A coordinator that cannot reach etcd for long exits by design, and a service manager restarts it. Any other exit is a
finding, unless a fault explains it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from strata_chaos.run.system import System

_POLL_S: Final = 0.25
_PAUSE_S: Final = 1.0
_UNAVAILABLE: Final = 3
"""Exit code of a coordinator that could not reach etcd (`strata.cli.console.exits`)."""


class Restarter:
    """Keeps one system running. `restarts` counts the restarts, and `findings` lists the unexplained exits."""

    def __init__(self, system: System, *, say: Callable[[str], None]) -> None:
        self._system = system
        self._say = say
        self.restarts = 0
        self.findings: list[str] = []

    async def run(self) -> None:
        """Restart ended processes until cancelled."""
        while True:
            await asyncio.sleep(_POLL_S)
            for name in self._system.whole(self._system.coordinators):
                await self._coordinator(name)
            for name in self._system.whole(self._system.etcd):
                await self._etcd(name)

    async def _coordinator(self, name: str) -> None:
        coordinator = self._system.coordinators[name]
        code = coordinator.child.poll()
        if code is None:
            return
        ending = f"{name} (pid {coordinator.child.pid}) {coordinator.child.describe()} by itself"
        if code != _UNAVAILABLE:
            self.findings.append(f"{ending}:\n{coordinator.child.tail(20)}")
        self._say(f"{ending}; it is started again")
        await asyncio.sleep(_PAUSE_S)
        if name not in self._system.claimed:
            self.restarts += 1
            await asyncio.to_thread(coordinator.restart)

    async def _etcd(self, name: str) -> None:
        member = self._system.etcd[name]
        if member.running:
            return
        ending = f"{name} (pid {member.pid}) {member.child.describe()} by itself"
        self.findings.append(f"{ending}:\n{member.child.tail(20)}")
        self._say(f"{ending}; it is started again")
        await asyncio.sleep(_PAUSE_S)
        if name not in self._system.claimed:
            self.restarts += 1
            await asyncio.to_thread(member.restart)
