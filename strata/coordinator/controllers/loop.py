"""The loop that drives every controller.

A controller has one method, `turn`: read the view, do the missing work. The loop calls `turn` in three cases: a
change that the controller wants (changes during a turn cause one further turn), the end of the delay that the
last turn returned, and the end of `tick_s`.

After each turn a controller rests, in proportion to the turn's duration. A turn reads all members of a job, and
a thousand members register in a thousand transactions. With a turn for each transaction, the loop would have no
time to process the other registrations, and the view would fall behind etcd.

Controllers are isolated: an error in one is logged and retried with growing pauses. The error stops neither the
other controllers nor the leadership. Only the loss of the fence (`NotLeader`) is raised to the caller.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final, Protocol

from strata.coordinator.measures import Measures
from strata.coordinator.view.mirror import Mirror
from strata.core.kv.txn import WatchBatch
from strata.errors import NotLeader, StrataError
from strata.observe import get_logger

log = get_logger()

FIRST_PAUSE_S: Final = 0.1
LONGEST_PAUSE_S: Final = 5.0
REST_SHARE: Final = 2.0
"""The pause after a turn, as a multiple of the turn's duration."""
LONGEST_REST_S: Final = 0.25
"""The longest pause: much less than the time in which a leader's world controller must make a turn (PROTOCOLS 4.4)."""


class Controller(Protocol):
    """The interface of a controller to the loop."""

    @property
    def name(self) -> str: ...

    @property
    def tick_s(self) -> float: ...

    def wants(self, batch: WatchBatch) -> bool:
        """Record a change; return whether it may cause work. The loop calls this on every batch, so it must be
        cheap.
        """
        ...

    async def turn(self) -> float | None:
        """Do the missing work; return the seconds until the next turn, or None for `tick_s`."""
        ...


class Backoff:
    """Growing pauses after consecutive failures."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def failed(self) -> float:
        """Return the pause after this failure, in seconds."""
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return self._pause_s


async def drive(controller: Controller, mirror: Mirror, measures: Measures | None = None) -> None:
    """Run `controller` until cancelled; raise `NotLeader` when its fence is lost."""
    changed = asyncio.Event()
    changed.set()  # the state at the start counts as a change

    def look(batch: WatchBatch) -> None:
        if controller.wants(batch):
            changed.set()

    turns = (Measures() if measures is None else measures).controller_turns
    done, failed = turns.child(controller.name, "ok"), turns.child(controller.name, "failed")
    leave = mirror.subscribe(look)
    backoff = Backoff()
    loop = asyncio.get_running_loop()
    try:
        while True:
            changed.clear()
            began = loop.time()
            try:
                delay_s = await controller.turn()
            except NotLeader:
                raise
            except Exception as error:  # noqa: BLE001  # an error in one controller must not depose the leader: report it, and repeat the turn
                failed.add()
                report(controller.name, error)
                await asyncio.sleep(backoff.failed())
                changed.set()
                continue
            done.add()
            backoff = Backoff()
            rest_s = min(LONGEST_REST_S, REST_SHARE * (loop.time() - began))
            await asyncio.sleep(rest_s)
            with suppress(TimeoutError):
                async with asyncio.timeout(_soonest(delay_s, controller.tick_s) - rest_s):
                    await changed.wait()
    finally:
        leave()


def report(name: str, error: Exception, **fields: str) -> None:
    """Log a failure: one sentence for a StrataError, a traceback for any other error."""
    if isinstance(error, StrataError):
        log.warning("controller_failed", controller=name, error=str(error), **fields)
    else:
        log.error("controller_failed", controller=name, exc_info=error, **fields)


def _soonest(delay_s: float | None, tick_s: float) -> float:
    return tick_s if delay_s is None else max(0.0, min(delay_s, tick_s))
