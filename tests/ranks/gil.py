"""A process that is alive but silent: it holds the GIL so long that none of its other Python code runs."""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time

import strata
from tests.ranks.saying import say


def main() -> int:
    """Hold the GIL once between two barriers."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hold-s", type=int, required=True)
    options = parser.parse_args()
    with strata.connect() as client:
        say("start", pid=os.getpid(), incarnation=client.incarnation)
        client.barrier("before")
        began = time.monotonic()
        ctypes.PyDLL(None).sleep(options.hold_s)  # PyDLL calls without releasing the GIL
        say("held", seconds=time.monotonic() - began)
        client.barrier("after", timeout_s=60)
        say("met", incarnation=client.incarnation)
    return 0


if __name__ == "__main__":
    sys.exit(main())
