"""A prestarted coordinator that has done its imports and waits for a line before it serves.

    python warm_coordinator.py --replica r1 …      # the options of `strata coordinator`

It waits for one line on stdin, so a test that kills many coordinators does not wait for Python's start.
"""

from __future__ import annotations

import sys

import strata.coordinator.main  # noqa: F401  # the slow import
from strata.cli import main

if __name__ == "__main__":
    if sys.stdin.readline():
        sys.argv[1:1] = ["coordinator"]
        main()
