"""How a run shares the suite out to several pytest processes (pytest-xdist).

Most tests that take long wait for other processes, so more of them run than there are cores. A file
stays in one process, because its fixtures may start a cluster; what starts a container engine stays
together, because there is one engine a run. The files that take longest come first, so that none of them
is left for the end.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.durations import file_seconds

ENGINE: Final = "tests/e2e/"


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """One file a unit of work; all that needs a container engine is one."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def scope(nodeid: str) -> str:
    """Return what a test must share its process with."""
    return ENGINE if nodeid.startswith(ENGINE) else nodeid.partition("::")[0]


def rank(nodeid: str) -> float:
    """Return where a test stands in the order of the run; equal ones stay as they were collected."""
    return -_seconds(scope(nodeid))


@cache
def _seconds(mine: str) -> float:
    return sum(seconds for file, seconds in file_seconds().items() if file.startswith(mine))
