"""Children and their descendants end with the parent, however the parent ends."""

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvloop

from strata.processes.children import Child
from strata.processes.spawner import spawner

LIMIT_S = 10.0
# A process-group leader with one child; it prints both ids, then waits.
FAMILY = "sleep 1000 & echo $$ $!; wait"


def wait_exited(pid: int) -> None:
    """Return once no such process runs (a zombie counts as ended)."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        assert poll.poll(LIMIT_S * 1000), f"process {pid} still runs"
    finally:
        os.close(fd)


@contextlib.contextmanager
def started(script: str, *, mode: str = "-c") -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Run a Python program as the parent under test; yield its process and the ids in its first line."""
    parent = subprocess.Popen([sys.executable, mode, script], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        yield parent, [int(word) for word in parent.stdout.readline().split()]
    finally:
        parent.kill()
        parent.wait()
        assert parent.stdout is not None
        parent.stdout.close()


def run_in_shell(line: str, log: Path) -> Child:
    return Child.start(["sh", "-c", line], log=log)


def first_words(child: Child) -> list[str]:
    """Return the words of the first line in the child's log once it is there."""
    assert child.log is not None
    tail = subprocess.run(
        ["timeout", str(LIMIT_S), "sh", "-c", f"tail -n +1 -f {child.log} | head -n 1"],
        capture_output=True,
        text=True,
        check=True,
    )
    return tail.stdout.split()


def test_a_child_reports_its_exit_code_log_and_description(tmp_path: Path) -> None:
    child = run_in_shell("echo one; echo two >&2; exit 7", tmp_path / "logs" / "a.log")
    assert child.join(LIMIT_S) == 7
    assert child.tail() == "one\ntwo"
    assert child.tail(1) == "two"
    assert child.describe() == "exited with 7"
    assert child.returncode == 7


def test_a_program_that_is_not_there_is_refused_at_once() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        Child.start(["no-such-program"])
    with pytest.raises(FileNotFoundError, match="/no/such"):
        Child.start(["/no/such"])


def test_the_environment_arrives_as_given(tmp_path: Path) -> None:
    child = Child.start(["/usr/bin/env"], env={"A": "1"}, log=tmp_path / "log")
    child.join(LIMIT_S)
    assert child.tail() == "A=1"


def test_a_child_names_the_signal_that_ended_it(tmp_path: Path) -> None:
    child = run_in_shell("kill -9 $$", tmp_path / "log")
    assert child.join(LIMIT_S) == -signal.SIGKILL
    assert child.describe() == "was ended by SIGKILL"


def test_stop_sends_sigterm_first(tmp_path: Path) -> None:
    child = run_in_shell("trap 'exit 3' TERM; echo up; while :; do sleep 0.05; done", tmp_path / "log")
    first_words(child)
    assert child.stop(LIMIT_S) == 3


def test_stop_sends_no_second_sigterm_after_request_stop(tmp_path: Path) -> None:
    once = "trap 'trap \"exit 4\" TERM; echo asked' TERM; echo up; for i in $(seq 20); do sleep 0.05; done; exit 3"
    child = run_in_shell(once, tmp_path / "log")
    first_words(child)
    child.request_stop()
    deadline = time.monotonic() + LIMIT_S
    while "asked" not in child.tail():
        assert time.monotonic() < deadline
    assert child.stop(LIMIT_S) == 3


def test_stop_kills_a_child_after_the_grace(tmp_path: Path) -> None:
    child = run_in_shell("trap '' TERM; echo up; while :; do sleep 0.05; done", tmp_path / "log")
    first_words(child)
    assert child.stop(0.1) == -signal.SIGKILL


def test_stop_reaches_a_frozen_child(tmp_path: Path) -> None:
    child = run_in_shell("trap 'exit 3' TERM; echo up; while :; do sleep 0.05; done", tmp_path / "log")
    first_words(child)
    child.pause()
    assert child.poll() is None
    assert child.stop(LIMIT_S) == 3


def test_a_frozen_child_does_nothing_until_it_is_resumed(tmp_path: Path) -> None:
    child = run_in_shell("while :; do echo x; done", tmp_path / "log")
    first_words(child)
    for _ in range(10):
        child.pause()
        size = (tmp_path / "log").stat().st_size
        with pytest.raises(TimeoutError):
            child.join(0.01)
        assert (tmp_path / "log").stat().st_size == size
        child.resume()
    child.kill()
    child.pause()  # does nothing to a child that has ended


@pytest.mark.parametrize("how", ["killed", "ended"])
def test_processes_that_a_child_leaves_behind_end_with_it(tmp_path: Path, how: str) -> None:
    rest = "; wait" if how == "killed" else ""
    child = run_in_shell(f"sleep 1000 & echo $!{rest}", tmp_path / "log")
    (grandchild,) = map(int, first_words(child))
    if how == "killed":
        child.kill()
    child.join(LIMIT_S)
    wait_exited(grandchild)


def test_join_has_a_limit() -> None:
    child = Child.start(["sleep", "1000"])
    with pytest.raises(TimeoutError, match="sleep"):
        child.join(0.05)
    child.kill()
    assert child.join(LIMIT_S) == -signal.SIGKILL


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_asyncio_may_wait_and_stop(new_loop, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    async def main() -> None:
        child = Child.start(["sleep", "1000"])
        with pytest.raises(TimeoutError, match="sleep"):
            await child.join_async(0.05)
        waiters = [asyncio.create_task(child.join_async(LIMIT_S)) for _ in range(2)]
        assert await child.stop_async(LIMIT_S) == -signal.SIGTERM
        assert await asyncio.gather(*waiters) == [-signal.SIGTERM] * 2

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())


def test_a_child_survives_the_thread_that_started_it() -> None:
    children: list[Child] = []
    thread = threading.Thread(target=lambda: children.append(Child.start(["sleep", "1000"])))
    thread.start()
    thread.join()
    with pytest.raises(TimeoutError):
        children[0].join(0.2)
    children[0].kill()
    children[0].join(LIMIT_S)


PARENT = f"""
import threading
from strata.processes.children import Child
def start():
    Child.start(["sh", "-c", {FAMILY!r}])
"""


@pytest.mark.parametrize(
    "start",
    ["start()", "t = threading.Thread(target=start); t.start(); t.join()"],
    ids=["main thread", "other thread"],
)
def test_sigkill_of_the_parent_ends_child_and_grandchild(start: str) -> None:
    with started(f"{PARENT}\n{start}\nthreading.Event().wait()") as (parent, pids):
        assert len(pids) == 2
        parent.kill()
        for pid in pids:
            wait_exited(pid)


def test_a_forked_child_that_holds_the_pipe_does_not_delay_the_cleanup() -> None:
    script = f"""
{PARENT}
import os, signal
r, w = os.pipe()
Child.start(["sh", "-c", {FAMILY!r}], stdout=w)
family = os.read(r, 100).decode().strip()
fork = os.fork()
if fork:
    print(fork, family, flush=True)
signal.pause()
"""
    with started(script) as (parent, (fork, *pids)):
        parent.kill()
        for pid in pids:
            wait_exited(pid)
        os.kill(fork, signal.SIGKILL)


def test_a_clean_exit_of_the_parent_ends_the_guardian_and_all_children() -> None:
    script = f"""
{PARENT}
import os
from strata.processes.spawner import spawner
r, w = os.pipe()
child = Child.start(["sh", "-c", {FAMILY!r}], stdout=w)
print(spawner()._guardian.pid, os.read(r, 100).decode().strip(), flush=True)
"""
    with started(script) as (parent, pids):
        assert len(pids) == 3
        assert parent.wait(LIMIT_S) == 0
        assert not Path(f"/proc/{pids[0]}").exists(), "the guardian is gone when the parent is"
        for pid in pids:
            wait_exited(pid)


def test_a_child_may_have_guarded_children_of_its_own(tmp_path: Path) -> None:
    script = f"{PARENT}\nstart()\nthreading.Event().wait()"
    child = Child.start([sys.executable, "-c", script], log=tmp_path / "log")
    pids = [int(word) for word in first_words(child)]
    child.kill()
    child.join(LIMIT_S)
    for pid in pids:
        wait_exited(pid)


def test_a_guardian_that_was_killed_is_replaced_and_knows_the_old_groups() -> None:
    script = f"""
{PARENT}
import os
from strata.processes.spawner import spawner
r, w = os.pipe()
Child.start(["sh", "-c", {FAMILY!r}], stdout=w)
first = os.read(r, 100).decode().split()
spawner()._guardian.kill()
spawner()._guardian.wait()
Child.start(["sh", "-c", {FAMILY!r}], stdout=w)
second = os.read(r, 100).decode().split()
print(*first, *second, flush=True)
threading.Event().wait()
"""
    with started(script) as (parent, pids):
        assert len(pids) == 4
        parent.kill()
        for pid in pids:
            wait_exited(pid)


def test_ended_groups_are_forgotten() -> None:
    child = Child.start(["true"])
    child.join(LIMIT_S)
    assert child.pid not in spawner()._live
