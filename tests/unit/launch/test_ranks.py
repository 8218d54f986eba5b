"""The rank processes of one generation: started once, reported once, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from strata.agent.environment import Place
from strata.agent.health.stack_request import dump_stacks, process_state
from strata.client.rank.inspection import last_lines
from strata.errors import ConfigError
from strata.launch.rank_logs import RankLogs
from strata.launch.ranks import Program, RankGroup, inherited_environment
from strata.launch.warm.starting import ColdStarter
from strata.launch.warm.warm_pool import WarmStarter
from strata.v1.worlds_pb2 import World, WorldMember

LIMIT_S = 20.0
STUBBORN = ("sh", "-c", "trap '' TERM; while :; do sleep 1000; done")
Ended = tuple[int, int, int, str]


def place(slots: int) -> Place:
    return Place(
        job="j",
        worker_id="w",
        world=World(generation=3, size=slots + 2),
        member=WorldMember(first_rank=2, slots=slots),
        master_addr="127.0.0.1",
        master_port=1,
        socket="",
        endpoints="",
        detect_s=5.0,
    )


def program(folder: Path, *command: str) -> Program:
    return Program(starter=ColdStarter(command), inherited=inherited_environment(), folder=folder)


@contextlib.asynccontextmanager
async def started(slots: int, *command: str) -> AsyncIterator[tuple[RankGroup, asyncio.Queue[Ended]]]:
    ended: asyncio.Queue[Ended] = asyncio.Queue()
    with tempfile.TemporaryDirectory() as folder:
        group = RankGroup(
            place(slots),
            program(Path(folder), *command),
            restarts=0,
            on_exit=lambda *what: ended.put_nowait(what[:4]),
        )
        async with asyncio.timeout(LIMIT_S):
            try:
                group.start()
                yield group, ended
            finally:
                group.kill()
                await group.join()


async def test_a_rank_stopped_on_request_counts_as_stopped_whatever_its_exit_code() -> None:
    """By its exit code alone the rank would count as failed or as finished, and a preempted job could be done."""
    async with started(3, "sh", "-c", "[ $RANK = 4 ] && kill -SEGV $$; exit $((RANK - 2))") as (group, ended):
        for rank in (2, 3, 4):
            group.note_stopped(rank)
        assert {await ended.get(), await ended.get(), await ended.get()} == {
            (3, 2, 75, "stopped as requested, and exited with 0"),
            (3, 3, 75, "stopped as requested, and exited with 1"),
            (3, 4, 75, "stopped as requested, and was ended by SIGSEGV"),
        }


async def test_a_lasting_error_ends_a_rank_with_78_unless_it_succeeds_or_is_killed() -> None:
    async with started(3, "sh", "-c", "[ $RANK = 4 ] && kill -KILL $$; exit $((RANK - 2))") as (group, ended):
        for rank in (2, 3, 4):
            group.note_lasting(rank, "ConfigError: no bucket")
        assert {await ended.get(), await ended.get(), await ended.get()} == {
            (3, 2, 0, "exited with 0"),
            (3, 3, 78, "ConfigError: no bucket"),
            (3, 4, -9, "was ended by SIGKILL"),
        }


async def test_a_rank_that_continues_withdraws_its_permanent_failure() -> None:
    async with started(3, "sh", "-c", "read _; exit 1") as (group, ended):
        for rank in (2, 3, 4):
            group.note_lasting(rank, "CheckpointError: it does not fit")
        group.note_step(2)
        group.arrived(3)
        group.note_stopped(4)
        codes = {rank: code for _, rank, code, _ in [await ended.get() for _ in range(3)]}
    assert codes == {2: 1, 3: 1, 4: 75}


async def test_a_rank_that_hangs_after_stopping_is_killed_and_counts_as_stopped() -> None:
    async with started(1, "sleep", "1000") as (group, ended):
        group.note_stopped(2)
        group.doom(2, "frozen")
        assert await ended.get() == (3, 2, 75, "stopped as requested, and frozen")


async def test_the_last_output_of_a_crashed_rank_is_kept(tmp_path: Path) -> None:
    logs = RankLogs(tmp_path / "logs")
    ended: asyncio.Queue[Ended] = asyncio.Queue()
    command = ("sh", "-c", "echo last words >> $STRATA_RANK_LOG; [ $RANK = 2 ] && exit 7; exec sleep 1000")
    group = RankGroup(
        place(2),
        Program(starter=ColdStarter(command), inherited=inherited_environment(), folder=tmp_path, logs=logs),
        restarts=0,
        on_exit=lambda *what: ended.put_nowait(what[:4]),
    )
    async with asyncio.timeout(LIMIT_S):
        group.start()
        assert (await ended.get())[:3] == (3, 2, 7)
        assert group.pid(2) is None
        (crashed,) = logs.of(2)
        assert (crashed.generation, crashed.ended, last_lines(crashed.file)) == (
            3,
            "exited with 7",
            ["last words"],
        )
        assert [each.ended for each in logs.of(3)] == [""]
        await group.stop(LIMIT_S)
        assert [each.ended for each in logs.of(3)] == ["was ended by SIGTERM"]


async def test_each_exit_is_reported_once_with_its_global_rank() -> None:
    async with started(2, "sh", "-c", "exit $((RANK * 10))") as (group, ended):
        assert {await ended.get(), await ended.get()} == {
            (3, 2, 20, "exited with 20"),
            (3, 3, 30, "exited with 30"),
        }
        await group.join()
        assert not group.running
        assert group.pid(2) is None
        await group.stop(0.0)
        assert ended.empty()


async def test_stop_ends_all_ranks_and_reports_no_exit() -> None:
    async with started(2, "sleep", "1000") as (group, ended):
        assert group.pid(2) is not None
        await group.stop(LIMIT_S)
        assert not group.running
        assert ended.empty()


@pytest.mark.parametrize("code", [0, 7])
async def test_a_rank_that_exits_just_before_a_stop_is_still_reported(code: int) -> None:
    """The event loop has not processed the end of the rank yet."""
    async with started(2, "sh", "-c", f'if [ "$RANK" = 2 ]; then exit {code}; fi; sleep 1000') as (
        group,
        ended,
    ):
        pid = group.pid(2)
        assert pid is not None
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # noqa: ASYNC222  # so that the loop does not see the end
        await group.stop(LIMIT_S)
        assert ended.get_nowait() == (3, 2, code, f"exited with {code}")
        assert ended.empty(), "the other was ended"


async def test_stop_kills_the_ranks_after_the_grace() -> None:
    async with started(2, *STUBBORN) as (group, ended):
        await group.stop(0.05)
        assert not group.running
        assert ended.empty()


async def test_a_doomed_rank_s_exit_carries_the_reason() -> None:
    async with started(2, "sleep", "1000") as (group, ended):
        group.doom(3, "frozen")
        group.doom(3, "said again")
        assert await ended.get() == (3, 3, -signal.SIGKILL, "frozen")
        assert group.pid(2) is not None, "its neighbour runs on"
        group.doom(3, "late")
        group.doom(99, "not ours")
        assert ended.empty()


async def test_a_signal_reaches_every_rank() -> None:
    async with started(2, "sleep", "1000") as (group, ended):
        group.signal(signal.SIGUSR1)
        assert {(await ended.get())[2], (await ended.get())[2]} == {-signal.SIGUSR1}


async def test_the_child_processes_of_a_rank_die_with_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pids"
    os.mkfifo(pipe)
    async with started(1, "sh", "-c", f"sleep 1000 & echo $! > {pipe}; wait") as (group, ended):
        grandchild = int(await asyncio.to_thread(pipe.read_text))
        fd = os.pidfd_open(grandchild)
        has_ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(fd, has_ended.set)
        pid = group.pid(2)
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        assert (await ended.get())[2] == -signal.SIGKILL
        await has_ended.wait()
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


@pytest.mark.parametrize("command", ["/no/such/program", "no-such-program"])
async def test_a_command_that_cannot_be_run_is_refused_at_once(command: str, tmp_path: Path) -> None:
    group = RankGroup(place(2), program(tmp_path, command), restarts=0, on_exit=lambda *_: None)
    with pytest.raises(ConfigError, match=command) as refused:
        group.start()
    assert "after --" in refused.value.hint


HUNG = """
import os, sys, threading
from strata.client.rank.stack_dump import answer_stack_dumps
def stuck_in_a_collective(): threading.Event().wait()
threading.Thread(target=stuck_in_a_collective, daemon=True).start()
answer_stack_dumps(os.environ)
def waits_for_its_peers():
    open(sys.argv[1], "w").close()
    threading.Event().wait()
