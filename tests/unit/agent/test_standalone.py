"""The agent of a standalone process, as a process of its own: what it ends with. No coordinator is there."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.processes import gone

PROGRAM = """
import ctypes, os, sys, time
from strata.client import standalone
from strata.config import Credentials

keep = standalone.spawned()
if sys.argv[1] == "started":
    frame = standalone.start_of(["127.0.0.1:1"], 5.0, Credentials()).SerializeToString()
    keep.send(len(frame).to_bytes(4, "big") + frame)
if (child := ctypes.CDLL(None).fork()) == 0:  # unknown to Python: it keeps the socket
    ctypes.CDLL(None).sleep(1000)
agents = [pid for task in os.listdir("/proc/self/task") for pid in open(f"/proc/self/task/{task}/children").read().split()]
print(child, *(pid for pid in agents if int(pid) != child), flush=True)
time.sleep(1000)
"""
END_S = 5.0
"""On a busy machine; 1 s else."""


def watches(agent: int) -> bool:
    """Tell whether the agent has its process's pidfd."""
    found = []
    for file in Path(f"/proc/{agent}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            found.append(str(file.readlink()))
    return any("pidfd" in each for each in found)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("how", ["started", "not yet"])
def test_an_agent_ends_with_its_process_though_another_holds_its_socket(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, how], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child, agent = map(int, process.stdout.readline().split())
        try:
            assert b"strata.agent.standalone" in Path(f"/proc/{agent}/cmdline").read_bytes()
            while not watches(agent):
                time.sleep(0.02)
            process.kill()
            assert gone(agent, END_S)
        finally:
            os.kill(child, signal.SIGKILL)
            process.kill()
