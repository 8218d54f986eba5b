"""The processes that run seeds give way to all other processes of the machine."""

from __future__ import annotations

import os

from tests.sim.seeds.batch import AUTOGROUP, NICE, pool


def _priorities() -> tuple[int, int, str]:
    """Return the niceness of this process, its session, and the niceness of that session."""
    group = AUTOGROUP.read_text().strip() if AUTOGROUP.exists() else ""
    return os.nice(0), os.getsid(0), group


def test_seed_processes_run_at_low_priority_in_their_own_session() -> None:
    with pool(1) as processes:
        nice, session, group = processes.submit(_priorities).result()
    assert nice == min(19, os.nice(0) + NICE)
    assert session != os.getsid(0)
    assert group == "" or group.endswith(f" nice {NICE}")  # "": this kernel does not schedule by session
