"""Forked children (DataLoader workers) do not obey the signals that preempt the training.

A scheduler sends SIGTERM to every process of a job. A worker that died of it would end the rank,
just when the rank is about to save. To ignore the signal is not enough: torch gives its workers a
handler of their own for SIGTERM. So a child that is forked from now on has these signals blocked
in every thread, and one thread that takes them: from the parent they mean what they always did
(`Process.terminate()`), from anybody else nothing.

The kernel keeps one signal of a kind: a parent's that comes while a stranger's is still pending is
lost. The thread takes them in no time, and between the two the rank stops and saves.

A child that is spawned starts a program of its own, to which no hook goes. It inherits what is
blocked in the thread that starts it (`starting_children`), and its first act is to begin the thread
that takes the signals (`Shielded`, as a DataLoader's `worker_init_fn`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from multiprocessing import resource_tracker

_shielded: set[int] = set()
_forking = threading.local()
_obeying = 0
"""The process in which that thread runs."""


def shield_children(numbers: Iterable[int]) -> None:
    """Let children that are forked from now on obey these signals from this process only."""
    _shielded.update(numbers)


def expose_children() -> None:
    """Let children that are forked from now on obey all signals again."""
    _shielded.clear()


@contextlib.contextmanager
def starting_children(*, spawned: bool) -> Iterator[None]:
    """Have children that are spawned in the block begin with the signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _shielded)
    try:
        if spawned and _shielded:
            # Python's own helper process, which the first child that is spawned needs. Whoever starts
            # it has SIGTERM unblocked afterwards.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, _shielded)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Shielded:
    """A worker's first act: from then on it obeys these signals from its parent only.

    Can be pickled, for workers that are spawned; then comes what the program wants to be done.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then
        self._numbers = frozenset(_shielded)

    def __call__(self, worker: int) -> None:
        """Begin worker number `worker`."""
        _obey_parent_only(self._numbers)
        if self._then is not None:
            self._then(worker)


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
    _obey_parent_only(numbers)


def _obey_parent_only(numbers: frozenset[int]) -> None:
    """Begin the thread that takes these signals, unless this process has one."""
    global _obeying  # noqa: PLW0603  # a fact about the process
    if numbers and _obeying != os.getpid():
        _obeying = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
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
