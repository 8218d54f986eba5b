"""Waits that end: of a call that may never come back, its caller waits so long and no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from strata.errors import Unavailable

T = TypeVar("T")


def within(limit_s: float, act: Callable[[], T], *, what: str) -> T:
    """Return what `act` returns in a thread of its own, or raise what it raises.

    `Unavailable` after `limit_s`; `act` then goes on by itself, and what becomes of it is nobody's affair.
    """
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(act())
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread
            done.set_exception(error)

    threading.Thread(target=run, name=f"strata-{what}", daemon=True).start()
    try:
        return done.result(max(0.0, limit_s))
    except TimeoutError:
        if done.done():
            raise
        raise Unavailable(f"{what}: not done within {max(0.0, limit_s):g} s", hint="") from None
