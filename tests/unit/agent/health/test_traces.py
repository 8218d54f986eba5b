"""Finding and requesting the traces of NCCL's flight recorder."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from strata.agent.health.traces import FILE_VARIABLES, PIPE_VARIABLE, collect_trace, trace_environment


def test_ranks_get_trace_paths_unless_the_user_sets_them(tmp_path: Path) -> None:
    given = trace_environment(tmp_path, {})
    assert {given[name] for name in FILE_VARIABLES} == {str(tmp_path / "nccl_trace_rank_")}
    assert given[PIPE_VARIABLE].startswith(str(tmp_path))
    mine = {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/mine_", "TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}
    changed = trace_environment(tmp_path, mine)
    assert changed["TORCH_FR_DUMP_TEMP_FILE"] == "/mine_", "both names say the same"
    assert not mine.keys() & changed.keys()


async def test_no_trace_is_collected_if_no_rank_records_one(tmp_path: Path) -> None:
    assert await collect_trace({}, 0) is None
    assert await collect_trace(trace_environment(tmp_path, {}), 0) is None
    pipe = tmp_path / "nccl_pipe_rank_0.pipe"
    os.mkfifo(pipe)
    assert await collect_trace(trace_environment(tmp_path, {}), 0) is None, "nobody reads the pipe"
    assert not (tmp_path / "nccl_pipe_rank_1.pipe").exists()


async def test_a_trace_written_before_the_request_is_found(tmp_path: Path) -> None:
    (tmp_path / "nccl_trace_rank_3").write_bytes(b"x" * 100)
    found = await collect_trace(trace_environment(tmp_path, {}), 3)
    assert found == (tmp_path / "nccl_trace_rank_3", 100)


async def test_a_rank_writes_when_its_pipe_is_written(tmp_path: Path) -> None:
    """The test acts as torch: it opens the pipe for reading, and writes the trace once the pipe has data."""
    pipe = tmp_path / "nccl_pipe_rank_0.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    written = asyncio.Event()
    asyncio.get_running_loop().add_reader(reader, written.set)
    collecting = asyncio.create_task(collect_trace(trace_environment(tmp_path, {}), 0))
    try:
        await written.wait()
        assert os.read(reader, 128) == b"1"
        (tmp_path / "nccl_trace_rank_0").write_bytes(b"y" * 50)
        assert await collecting == (tmp_path / "nccl_trace_rank_0", 50)
    finally:
        asyncio.get_running_loop().remove_reader(reader)
        os.close(reader)


async def test_a_rank_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    pipe = tmp_path / "nccl_pipe_rank_0.pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert await collect_trace(trace_environment(tmp_path, {}), 0, limit_s=0.2) is None
    finally:
        os.close(reader)
