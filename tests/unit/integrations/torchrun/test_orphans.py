"""Workers must end with their agent, even if the agent is killed. No other process may be ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata.integrations.torchrun import orphans
from strata.processes.children import Child
from tests.polling import until
from tests.processes import LIMIT_S, wait_exit

AGENT = """
import asyncio, os, subprocess, sys
from pathlib import Path
from strata.integrations.torchrun import orphans

environment = {sys.argv[2]: str(Path(sys.argv[1]).parent / sys.argv[3])}

async def main():
    async with orphans.kill_workers_if_killed(Path(sys.argv[1])):
        command = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]
        worker = subprocess.Popen(
            command, env={**os.environ, **environment}, start_new_session=True, stdout=subprocess.PIPE
        )
        worker.stdout.readline()
        print(worker.pid, flush=True)
        sys.stdin.readline()

asyncio.run(main())
"""


@contextlib.contextmanager
def agent(
    socket_path: Path, variable: str = "STRATA_SOCKET", name: str = "ranks.sock"
) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Run an agent with one worker; both have ended after the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, str(socket_path), variable, name],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    worker = 0
    try:
        assert process.stdout is not None
        worker = int(process.stdout.readline())
        yield process, worker
    finally:
        process.kill()
        process.communicate()
        if worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)


@pytest.mark.parametrize(
    ("variable", "name"), [("STRATA_SOCKET", "ranks.sock"), ("STRATA_STACKS", "stacks-3-%r.txt")]
)
def test_a_killed_agent_s_workers_are_killed_and_its_folder_is_removed(
    tmp_path: Path, variable: str, name: str
) -> None:
    """A worker's helper that was started without STRATA_SOCKET still has STRATA_STACKS."""
    socket_path = tmp_path / "agent" / "ranks.sock"
    socket_path.parent.mkdir()
    with agent(socket_path, variable, name) as (process, worker):
        other = tmp_path / "agent2" / "ranks.sock"
        bystander = Child.start(["sleep", "1000"], env={**os.environ, "STRATA_SOCKET": str(other)})
        try:
            os.kill(process.pid, signal.SIGKILL)
            assert wait_exit(worker, LIMIT_S)
            assert bystander.poll() is None, "another agent's worker"
        finally:
            bystander.kill()
            bystander.join()


def test_a_worker_is_found_in_the_middle_of_exec(tmp_path: Path) -> None:
    """In CI, one worker of ten had no environment in /proc for some microseconds after its start."""
    much = {f"MORE_{i}": "x" * 400 for i in range(1000)}  # a large environment makes exec take longer
    socket_path = str(tmp_path / "ranks.sock")
    for _ in range(300):
        worker = subprocess.Popen(["sleep", "1000"], env={**os.environ, **much, "STRATA_SOCKET": socket_path})
        try:
            assert f"STRATA_SOCKET={socket_path}".encode() in orphans.environment(worker.pid).split(b"\0")
        finally:
            worker.kill()
            worker.wait()


def test_a_process_without_an_environment_or_already_ended_is_no_orphan(tmp_path: Path) -> None:
    bare = subprocess.Popen(["/bin/sleep", "1000"], env={})
    try:
        assert orphans.environment(bare.pid) == b""
        bare.kill()
        os.waitid(os.P_PID, bare.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(OSError):  # noqa: PT011  # a zombie has no environment
            orphans.environment(bare.pid)
    finally:
        bare.kill()
        bare.wait()
    with pytest.raises(OSError):  # noqa: PT011  # nor has a process that was reaped
        orphans.environment(bare.pid)
    assert orphans.find(str(tmp_path / "ranks.sock")) == []


def test_an_agent_that_ends_in_order_leaves_its_workers_to_torchrun(tmp_path: Path) -> None:
    with agent(tmp_path / "ranks.sock") as (process, worker):
        process.communicate("end\n")
        assert process.returncode == 0, "the watcher has ended, too: it is waited for"
        assert not wait_exit(worker, 0.0)


def test_only_a_direct_child_or_a_grandchilds_parent_is_killed() -> None:
    child = Child.start(["sleep", "1000"])
    wrapper = Child.start(["sh", "-c", "sleep 1000 & echo; wait"])
    try:
        stranger = int(
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=-3, stderr=-3).pid)",
                ],
                capture_output=True,
                check=True,
                text=True,
            ).stdout
        )
        orphans.end_child_above(stranger)
        assert not wait_exit(stranger, 0.0)
        os.kill(stranger, signal.SIGKILL)
        orphans.end_child_above(child.pid)
        assert child.join(LIMIT_S) == -signal.SIGKILL
        orphans.end_child_above(child.pid)  # the child has ended: nothing happens
        assert wrapper.poll() is None
        orphans.end_child_above(only_child(wrapper.pid))
        assert wrapper.join(LIMIT_S) == -signal.SIGKILL
    finally:
        for each in (child, wrapper):
            each.kill()
            each.join()


def only_child(pid: int) -> int:
    """Return the only child of a process, once it has one."""
    return int(until(lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split())[0])
