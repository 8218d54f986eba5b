"""The loop that every controller runs in.

A controller has one method, `turn`: look at the view, do what is missing. The loop calls it when
the view changed in a way that the controller cares about (changes during a turn make one further
turn), when the time that the last turn asked for has come, and after `tick_s` in any case.

A controller rests for a while after each turn, in proportion to what the turn took. A turn looks at
all members of a job, and a thousand of them register in a thousand transactions: a turn for each
would leave this loop no time to hear of the others, and the view would fall behind etcd.

Controllers are isolated: what one raises is logged and tried again, with growing pauses, and
stops neither the others nor the leadership. Only the loss of the fence passes through.
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
"""The rest after a turn, in times of what the turn took."""
LONGEST_REST_S: Final = 0.25
"""Well within the time in which a leader's world controller must turn (PROTOCOLS 4.4)."""


class Controller(Protocol):
    """What the loop drives."""

    @property
    def name(self) -> str: ...

    @property
    def tick_s(self) -> float: ...

    def wants(self, batch: WatchBatch) -> bool:
        """Take notice of a change; tell whether it may give work. Called on every batch: cheap."""
        ...

    async def turn(self) -> float | None:
        """Do what is missing; return in how many seconds to look again, or None for the tick."""
        ...


class Backoff:
    """Growing pauses after failures in a row."""

    def __init__(self) -> None:
        self._pause_s = 0.0

    def failed(self) -> float:
        """Return how long to wait now."""
        self._pause_s = min(LONGEST_PAUSE_S, max(FIRST_PAUSE_S, 2 * self._pause_s))
        return self._pause_s


async def drive(controller: Controller, mirror: Mirror, measures: Measures | None = None) -> None:
    """Run `controller` until cancelled; `NotLeader` when its fence is lost."""
    changed = asyncio.Event()
    changed.set()  # what was there before counts as a change

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
            except Exception as error:  # noqa: BLE001  # one controller's fault, known or not, must not depose the leader: it is reported and tried again
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
    """Log a failure: a sentence for what Strata raises on purpose, a traceback for the rest."""
    if isinstance(error, StrataError):
        log.warning("controller_failed", controller=name, error=str(error), **fields)
    else:
        log.error("controller_failed", controller=name, exc_info=error, **fields)


def _soonest(delay_s: float | None, tick_s: float) -> float:
    return tick_s if delay_s is None else max(0.0, min(delay_s, tick_s))
