"""The `strata-chaos` command: one file for each subcommand, assembled in `strata_chaos.cli.app`."""

from __future__ import annotations

import os
import sys
import traceback

from strata_chaos.exits import Exit


def main() -> None:
    """Run the command line and exit with a code of `strata_chaos.exits`."""
    # grpc reads this variable once, when it is imported; this process forks the workload programs
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        from strata_chaos.cli.app import run  # noqa: PLC0415  # after the line above

        run()
    except KeyboardInterrupt:
        sys.exit(Exit.UNKNOWN)
    except Exception:  # noqa: BLE001 - Python's own exit code is 1, which here means a violation
        traceback.print_exc()
        sys.exit(Exit.INFRASTRUCTURE)
