"""`within`: a bounded wait for a call that may never return."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Final, TypeVar

from strata.errors import Unavailable

T = TypeVar("T")

POLL_S: Final = 0.25
"""How often a wait checks whether it must end early."""


def within(
    limit_s: float | None, act: Callable[[], T], *, what: str, over: Callable[[], bool] = lambda: False
) -> T:
    """Run `act` in a thread of its own, and return its result or raise its error.

    `Unavailable` after `limit_s`, if given, or soon after `over()` is true; `act` then continues, and its result is
    ignored.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name=f"strata-{what}", daemon=True).start()
    until_s = math.inf if limit_s is None else time.monotonic() + limit_s
    while True:
        left_s = until_s - time.monotonic()
        wait([done], max(0.0, min(left_s, POLL_S)))
        if done.done():
            return done.result()
        if over():
            raise Unavailable(f"{what}: not done, and there is no more time for it", hint="")
        if left_s <= POLL_S:
            raise Unavailable(f"{what}: not done within {max(0.0, limit_s or 0.0):g} s", hint="")
