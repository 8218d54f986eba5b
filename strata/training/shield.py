"""Forked children (DataLoader workers) do not obey the signals that preempt the training.

A scheduler sends SIGTERM to every process of a job. A worker that died of it would end the rank,
just when the rank is about to save. To ignore the signal is not enough: torch gives its workers a
handler of their own for SIGTERM. So a child that is forked from now on has these signals blocked
in every thread, and one thread that takes them: from the parent they mean what they always did
(`Process.terminate()`), from anybody else nothing.

Children that are spawned start a program of their own, and are not shielded.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterable

_shielded: set[int] = set()
_forking = threading.local()


def shield_children(numbers: Iterable[int]) -> None:
    """Let children that are forked from now on obey these signals from this process only."""
    _shielded.update(numbers)


def expose_children() -> None:
    """Let children that are forked from now on obey all signals again."""
    _shielded.clear()


def die_of(number: int) -> None:
    """End this process by a signal as if nobody handled it. May be called in any thread.

    Python lets only the main thread change what a signal does, and that one may be held up in a
    collective; so libc is asked.
    """
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL is a null pointer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _before() -> None:
    """Block the signals while it is forked: in the child they stay blocked from its first moment."""
    if _shielded:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _shielded)


def _after_in_parent() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_in_child() -> None:
    numbers = frozenset(_shielded)
    _forking.__dict__.clear()
    _shielded.clear()  # its own children are its own affair
    if numbers:
        args = (os.getppid(), numbers)
        threading.Thread(target=_obey, args=args, name="strata-shield", daemon=True).start()


def _obey(parent: int, numbers: frozenset[int]) -> None:
    """Take the signals that come, and do what the parent's ask for."""
    while True:
        taken = signal.sigwaitinfo(numbers)
        if taken.si_pid != parent:
            continue
        if taken.si_signo == signal.SIGTERM and _is_loader_worker():
            os._exit(0)  # what torch's own handler does: else its parent takes it for a crash
        die_of(taken.si_signo)


def _is_loader_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
