"""The `strata` command: one file a command, put together in `strata.cli.app`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from strata.core.exit_codes import PREEMPTED


def main() -> None:
    """Run the command line and end the process with one of `strata.cli.console.exits`."""
    if sys.argv[1:2] != ["coordinator"]:  # which has nobody else to tell of a failed handshake
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what its lines are about, our errors say
    if sys.argv[1:2] == ["run"]:
        _requeue_if_preempted()
    try:
        from strata.cli.app import run  # noqa: PLC0415  # importing the command's name stays cheap

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _requeue_if_preempted() -> None:
    """Have `strata run` end with 75 when it is preempted while it still loads: nothing runs yet."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _preempted)


def _preempted(number: int, _frame: FrameType | None) -> None:
    # an exception could be swallowed by whatever is being imported
    os.write(2, f"strata run ends before it began: {signal.Signals(number).name}\n".encode())
    os._exit(PREEMPTED)