waits_for_its_peers()
"""


async def test_a_rank_dumps_the_stacks_of_its_threads(tmp_path: Path) -> None:
    pipe = tmp_path / "up"
    os.mkfifo(pipe)
    async with started(1, sys.executable, "-c", HUNG, str(pipe)) as (group, ended):
        await asyncio.to_thread(pipe.read_text)
        for _ in range(2):
            stack = await group.stack(2)
            assert stack is not None
            assert "stuck_in_a_collective" in stack
            assert stack.count("waits_for_its_peers") == 1, "each dump is told alone"
        assert ended.empty(), "and runs on"
        assert await group.stack(99) is None


async def test_a_rank_that_cannot_dump_its_stacks_is_left_alone() -> None:
    async with started(1, "sleep", "1000") as (group, ended):
        pid = group.pid(2)
        assert pid is not None
        assert await group.stack(2) is None
        assert group.pid(2) == pid
        assert ended.empty(), "the signal would have ended it"


async def test_a_suspended_rank_returns_no_stack(tmp_path: Path) -> None:
    pipe = tmp_path / "up"
    os.mkfifo(pipe)
    async with started(1, sys.executable, "-c", HUNG, str(pipe)) as (group, ended):
        await asyncio.to_thread(pipe.read_text)
        process = group._alive(2)
        assert process is not None
        process.child.pause()
        assert await dump_stacks(process.child, process.stacks, limit_s=0.2) is None
        assert ended.empty()


@pytest.mark.parametrize(
    ("script", "step", "early"),
    [
        ("exit 3", False, True),
        ("exit 0", False, False),
        ("exit 75", False, False),
        ("exit 3", True, False),
        ("kill -KILL $$", False, False),
    ],
)
async def test_a_rank_that_fails_before_its_first_step_failed_early(
    script: str, step: bool, early: bool, tmp_path: Path
) -> None:
    ended: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
    command = program(tmp_path, "sh", "-c", f"while [ ! -e {tmp_path}/go ]; do sleep 0.02; done; {script}")
    group = RankGroup(place(1), command, restarts=0, on_exit=lambda *what: ended.put_nowait(what))
    async with asyncio.timeout(LIMIT_S):
        group.start()
        if step:
            group.note_step(2)
        (tmp_path / "go").touch()
        assert (await ended.get())[4] is early
        await group.join()


async def test_a_rank_that_ran_for_long_did_not_fail_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("strata.launch.ranks.EARLY_S", 0.0)
    ended: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
    command = program(tmp_path, "sh", "-c", "exit 3")
    group = RankGroup(place(1), command, restarts=0, on_exit=lambda *what: ended.put_nowait(what))
    async with asyncio.timeout(LIMIT_S):
        group.start()
        assert (await ended.get())[3:] == ("exited with 3", False)
        await group.join()


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a script that raises."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("def f():\n    import no_such_module\nf()\n")
    return tmp_path


@pytest.mark.parametrize("warm", [False, True])
async def test_the_end_of_a_traceback_is_the_reason(warm: bool, broken: Path) -> None:
    """This includes the first start, which finds no warm process."""
    ended: asyncio.Queue[tuple[object, ...]] = asyncio.Queue()
    starter = WarmStarter.of((sys.executable, "train.py"), modules=(), inherited=os.environ)
    assert starter is not None
    if warm:
        starter.prepare(1)
        starter._spares[0].link.setblocking(True)
        starter._spares[0].link.recv(1, socket.MSG_PEEK)
        starter._spares[0].link.setblocking(False)
    command = Program(starter=starter, inherited=inherited_environment(), folder=broken)
    group = RankGroup(place(1), command, restarts=0, on_exit=lambda *what: ended.put_nowait(what))
    async with asyncio.timeout(LIMIT_S):
        group.start()
        _generation, _rank, code, reason, early = await ended.get()
        await group.join()
    assert (code, early) == (1, True)
    assert reason == (
        f'exited with 1: File "{broken}/train.py", line 2, in f | import no_such_module'
        " | ModuleNotFoundError: No module named 'no_such_module'"
    )
    assert os.listdir(broken) == ["train.py"]  # noqa: PTH208


async def test_a_rank_that_dumps_core_is_reported_at_once_and_has_the_grace_for_its_core() -> None:
    dumps = "its process crashed and dumps core"
    async with started(3, *STUBBORN) as (
        group,
        ended,
    ):  # STUBBORN ignores SIGTERM, as does a process that dumps core
        group.note_stopped(3)
        for rank in (2, 2, 3):
            group.dumps_core(rank, dumps)
        assert ended.get_nowait() == (3, 2, -signal.SIGABRT, dumps)
        assert ended.get_nowait() == (3, 3, 75, f"stopped as requested, and {dumps}")
        assert ended.empty()
        assert group.alive() == [2, 3, 4]
        assert not group.release({0, 1}), "it goes on in no generation"
        await group.stop(0.3)
        assert group.alive() == []
        assert ended.empty()


def test_the_state_of_a_process_is_read_from_the_kernel() -> None:
    child = subprocess.Popen(["sleep", "1000"])
    try:
        assert process_state(child.pid) in {"sleeping", "running"}
        child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, child.pid, os.WSTOPPED | os.WNOWAIT)
        assert process_state(child.pid) == "stopped"
    finally:
        child.kill()
        child.wait()
    assert process_state(child.pid) == process_state(None) == ""
