"""`Process`: several programs in one event loop, each of which can be frozen as by SIGSTOP.

    replica = Process("r1")
    replica.start(main(), tasks=tasks)
    replica.freeze(); ...; replica.thaw()

All tasks, timers and callbacks that a program starts belong to the program, because asyncio passes the program's
context on to them. While a program is frozen, none of them runs, and the clock continues. After `thaw` all due
callbacks run immediately, in order. The parts between programs (links, the store) run in the context `BETWEEN`, and
never freeze. This works only in a `VirtualTimeLoop`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, ContextVar, copy_context
from typing import Any, Final

BETWEEN: Final = Context()
"""The context of callbacks that belong to no program: pass it to `call_soon` and `call_at`."""


class Process:
    """One program; `frozen` while it is stopped. `held` counts the callbacks that were delayed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.frozen = False
        self.held = 0
        self.task: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Handle] = []
        self._watchers: list[Callable[[], None]] = []

    def start(self, main: Coroutine[Any, Any, None], *, tasks: asyncio.TaskGroup) -> None:
        """Run `main` as this program, owned by `tasks`."""
        context = copy_context()
        context.run(_current.set, self)
        self.task = tasks.create_task(main, name=self.name, context=context)

    @property
    def alive(self) -> bool:
        """Whether the program was started and has not ended, frozen or not."""
        return self.task is not None and not self.task.done()

    def freeze(self) -> None:
        """Run no callback of this program until `thaw`."""
        if not self.frozen:
            self.frozen = True
            self._notify()

    def thaw(self) -> None:
        """Resume the program: callbacks that became due meanwhile run now, in order."""
        if self.frozen:
            self.frozen = False
            waiting, self._waiting = self._waiting, []
            asyncio.get_running_loop()._ready.extend(waiting)  # type: ignore[attr-defined]  # a VirtualTimeLoop's
            self._notify()

    def hold(self, handle: asyncio.Handle) -> None:
        """Delay a due callback until the program is thawed."""
        self.held += 1
        self._waiting.append(handle)

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call `watcher` whenever the program is frozen or resumes."""
        self._watchers.append(watcher)

    def _notify(self) -> None:
        for watcher in self._watchers:
            watcher()


_current: ContextVar[Process | None] = ContextVar("process", default=None)


def current() -> Process | None:
    """Return the program that the caller is a part of, or None."""
    return _current.get()


def process_of(context: Context) -> Process | None:
    """Return the program that this context belongs to, or None."""
    return context.get(_current)
