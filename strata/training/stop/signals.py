"""Signals by which a scheduler preempts a training: `PreemptSignals`.

Python runs a signal's handler in the main thread, between two of its instructions: not while that
thread waits in a collective. So the signal's number is taken from the wakeup descriptor, which C
code writes at once, by a thread of our own. Where a program has put that descriptor to its own use
(asyncio does), the handler writes the number instead, as soon as Python lets it.

The first signal asks all ranks to stop. The second of its kind, or a signal in a world that has
ended, means what it meant before Strata was there.
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
"""Set in a byte that the handler wrote, not C code: each signal may be told twice."""
_taking: Final[list[PreemptSignals]] = []

log: Final = logging.getLogger("strata.training")


class PreemptSignals:
    """Calls `asked(number)` in a thread of its own when a signal came. False from it means that
    nobody can be asked, and the signal is obeyed as if Strata were not there.

    Made in the main thread; elsewhere signals cannot be taken, and that is logged.
    """

    def __init__(self, numbers: Sequence[int], asked: Callable[[int], bool]) -> None:
        self._asked = asked
        self._before: dict[int, Any] = {}
        self._deadly: set[int] = set()
        self._told: dict[int, list[int]] = {number: [0, 0] for number in numbers}
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
        """Give the signals back, unless somebody else took them meanwhile. Idempotent.

        Only from the main thread; from another one they stay ours until the process ends.
        """
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        self._restore()
        _taking.remove(self)
        expose_children()
        ours, self._write = self._write, -1
        os.close(ours)  # ends the listener, which closes the other end

    def _take_wakeup(self) -> None:
        taken = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._owns_wakeup = taken == -1
        if taken != -1:
            signal.set_wakeup_fd(taken)

    def _restore(self) -> None:
        if self._owns_wakeup and (now := signal.set_wakeup_fd(-1)) not in {-1, self._write}:
            signal.set_wakeup_fd(now)  # somebody took it after us
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL if before is None else before)
        self._before.clear()

    def in_child(self) -> None:
        """In a forked child signals are the child's own, and must not reach the parent's pipe."""
        self._restore()
        os.close(self._read)
        os.close(self._write)
        self._read = self._write = -1

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Make sure that it is heard, and do what the program itself wanted to do."""
        with contextlib.suppress(OSError):  # full: then there is more than enough to hear
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
        told = self._told.get(number)
        if told is None:
            return  # another signal of the program's
        heard_before = max(told)
        told[by_handler] += 1
        if max(told) == heard_before:
            return
        if heard_before:
            self._obey(number)
        else:  # not here, or a second signal would not be heard meanwhile
            threading.Thread(target=self._ask, args=(number,), name="strata-preempt", daemon=True).start()

    def _ask(self, number: int) -> None:
        if not self._asked(number):
            self._obey(number)

    def obey_heard(self) -> None:
        """Nobody stops this world any more: obey a signal that was heard, if there was one and they are not given back."""
        for number, told in self._told.items():
            if any(told) and self._before:
                self._obey(number)

    def _obey(self, number: int) -> None:
        """Do what the signal does without us; a handler of the program's own was called already."""
        if number in self._deadly:
            log.warning("%s ends this process", signal.Signals(number).name)
            die_of(number)


def _names(numbers: Sequence[int]) -> str:
    return ", ".join(signal.Signals(number).name for number in numbers)


def _after_in_child() -> None:
    while _taking:
        _taking.pop().in_child()


os.register_at_fork(after_in_child=_after_in_child)
