"""`VirtualTimeLoop`: a deterministic event loop with a virtual clock, on which hours of timeouts take milliseconds.

    result = virtual_time.run(main(), seed=7)

When no callback is ready, the clock jumps to the next timer, so nothing waits in real time. Code under test must take
the time from its loop or from a clock that is passed in; `time.monotonic()` is unchanged. The loop refuses I/O and
threads.

asyncio promises no order for timers that are due at the same moment. Here the seed decides their order: it makes
every timer late by less than a microsecond. Ready callbacks keep asyncio's order. The same seed gives the same run if
the code under test does not depend on object ids. In another process, the code must not depend on string hashes
either (PYTHONHASHSEED). asyncio's sets of tasks have a fixed order, since a task's hash is its number.

While a program is frozen (`strata.testing.processes`), its callbacks are held until it resumes.
"""

from __future__ import annotations

import asyncio
import functools
import heapq
import itertools
import random
from asyncio import BaseEventLoop, TimerHandle
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, Final, NoReturn, ParamSpec, TypeVar, TypeVarTuple, Unpack

from strata.testing.processes import process_of

_T = TypeVar("_T")
_Ts = TypeVarTuple("_Ts")
_P = ParamSpec("_P")

EPOCH_S: Final = 1_000.0
"""The time at the start. It is not 0, because code may use 0 for "never"."""
TIE_BREAK_S: Final = 1e-6
MAX_TURNS: Final = 200_000
"""The maximum number of loop iterations at one moment; a program that needs more is in a busy loop."""


class DeadlockError(RuntimeError):
    """No callback is ready and no timer is set: the program would wait for ever."""


class VirtualTimeOverError(RuntimeError):
    """The program takes more virtual time than its limit."""


class StandstillError(RuntimeError):
    """The program always has a ready callback, so the clock never moves."""


class _FreezableHandle(asyncio.Handle):
    """A callback that is held while its program is frozen."""

    __slots__ = ()

    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]  # asyncio's own
        if process is not None and process.frozen:
            process.hold(self)
        else:
            super()._run()


class _FreezableTimer(TimerHandle):
    """A timer whose callback is held while its program is frozen."""

    __slots__ = ()

    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]  # asyncio's own
        if process is not None and process.frozen:
            process.hold(self)
        else:
            super()._run()

    def __lt__(self, other: TimerHandle) -> bool:
        """Compare as asyncio does, but without checking the type of `other`: this runs 250,000 times a minute."""
        return self._when < other._when  # type: ignore[attr-defined,no-any-return]  # asyncio's own


class _DueTimer:
    """A handle without a time: uvloop returns such a handle for a timer that is already due."""

    __slots__ = ("_timer",)

    _source_traceback = None
    """Read by `call_later` of asyncio's loop."""

    def __init__(self, timer: TimerHandle) -> None:
        self._timer = timer

    def cancel(self) -> None:
        self._timer.cancel()

    def cancelled(self) -> bool:
        return self._timer.cancelled()


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number, so that sets of tasks have the same order in every run."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # set before asyncio puts the task into its own set
        super().__init__(coroutine, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualTimeLoop(BaseEventLoop):
    """An event loop in virtual time; most callers want `run` or `in_virtual_time`."""

    def __init__(self, *, seed: int = 0, limit_s: float = 86_400.0) -> None:
        super().__init__()
        self._now = EPOCH_S
        self._end = EPOCH_S + limit_s
        self._chance = random.Random(seed)
        # BaseEventLoop polls the selector for I/O events after it has run the ready callbacks.
        self._selector = _Jump(self)
        numbers = itertools.count(1)
        self.set_task_factory(
            lambda loop, coroutine, **options: _NumberedTask(next(numbers), coroutine, loop=loop, **options)
        )

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[_Ts]], object],
        *args: *_Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        """Call at a time, as in asyncio; the seed orders timers that are due at the same moment."""
        late = self._chance.random() * TIE_BREAK_S
        timer = _FreezableTimer(when + late, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]  # as BaseEventLoop does
        timer._scheduled = True  # type: ignore[attr-defined]  # so that BaseEventLoop removes it when cancelled
        return timer if when > self._now else _DueTimer(timer)  # type: ignore[return-value]  # as uvloop's

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[object, ...], context: Context | None
    ) -> asyncio.Handle:
        """Replace BaseEventLoop's method, which `call_soon` and `call_soon_threadsafe` call."""
        handle = _FreezableHandle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]  # as BaseEventLoop does
        return handle

    def run_in_executor(self, *_args: object, **_options: object) -> NoReturn:
        """Raise: a thread would run in real time."""
        raise RuntimeError("no threads in virtual time")

    def advance(self) -> None:
        """Move the clock to the next timer."""
        scheduled: list[TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not scheduled:
            raise DeadlockError(f"nothing is ready and no timer is set; {_waiting_tasks(self)}")
        self._now = max(self._now, scheduled[0].when())
        if self._now > self._end:
            raise VirtualTimeOverError(f"still running after its virtual time; {_waiting_tasks(self)}")

    def suspend(self, for_s: float) -> None:
        """Advance the clock by `for_s` in one step, as if the host had slept: no callback runs meanwhile."""
        self._now += for_s

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no I/O events."""

    def _write_to_self(self) -> None:
        """Do nothing: `call_soon_threadsafe` calls this method to wake a selector, and this loop has none."""


class _Jump:
    """Replaces the selector: instead of waiting for the timeout, it moves the clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._turns = 0

    def select(self, timeout: float | None) -> tuple[()]:
        self._turns += 1
        if timeout is None or timeout > 0:
            self._loop.advance()
            self._turns = 0
        elif self._turns > MAX_TURNS:
            self._turns = 0  # so that tasks have turns left to clean up after the error
            raise StandstillError(
                f"{MAX_TURNS} turns, and the clock has not moved; {_waiting_tasks(self._loop)}"
            )
        return ()


def _waiting_tasks(loop: VirtualTimeLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack()
        place = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "?"
        lines.append(f"  {task.get_name()} at {place}")
    return "\n".join(["tasks:", *sorted(lines)])


def run(main: Coroutine[Any, Any, _T], *, seed: int = 0, limit_s: float = 86_400.0) -> _T:
    """Run `main` to its end in a new virtual loop and return its result.

    Raise `DeadlockError` if `main` would wait for ever, `StandstillError` if it never waits, and
    `VirtualTimeOverError` if it is not done after `limit_s` of virtual time. Each error lists all tasks and the lines
    at which they wait.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed=seed, limit_s=limit_s)) as runner:
        return runner.run(main)


def in_virtual_time(
    *, seed: int = 0, limit_s: float = 86_400.0
) -> Callable[[Callable[_P, Coroutine[Any, Any, None]]], Callable[_P, None]]:
    """Decorate an `async def` test to run in virtual time."""

    def decorate(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
        @functools.wraps(test)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
            run(test(*args, **kwargs), seed=seed, limit_s=limit_s)

        return wrapper

    return decorate
