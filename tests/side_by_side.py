"""How `make test` shares the suite out to several pytest processes (pytest-xdist).

Most tests that take long wait for other processes, so more of them run than there are cores. A file
stays in one process, because its fixtures may start a cluster; what starts a container engine stays
together, because there is one engine a run. The files that take longest come first and the
simulation last: its seeds have run on idle cores by then.
"""

from __future__ import annotations

from typing import Final

from xdist.scheduler.loadscope import LoadScopeScheduling

ENGINE: Final = "tests/e2e/"
FIRST: Final = (
    ENGINE,
    "tests/integration/test_torchrun.py",
    "tests/integration/test_chaos_workloads.py",
    "tests/integration/test_chaos.py",
    "tests/planted/",
    "tests/integration/",
)
LAST: Final = "tests/sim/test_simulation.py"


class ByFile(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
    """One file a unit of work; all that needs a container engine is one."""

    def _split_scope(self, nodeid: str) -> str:
        return scope(nodeid)


def scope(nodeid: str) -> str:
    """Return what a test must share its process with."""
    return ENGINE if nodeid.startswith(ENGINE) else nodeid.partition("::")[0]


def rank(nodeid: str) -> int:
    """Return where a test stands in the order of the run; equal ones stay as they were collected."""
    if nodeid.startswith(LAST):
        return len(FIRST) + 1
    return next((at for at, begin in enumerate(FIRST) if nodeid.startswith(begin)), len(FIRST))
