"""Shields child processes (DataLoader workers) from the signals that preempt the training.

A scheduler sends SIGTERM to every process of a job. A worker that died of it would end the rank just when the rank is
about to save. Ignoring the signal is not enough, since torch installs a SIGTERM handler in its workers. So in a forked
child these signals are blocked in every thread, and one thread takes them. A signal from the parent keeps its effect
(`Process.terminate()`); a signal from any other process is ignored.

Limit: the kernel keeps one pending signal of a kind, so the parent's signal is lost if another process's signal is
still pending. This is harmless in practice: the thread takes a signal within moments, and between the two signals the
rank stops and saves.

A spawned child starts a new program, which no fork hook reaches. It inherits the blocked signals of the thread that
starts it (`starting_children`). As its first act, the child starts the thread that takes the signals (`Shielded`,
used as a DataLoader's `worker_init_fn`).
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
"""The id of the process in which the thread that takes the signals runs."""


def shield_children(numbers: Iterable[int]) -> None:
    """Make children forked from now on obey these signals only from this process."""
    _shielded.update(numbers)


def expose_children() -> None:
    """Make children forked from now on obey all signals again."""
    _shielded.clear()


@contextlib.contextmanager
def starting_children(*, spawned: bool) -> Iterator[None]:
    """Make children spawned in the block begin with the signals blocked."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _shielded)
    try:
        if spawned and _shielded:
            # Python's helper process, which the first spawned child needs. Starting it unblocks SIGTERM in this
            # thread, so start it now and block the signals again.
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, _shielded)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Shielded:
    """A `worker_init_fn` that makes the worker obey these signals only from its parent, and then calls `then`.

    It can be pickled, for spawned workers.
    """

    def __init__(self, then: Callable[[int], object] | None) -> None:
        self._then = then
        self._numbers = frozenset(_shielded)

    def __call__(self, worker: int) -> None:
        """Shield worker number `worker`, then call the program's `worker_init_fn`."""
        _obey_parent_only(self._numbers)
        if self._then is not None:
            self._then(worker)


def die_of(number: int) -> None:
    """End this process by a signal, with the signal's default action. May be called in any thread.

    Python lets only the main thread change a signal's action, and the main thread may be blocked in a collective, so
    this calls libc.
    """
    ctypes.CDLL(None).signal(number, None)  # SIG_DFL is a null pointer
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)


def _before() -> None:
    """Block the signals during the fork, so that they are blocked in the child from its first moment."""
    if _shielded:
        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _shielded)


def _after_in_parent() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_in_child() -> None:
    numbers = frozenset(_shielded)
    _forking.__dict__.clear()
    _shielded.clear()  # children of this child are not shielded
    _obey_parent_only(numbers)


def _obey_parent_only(numbers: frozenset[int]) -> None:
    """Start the thread that takes these signals, unless this process has one."""
    global _obeying  # noqa: PLW0603  # a fact about the process
    if numbers and _obeying != os.getpid():
        _obeying = os.getpid()
        signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
        args = (os.getppid(), numbers)
        threading.Thread(target=_obey, args=args, name="strata-shield", daemon=True).start()


def _obey(parent: int, numbers: frozenset[int]) -> None:
    """Take the signals that arrive, and obey those of the parent."""
    while True:
        taken = signal.sigwaitinfo(numbers)
        if taken.si_pid != parent:
            continue
        if taken.si_signo == signal.SIGTERM and _is_loader_worker():
            os._exit(0)  # as torch's own handler does, or the parent would report a crash
        die_of(taken.si_signo)


def _is_loader_worker() -> bool:
    data = sys.modules.get("torch.utils.data")
    return data is not None and data.get_worker_info() is not None


os.register_at_fork(before=_before, after_in_parent=_after_in_parent, after_in_child=_after_in_child)
