"""The process of a rank, held by its pidfd."""

from __future__ import annotations

import os
import subprocess

from strata.agent.rank_process import RankProcess


def test_a_process_that_freed_its_memory_counts_as_exiting() -> None:
    with RankProcess(os.getpid()) as running:
        assert running.alive
        assert not running.exiting
    child = subprocess.Popen(["true"])
    with RankProcess(child.pid) as process:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process.exiting, "a zombie has no memory; its end is told as well"
        assert not process.alive
        child.wait()
        assert not process.exiting, "nothing is known of who is gone"
