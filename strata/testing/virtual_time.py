"""An event loop whose clock jumps: hours of timeouts in milliseconds, the same on every run.

    result = virtual_time.run(main(), seed=7)

When nothing is ready the clock moves to the next timer; nobody waits for real. It serves code that
takes time from its loop or from a clock passed in; `time.monotonic()` stays what it is. There is no
I/O and there are no threads in it: both are refused.

The seed decides the order of timers that are due at the same moment, for which asyncio promises
none: every timer is late by less than a microsecond. Callbacks that are ready keep asyncio's order.
The same seed gives the same run as long as the code under test does not depend on object ids, nor,
from one process to the next, on the hashes of strings (PYTHONHASHSEED). Sets of tasks, of which
asyncio is full, keep one order: a task's hash is its number.

A program that is frozen (`strata.testing.processes`) has its callbacks kept until it goes on.
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
"""What the clock shows at the start. Not 0, which code may take for "never"."""
TIE_BREAK_S: Final = 1e-6
MAX_TURNS: Final = 200_000
"""So often the loop may turn at one moment: what takes more waits for nothing, again and again."""


class DeadlockError(RuntimeError):
    """Nothing is ready and no timer is set: the program would wait for ever."""


class VirtualTimeOverError(RuntimeError):
    """The program went on beyond the time it was given."""


class StandstillError(RuntimeError):
    """The program is always ready to go on, so that the clock never moves."""


class _Gated(asyncio.Handle):
    """A callback that waits while its program is frozen."""

    __slots__ = ()

    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]  # asyncio's own
        if process is not None and process.frozen:
            process.hold(self)
        else:
            super()._run()


class _GatedTimer(TimerHandle):
    """The same for a timer."""

    __slots__ = ()

    def _run(self) -> None:
        process = process_of(self._context)  # type: ignore[attr-defined]  # asyncio's own
        if process is not None and process.frozen:
            process.hold(self)
        else:
            super()._run()

    def __lt__(self, other: TimerHandle) -> bool:
        """As asyncio's, which asks first what `other` is: a quarter of a million times a minute here."""
        return self._when < other._when  # type: ignore[attr-defined,no-any-return]  # asyncio's own


class _DueTimer:
    """What uvloop hands out for a timer that is due already: a handle that knows no time."""

    __slots__ = ("_timer",)

    _source_traceback = None
    """Which `call_later` of asyncio's loop looks at."""

    def __init__(self, timer: TimerHandle) -> None:
        self._timer = timer

    def cancel(self) -> None:
        self._timer.cancel()

    def cancelled(self) -> bool:
        return self._timer.cancelled()


class _NumberedTask(asyncio.Task[Any]):
    """A task whose hash is its number: sets of tasks have one order in every run."""

    def __init__(self, number: int, coroutine: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number  # before the task is put into asyncio's own set
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
        # BaseEventLoop asks this for I/O events whenever it has run what was ready.
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
        """As asyncio's; the seed orders what is due at the same moment."""
        late = self._chance.random() * TIE_BREAK_S
        timer = _GatedTimer(when + late, callback, args, self, context)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]  # as BaseEventLoop does
        timer._scheduled = True  # type: ignore[attr-defined]  # so that a cancelled one is swept up
        return timer if when > self._now else _DueTimer(timer)  # type: ignore[return-value]  # as uvloop's

    def _call_soon(
        self, callback: Callable[..., object], args: tuple[object, ...], context: Context | None
    ) -> asyncio.Handle:
        """As BaseEventLoop's, which `call_soon` and `call_soon_threadsafe` go through."""
        handle = _Gated(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]  # as BaseEventLoop does
        return handle

    def run_in_executor(self, *_args: object, **_options: object) -> NoReturn:
        """Refuse: a thread would run in real time."""
        raise RuntimeError("no threads in virtual time")

    def advance(self) -> None:
        """Move the clock to the next timer."""
        scheduled: list[TimerHandle] = self._scheduled  # type: ignore[attr-defined]
        if not scheduled:
            raise DeadlockError(f"nothing is ready and no timer is set; {_who_waits(self)}")
        self._now = max(self._now, scheduled[0].when())
        if self._now > self._end:
            raise VirtualTimeOverError(f"still running after its virtual time; {_who_waits(self)}")

    def suspend(self, for_s: float) -> None:
        """Let so much time pass at once, as while the host slept: no callback ran, and timers are late by it."""
        self._now += for_s

    def _process_events(self, event_list: object) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Called by `call_soon_threadsafe`; there is nobody to wake."""


class _Jump:
    """In the place of a selector: instead of waiting so long, it moves the clock."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        self._loop = loop
        self._turns = 0

    def select(self, timeout: float | None) -> tuple[()]:
        self._turns += 1
        if timeout is None or timeout > 0:
            self._loop.advance()
            self._turns = 0
        elif self._turns > MAX_TURNS:
            self._turns = 0  # for the clearing up
            raise StandstillError(f"{MAX_TURNS} turns, and the clock has not moved; {_who_waits(self._loop)}")
        return ()


def _who_waits(loop: VirtualTimeLoop) -> str:
    lines = []
    for task in asyncio.all_tasks(loop):
        frames = task.get_stack()
        place = f"{frames[-1].f_code.co_filename}:{frames[-1].f_lineno}" if frames else "?"
        lines.append(f"  {task.get_name()} at {place}")
    return "\n".join(["tasks:", *sorted(lines)])


def run(main: Coroutine[Any, Any, _T], *, seed: int = 0, limit_s: float = 86_400.0) -> _T:
    """Run `main` to its end in a fresh virtual loop and return its result.

    Raises `DeadlockError` when it would wait for ever, `StandstillError` when it never waits, and
    `VirtualTimeOverError` when it is not done after `limit_s` of virtual time; all name every task
    and where it waits.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(seed=seed, limit_s=limit_s)) as runner:
        return runner.run(main)


def in_virtual_time(
    *, seed: int = 0, limit_s: float = 86_400.0
) -> Callable[[Callable[_P, Coroutine[Any, Any, None]]], Callable[_P, None]]:
    """Make an `async def` test one that runs in virtual time."""

    def decorate(test: Callable[_P, Coroutine[Any, Any, None]]) -> Callable[_P, None]:
        @functools.wraps(test)
        def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> None:
            run(test(*args, **kwargs), seed=seed, limit_s=limit_s)

        return wrapper

    return decorate
