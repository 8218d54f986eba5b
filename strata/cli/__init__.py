"""The `strata` command: one file a command, put together in `strata.cli.app`."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command line and end the process with one of `strata.cli.exits`."""
    if sys.argv[1:2] != ["coordinator"]:  # which has nobody else to tell of a failed handshake
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what its lines are about, our errors say
    try:
        from strata.cli.app import run  # noqa: PLC0415  # importing the command's name stays cheap

        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
