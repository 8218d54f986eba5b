"""The log line of a rank's end: its reason and the rank's last output; and the rank to which each line belongs."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from strata.agent.environment import Place
from strata.errors import ConfigError
from strata.launch.console import Console
from strata.launch.rank_logs import RankLogs
from strata.launch.rank_output import RankOutputs
from strata.launch.ranks import Program, RankGroup, inherited_environment
from strata.launch.warm.starting import ColdStarter
from strata.launch.warm.warm_pool import WarmStarter
from strata.v1.worlds_pb2 import World, WorldMember

LIMIT_S = 20.0
PLACE = Place(
    job="j",
    worker_id="w",
    world=World(generation=3, size=8),
    member=WorldMember(first_rank=2, slots=1),
    master_addr="127.0.0.1",
    master_port=1,
    socket="",
    endpoints="",
    detect_s=5.0,
)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    with (tmp_path / "console").open("ab") as file:
        yield Console(file.fileno(), {})


async def end_of(tmp_path: Path, starter: Any, *, piped: bool, log_dir: Path | None = None) -> dict[str, Any]:
    """Run one rank; return the log line of its end."""
    program = Program(
        starter=starter,
        inherited=inherited_environment(),
        folder=tmp_path,
        logs=RankLogs(log_dir),
        piped=piped,
    )
    group = RankGroup(PLACE, program, restarts=0, on_exit=lambda *_: None)
    with capture_logs() as logs:
        async with asyncio.timeout(LIMIT_S):
            group.start()
            await group.join()
    (ended,) = (dict(each) for each in logs if each["event"] == "rank.ended")
    return ended


async def test_a_rank_that_fails_is_logged_with_the_last_lines_of_its_stderr(
    tmp_path: Path, console: Console
) -> None:
    script = r"echo out; for n in 1 2 3 4 5 6 7; do echo $n >&2; done; printf '\r 1%%\r 2%%\n\033[31mred\tword\033[0m\n\n' >&2; exit 9"
    outputs = RankOutputs(console, console)
    ended = await end_of(tmp_path, ColdStarter(("sh", "-c", script), outputs), piped=True)
    assert (ended["rank"], ended["code"], ended["reason"]) == (2, 9, "exited with 9")
    assert ended["stderr"] == ["2", "3", "4", "5", "6", "7", " 2%", "red     word"]


async def test_a_rank_that_a_signal_ends_is_logged_with_its_name(tmp_path: Path, console: Console) -> None:
    outputs = RankOutputs(console, console)
    ended = await end_of(
        tmp_path, ColdStarter(("sh", "-c", "echo why >&2; kill -KILL $$"), outputs), piped=True
    )
    assert (ended["reason"], ended["stderr"]) == ("was ended by SIGKILL", ["why"])


async def test_a_rank_that_is_done_has_no_lines(tmp_path: Path, console: Console) -> None:
    outputs = RankOutputs(console, console)
    ended = await end_of(tmp_path, ColdStarter(("sh", "-c", "echo warning >&2"), outputs), piped=True)
    assert (ended["reason"], ended.get("stderr")) == ("exited with 0", None)


async def test_a_rank_that_writes_into_a_file_is_logged_with_its_end(tmp_path: Path) -> None:
    starter = ColdStarter(("sh", "-c", "echo out; echo why >&2; exit 9"))
    ended = await end_of(tmp_path, starter, piped=False, log_dir=tmp_path / "logs")
    assert ended["stderr"] == ["out", "why"]


async def test_a_process_that_cannot_have_its_file_is_not_started(tmp_path: Path, console: Console) -> None:
    began = tmp_path / "began"
    outputs = RankOutputs(console, console)
    program = Program(
        starter=ColdStarter(("sh", "-c", f"touch {began}; exec sleep 100"), outputs),
        inherited=inherited_environment(),
        folder=tmp_path,
        logs=RankLogs(tmp_path / "logs"),
        piped=True,
    )
    (tmp_path / "logs" / "generation-000003-rank-00002.log").mkdir(parents=True)
    group = RankGroup(PLACE, program, restarts=0, on_exit=lambda *_: None)
    with capture_logs() as logs, pytest.raises(ConfigError, match="cannot write the ranks' output"):
        group.start()
    assert not [each for each in logs if each["event"] == "rank.started"]
    await asyncio.sleep(0.3)
    assert not began.exists()


async def test_a_traceback_stands_once_in_the_log(
    tmp_path: Path, console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("raise ValueError('the shape is wrong')\n")
    outputs = RankOutputs(console, console)
    words = (sys.executable, "train.py")
    piped = WarmStarter.of(words, modules=(), inherited=os.environ, outputs=outputs)
    ended = await end_of(tmp_path, piped, piped=True)
    assert ended["reason"] == "exited with 1"
    assert ended["stderr"][-1] == "ValueError: the shape is wrong"
    unseen = await end_of(tmp_path, WarmStarter.of(words, modules=(), inherited=os.environ), piped=False)
    assert unseen["reason"].endswith("ValueError: the shape is wrong")
    assert "stderr" not in unseen


async def test_a_process_that_continues_as_another_rank_has_that_rank_s_prefix(
    tmp_path: Path, console: Console
) -> None:
    go = tmp_path / "go"
    script = f"echo one; while ! [ -e {go} ]; do sleep 0.02; done; echo two"
    outputs = RankOutputs(console, console)
    program = Program(
        starter=ColdStarter(("sh", "-c", script), outputs),
        inherited=inherited_environment(),
        folder=tmp_path,
        piped=True,
    )
    shown = tmp_path / "console"
    before = RankGroup(PLACE, program, restarts=0, on_exit=lambda *_: None)
    after = RankGroup(
        replace(PLACE, member=WorldMember(first_rank=5, slots=1)),
        program,
        restarts=1,
        on_exit=lambda *_: None,
    )
    async with asyncio.timeout(LIMIT_S):
        before.start()
        await asyncio.to_thread(until, shown, "[rank 2] one\n")
        after.start(before.release({0}))
        after.arrived(5)
        go.touch()
        await after.join()
    assert shown.read_text() == "[rank 2] one\n[rank 5] two\n"


def until(file: Path, text: str) -> None:
    """Return once the file contains this text."""
    end = time.monotonic() + LIMIT_S
    while file.read_text() != text:
        assert time.monotonic() < end, file.read_text()
        time.sleep(0.02)
