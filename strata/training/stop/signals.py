"""`PreemptSignals`: handles the signals by which a scheduler preempts a training.

Python runs a signal handler in the main thread between two bytecode instructions, and never while that thread waits in
a collective. So a separate thread reads the signal's number from the wakeup descriptor, which Python's C handler writes
immediately. If the program uses that descriptor itself (asyncio does), the Python handler writes the number instead, as
soon as it runs.

The first signal requests that all ranks stop. A second signal of the same kind has the effect that it would have
without Strata. Any signal in a world that has ended also has that effect.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Final

from strata.training.stop.shield import die_of, expose_children, shield_children

_HANDLED: Final = 0x80
"""This bit marks a byte that the Python handler wrote, not C code: each signal may be written by both."""
_taking: Final[list[PreemptSignals]] = []

log: Final = logging.getLogger("strata.training")


class PreemptSignals:
    """Calls `on_signal(number)` in a thread of its own when a signal arrives.

    If `on_signal` returns False, nothing can handle the request, and the signal has its earlier effect. Must be made in
    the main thread; in any other thread it only logs that signals cannot be handled.
    """

    def __init__(self, numbers: Sequence[int], on_signal: Callable[[int], bool]) -> None:
        self._on_signal = on_signal
        self._before: dict[int, Any] = {}
        self._deadly: set[int] = set()
        self._received: dict[int, list[int]] = {number: [0, 0] for number in numbers}
        self._read = self._write = -1
        self._owns_wakeup = False
        if not numbers:
            return
        if threading.current_thread() is not threading.main_thread():
            log.warning("signals cannot be taken outside of the main thread: %s", _names(numbers))
            return
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        for number in numbers:
            before = self._before[number] = signal.getsignal(number)
            if before is signal.SIG_DFL:
                self._deadly.add(number)
            signal.signal(number, self._handle)
        self._take_wakeup()
        shield_children(numbers)
        _taking.append(self)
        threading.Thread(target=self._listen, name="strata-signals", daemon=True).start()

    def close(self) -> None:
        """Restore the earlier handlers, unless other code has replaced ours meanwhile. Idempotent.

        Works only in the main thread; in another thread the handlers stay until the process ends.
        """
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        self._restore()
        _taking.remove(self)
        expose_children()
        ours, self._write = self._write, -1
        os.close(ours)  # ends the listener; the listener closes the other end of the pipe

    def _take_wakeup(self) -> None:
        taken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._owns_wakeup = taken == -1
        if taken != -1:
            signal.set_wakeup_fd(taken)

    def _restore(self) -> None:
        if self._owns_wakeup and (now := signal.set_wakeup_fd(-1)) not in {-1, self._write}:
            signal.set_wakeup_fd(now)  # other code set the descriptor after us
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def in_child(self) -> None:
        """Detach a forked child, whose signals must not reach the parent's pipe."""
        self._restore()
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Write the signal's number to the pipe, and call the program's own handler."""
        with contextlib.suppress(OSError):  # the pipe is full: it holds enough signals already
            os.write(self._write, bytes([number | _HANDLED]))
        before = self._before.get(number)
        if callable(before):
            before(number, frame)

    def _listen(self) -> None:
        while data := os.read(self._read, 64):
            for byte in data:
                self._take(byte & ~_HANDLED, by_handler=bool(byte & _HANDLED))
        os.close(self._read)

    def _take(self, number: int, *, by_handler: bool) -> None:
        counts = self._received.get(number)
        if counts is None:
            return  # another signal that the program handles
        received_before = max(counts)
        counts[by_handler] += 1
        if max(counts) == received_before:
            return
        if received_before:
            self._obey(number)
        else:  # in another thread, or a second signal could not be read meanwhile
            threading.Thread(
                target=self._request_stop, args=(number,), name="strata-preempt", daemon=True
            ).start()

    def _request_stop(self, number: int) -> None:
        if not self._on_signal(number):
            self._obey(number)

    def obey_received(self) -> None:
        """Obey the signals received so far, unless the handlers are restored: the world has ended without a stop."""
        for number, counts in self._received.items():
            if any(counts) and self._before:
                self._obey(number)

    def _obey(self, number: int) -> None:
        """Apply the signal's default action if it had one; a handler of the program was called already."""
        if number in self._deadly:
            log.warning("%s ends this process", signal.Signals(number).name)
            die_of(number)


def _names(numbers: Sequence[int]) -> str:
    return ", ".join(signal.Signals(number).name for number in numbers)


def _after_in_child() -> None:
    while _taking:
        _taking.pop().in_child()


os.register_at_fork(after_in_child=_after_in_child)
