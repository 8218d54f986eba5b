"""A coordinator that has its imports behind it: started early, it begins to serve when told to.

    python warm_coordinator.py --replica r1 …      # the options of `strata coordinator`

It waits for one line on stdin. A test that kills many coordinators does not wait for Python then.
"""

from __future__ import annotations

import sys

import strata.coordinator.main  # noqa: F401  # what takes the time
from strata.cli import main

if __name__ == "__main__":
    if sys.stdin.readline():
        sys.argv[1:1] = ["coordinator"]
        main()
