"""`VirtualTimeLoop`: an event loop with a virtual clock: hours of timeouts in milliseconds, deterministically.

    result = virtual_time.run(main(), seed=7)

When nothing is ready, the clock jumps to the next timer; there is no real waiting. It works for code that takes time
from its loop or from a clock passed in; `time.monotonic()` is unchanged. The loop refuses I/O and threads.

The seed decides the order of timers due at the same moment, for which asyncio promises none: every timer is late by
less than a microsecond. Ready callbacks keep asyncio's order. The same seed gives the same run if the code under test
does not depend on object ids, or, from one process to the next, on string hashes (PYTHONHASHSEED). asyncio's sets of
tasks keep a fixed order, since a task's hash is its number.

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
"""The time at the start. Not 0, which code may take for "never"."""
TIE_BREAK_S: Final = 1e-6
MAX_TURNS: Final = 200_000
"""The maximum number of loop iterations at one moment; a program that needs more is in a busy loop."""


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait for ever."""


class VirtualTimeOverError(RuntimeError):
    """The program runs beyond its limit of virtual time."""


class StandstillError(RuntimeError):
    """The program always has a ready callback, so that the clock never moves."""


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
    """The same for a timer."""

    __slots__ = ()

    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]  # asyncio's own
        if process is not None and process.frozen:
            process.hold(self)
        else:
            super()._run()

    def __lt__(self, other: TimerHandle) -> bool:
        """As asyncio's, but without its type check of `other`: this runs a quarter of a million times a minute."""
        return self._when < other._when  # type: ignore[attr-defined,no-any-return]  # asyncio's own


class _DueTimer:
    """A handle without a time, as uvloop returns for a timer that is due already."""

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
        # BaseEventLoop polls this for I/O events whenever it has run the ready callbacks.
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
        """As asyncio's; the seed orders timers due at the same moment."""
        late = self._chance.random() * TIE_BREAK_S
        timer = _FreezableTimer(when + late, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]  # as BaseEventLoop does
        timer._scheduled = True  # type: ignore[attr-defined]  # so that BaseEventLoop removes it when cancelled
        return timer if when > self._now else _DueTimer(timer)  # type: ignore[return-value]  # as uvloop's

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[object, ...], context: Context | None
    ) -> asyncio.Handle:
        """As BaseEventLoop's, which `call_soon` and `call_soon_threadsafe` go through."""
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
        """Advance the clock at once, as if the host had slept: no callback runs, and timers are late by `for_s`."""
        self._now += for_s

    def _process_events(self, event_list: object) -> None:
        """Do nothing: there are no I/O events."""

    def _write_to_self(self) -> None:
        """Do nothing: `call_soon_threadsafe` calls this to wake a selector, and there is none."""


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
            self._turns = 0  # so that tasks can clean up after the error
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

    Raises `DeadlockError` if it would wait for ever, `StandstillError` if it never waits, and `VirtualTimeOverError` if
    it is not done after `limit_s` of virtual time. Each error lists all tasks and the lines where they wait.
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
