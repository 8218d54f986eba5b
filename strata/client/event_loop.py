"""The background thread of this process, which runs the event loop for all blocking callers.

A trainer's thread calls plain functions. The session runs in the background thread, also while the trainer
computes. The thread is a daemon, so it keeps no program alive. An exit handler stops the thread, so that
connections are closed properly before the process exits.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

from strata.errors import Unavailable
from strata.session import fork

T = TypeVar("T")

STOP_S: Final = 2.0


class BackgroundLoop:
    """An event loop in a daemon thread, with blocking calls into it; any thread may call."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._stopped = False
        self._last_acts: list[Callable[[], Coroutine[Any, Any, None]]] = []
        self._thread = threading.Thread(target=self._main, name="strata", daemon=True)
        self._thread.start()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the loop's process; then this process has no loop and no session to
        end.
        """
        return os.getpid() != self._pid

    def call(self, coroutine: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run `coroutine` in the loop and return its result, or raise its error.

        After `timeout_s` the coroutine is cancelled and `Unavailable` raised. The coroutine is also cancelled when
        the waiting thread is interrupted.
        """
        try:
            self.refuse_inside()
        except RuntimeError:
            coroutine.close()
            raise
        future = self.submit(coroutine)
        try:
            return future.result(timeout_s)
        except concurrent.futures.CancelledError:
            raise Unavailable("Strata's background thread has stopped", hint="") from None
        except TimeoutError:
            if future.done():
                raise
            raise Unavailable(f"no answer within {timeout_s:g} s") from None
        finally:
            future.cancel()
            del future  # its error has this frame in its traceback: together they would outlive the caller

    def refuse_inside(self) -> None:
        """Raise `RuntimeError` in the loop's own thread: a wait for the loop there would never end."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("a blocking call of Strata from inside its own event loop")

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start `coroutine` in the loop and return its future."""
        try:
            self._check()
        except BaseException:
            coroutine.close()
            raise
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def soon(self, callback: Callable[[], None]) -> None:
        """Run `callback` in the loop, without waiting for it."""
        self._check()
        self._loop.call_soon_threadsafe(callback)

    def now_s(self) -> float:
        """Return the time of the loop's clock, which its timers use; from any thread."""
        return self._loop.time()

    def at_stop(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Register `act` to run in the loop before it stops; all such acts together have `STOP_S`."""
        self._last_acts.append(act)

    def forget_at_stop(self, act: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Unregister an `act` of `at_stop`."""
        if act in self._last_acts:
            self._last_acts.remove(act)

    def stop(self) -> None:
        """Cancel all tasks of the loop and end the thread. Idempotent."""
        if self._stopped or self.is_inherited:
            return
        self._stopped = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(3 * STOP_S)

    def _check(self) -> None:
        if self.is_inherited:
            fork.refuse_in_child()
        if self._stopped:
            raise Unavailable("Strata's background thread has stopped", hint="the program is ending")

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._end())
        finally:
            self._loop.close()

    async def _end(self) -> None:
        acts = [asyncio.ensure_future(act()) for act in self._last_acts]
        if acts:
            await asyncio.wait(acts, timeout=STOP_S)
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_S)
        await self._loop.shutdown_asyncgens()


_lock = threading.Lock()
_shared: BackgroundLoop | None = None


def shared() -> BackgroundLoop:
    """Return this process's loop, started by the first call; `ConfigError` in a forked child."""
    global _shared  # noqa: PLW0603  # one loop per process is intended
    fork.claim()
    with _lock:
        if _shared is None:
            _shared = BackgroundLoop()
            atexit.register(_shared.stop)
        return _shared
