"""Distributes the suite over several pytest processes (pytest-xdist).

Most tests that take long wait for other processes, so more tests run at a time than there are cores. All tests of a
file run in one process, because its fixtures may start a cluster. Tests that start a container engine run in one
process, because a run has one engine. The files that take longest run first, so that the run does not end with
waiting for a long file.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.durations import file_seconds

ENGINE: Final = "tests/e2e/"


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """One file is one unit of work; all tests that need a container engine are one unit."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def scope(nodeid: str) -> str:
    """Return the key of the tests that must share a process with this one."""
    return ENGINE if nodeid.startswith(ENGINE) else nodeid.partition("::")[0]


def rank(nodeid: str) -> float:
    """Return a test's position in the order of the run; tests with equal positions keep the order of collection."""
    return -_seconds(scope(nodeid))


@cache
def _seconds(mine: str) -> float:
    return sum(seconds for file, seconds in file_seconds().items() if file.startswith(mine))
