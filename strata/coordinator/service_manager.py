"""Readiness and watchdog messages to systemd: `sd_notify(3)`, one datagram a message, without a library.

With `Type=notify`, systemd counts a unit as started once it receives READY=1, so a rolling restart waits until
a replica serves. With `WatchdogSec=`, systemd kills and restarts a replica whose event loop hangs for longer than the
configured time: the messages WATCHDOG=1 come from a timer of the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

POLL_S: Final = 0.25
"""How often the replica's state is polled; a message is sent only for a change and for the watchdog."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceManager:
    """The socket of the service manager, and the watchdog's timeout (None: no watchdog)."""

    address: str
    watchdog_s: float | None = None

    @classmethod
    def of(cls, env: Mapping[str, str], *, pid: int) -> ServiceManager | None:
        """Return the service manager that started process `pid` with environment `env`, or None."""
        address = env.get("NOTIFY_SOCKET", "")
        if not address.startswith(("/", "@")):
            return None
        limit_us, watched = env.get("WATCHDOG_USEC", ""), env.get("WATCHDOG_PID") or str(pid)
        if not limit_us.isdecimal() or int(limit_us) == 0 or watched != str(pid):
            return cls(address=address)
        return cls(address=address, watchdog_s=int(limit_us) / 1e6)

    def notify(self, *assignments: str) -> None:
        """Send one message; ignore errors, since a replica's work does not depend on it."""
        path = self.address
        target = "\0" + path[1:] if path.startswith("@") else path  # the abstract namespace
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as out,
        ):
            out.sendto("\n".join(assignments).encode(), target)


@contextlib.contextmanager
def reporting_readiness(
    manager: ServiceManager | None, is_ready: Callable[[], tuple[bool, str]]
) -> Iterator[None]:
    """Report to `manager` whether the replica is ready, and why not, while the body runs; then report its stop."""
    if manager is None:
        yield
        return
    report = _Report(manager, is_ready)
    report.poll()
    try:
        yield
    finally:
        report.end()


class _Report:
    """A timer of the running event loop, so that a loop that hangs sends no watchdog messages."""

    def __init__(self, manager: ServiceManager, is_ready: Callable[[], tuple[bool, str]]) -> None:
        self._manager = manager
        self._is_ready = is_ready
        self._loop = asyncio.get_running_loop()
        self._was_ready = False
        self._status = ""
        self._watchdog_sent_at = -float("inf")

    def poll(self) -> None:
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
        if limit_s is not None and now - self._watchdog_sent_at >= limit_s / 4:
            self._watchdog_sent_at = now
            message.append("WATCHDOG=1")
        if message:
            self._manager.notify(*message)
        self._timer = self._loop.call_later(POLL_S, self.poll)

    def end(self) -> None:
        self._timer.cancel()
        self._manager.notify("STOPPING=1", "STATUS=ends")
