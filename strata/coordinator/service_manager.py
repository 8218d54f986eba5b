"""Telling systemd how a replica is: `sd_notify(3)`, a datagram a message, no library.

With `Type=notify` a unit counts as started once READY=1 has come, so a rolling restart waits for a
replica that serves. With `WatchdogSec=` systemd ends and restarts one whose event loop has stood
still for so long: WATCHDOG=1 comes from a timer of that loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

LOOK_S: Final = 0.25
"""How often the replica is looked at; a message goes out for a change and for the watchdog only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceManager:
    """Where to send, and how often the watchdog wants to hear of us (None: never)."""

    address: str
    watchdog_s: float | None = None

    @classmethod
    def of(cls, env: Mapping[str, str], *, pid: int) -> ServiceManager | None:
        """Return the one that started the process `pid` with `env`; None where none did."""
        address = env.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return None
        limit_us, watched = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID") or str(pid)
        if not limit_us.isdecimal() or int(limit_us) == 0 or watched != str(pid):
            return cls(address=address)
        return cls(address=address, watchdog_s=int(limit_us) / 1e6)

    def say(self, *assignments: str) -> None:
        """Send one message, if somebody listens: a replica's work does not depend on it."""
        path = self.address
        target = "\0" + path[1:] if path.startswith("@") else path  # the abstract namespace
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out,
        ):
            out.sendto("\n".join(assignments).encode(), target)


@contextlib.contextmanager
def told(manager: ServiceManager | None, is_ready: Callable[[], tuple[bool, str]]) -> Iterator[None]:
    """Tell `manager`, while the body runs, when the replica is ready, and why not; then that it ends."""
    if manager is None:
        yield
        return
    report = _Report(manager, is_ready)
    report.look()
    try:
        yield
    finally:
        report.end()


class _Report:
    """A timer of the running loop: what stops the loop stops it too, which is its purpose."""

    def __init__(self, manager: ServiceManager, is_ready: Callable[[], tuple[bool, str]]) -> None:
        self._manager = manager
        self._is_ready = is_ready
        self._loop = asyncio.get_running_loop()
        self._was_ready = False
        self._status = ""
        self._fed_at = -float("inf")

    def look(self) -> None:
        message: list[str] = []
        ready, why = self._is_ready()
        if ready and not self._was_ready:
            self._was_ready = True
            message.append("READY=1")
        status = "serves" if ready else f"does not serve: {why}"
        if status != self._status:
            self._status = status
            message.append(f"STATUS={status}")
        limit_s, now = self._manager.watchdog_s, self._loop.time()
        if limit_s is not None and now - self._fed_at >= limit_s / 4:
            self._fed_at = now
            message.append("WATCHDOG=1")
        if message:
            self._manager.say(*message)
        self._timer = self._loop.call_later(LOOK_S, self.look)

    def end(self) -> None:
        self._timer.cancel()
        self._manager.say("STOPPING=1", "STATUS=ends")
