"""The `strata` command: one file for each subcommand, assembled in `strata.cli.app`."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType

from strata.core.exit_codes import PREEMPTED


def main() -> None:
    """Run the command line and end the process with one of `strata.cli.console.exits`."""
    if sys.argv[1:2] != ["coordinator"]:  # a coordinator reports failed handshakes only in gRPC's log
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our errors report what gRPC would log
    if sys.argv[1:2] == ["run"]:
        _requeue_if_preempted()
    try:
        from strata.cli.app import run  # noqa: PLC0415  # importing the command's name stays cheap

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _requeue_if_preempted() -> None:
    """Install handlers so that `strata run` exits with 75 if it is preempted before any rank runs."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _preempted)


def _preempted(number: int, _frame: FrameType | None) -> None:
    # use os._exit: the module that is being imported might catch an exception
    os.write(2, f"strata run ends before it began: {signal.Signals(number).name}\n".encode())
    os._exit(PREEMPTED)
