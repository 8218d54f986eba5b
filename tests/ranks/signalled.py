"""A process that handles signals as a training does, and reports those that it receives."""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
from types import FrameType

from strata.training.stop.signals import PreemptSignals
from tests.ranks.saying import say


def child() -> None:
    """Run as a forked child, like a DataLoader worker."""
    say("child", pid=os.getpid(), parent=os.getppid())
    while True:
        time.sleep(1000)


def own_handler(number: int, _frame: FrameType | None) -> None:
    say("own", number=number)


def block_in_c() -> None:
    """Block in C code, as in a collective, so that Python cannot run a handler."""
    mutex = ctypes.create_string_buffer(64)
    lock = ctypes.CDLL(None).pthread_mutex_lock
    lock(mutex)
    lock(mutex)  # this thread holds the lock already: it blocks forever


def main() -> int:
    """Wait for signals, in the way that the options choose."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", action="store_true", help="have a handler of one's own")
    parser.add_argument("--nobody", action="store_true", help="no coordinator can take the request to stop")
    parser.add_argument("--wait", choices=("c", "python", "asyncio", "child", "closed"), default="python")
    options = parser.parse_args()
    if options.own:
        signal.signal(signal.SIGTERM, own_handler)
    ended = threading.Event()

    def requested(number: int) -> bool:
        say("asked", number=number)
        ended.set()
        return not options.nobody

    signals = PreemptSignals((signal.SIGTERM, signal.SIGUSR1), requested)
    match options.wait:
        case "c":
            say("ready", pid=os.getpid())
            block_in_c()
        case "asyncio":
            asyncio.run(in_asyncio())
        case "child":
            worker = multiprocessing.get_context("fork").Process(target=child, daemon=True)
            worker.start()
            say("ready", pid=os.getpid())
            ended.wait()
            worker.terminate()
            worker.join()
            say("terminated", code=worker.exitcode)
        case "closed":
            signals.close()
            say("ready", pid=os.getpid(), default=signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
            ended.wait()
        case _:
            say("ready", pid=os.getpid())
            while True:
                time.sleep(
                    0.05
                )  # a signal that arrives between Python's check and the sleep waits until the sleep ends
    return 0


async def in_asyncio() -> None:
    """Let asyncio use the file descriptor to which Python writes signals."""
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR2, lambda: say("asyncio"))
    say("ready", pid=os.getpid())
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
