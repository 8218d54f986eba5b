from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

from structlog.testing import capture_logs

from strata.client.rank.inspection import TAIL_LINES, Inspection, RankLog, last_lines
from strata.observe import get_logger
from strata.v1.members_pb2 import RankEvidence
from strata.v1.session_pb2 import Down, Inspect, Tick


async def test_a_rank_is_inspected_once_at_a_time(tmp_path: Path) -> None:
    log, crashed, go = tmp_path / "log", tmp_path / "crashed", asyncio.Event()
    reported: list[tuple[int, RankEvidence]] = []
    log.write_text("first\nsecond\n")
    crashed.write_text("its last words\n")
    looks = 0

    async def stack(rank: int) -> str | None:
        nonlocal looks
        looks += 1
        await go.wait()
        return f"where rank {rank} stands"

    logs = (
        RankLog(generation=2, file=log),
        RankLog(generation=1, file=crashed, ended="exited with 7"),
    )
    inspection = Inspection(
        lambda *printed: reported.append(printed),
        stack,
        lambda rank: logs if rank == 3 else (),
        log=get_logger(),
    )
    for _ in range(5):
        inspection.on_request(Down(inspect=Inspect(generation=2, rank=3)))
    inspection.on_request(Down(tick=Tick()))
    inspection.on_request(Down(inspect=Inspect(generation=2, rank=4)))
    await asyncio.sleep(0)
    assert looks == 2
    go.set()
    async with asyncio.timeout(5):
        while len(reported) < 2:  # noqa: ASYNC110  # a thread reads the file
            await asyncio.sleep(0.01)
    of = {evidence.rank: evidence for _generation, evidence in reported}
    assert of[3].stack == "where rank 3 stands"
    assert list(of[3].log) == ["first", "second"]
    assert (of[3].log_file, of[3].log_generation, of[3].log_ended) == (str(log), 2, "")
    before = of[3].before
    assert (before.generation, before.file, before.ended) == (1, str(crashed), "exited with 7")
    assert list(before.lines) == ["its last words"]
    assert (list(of[4].log), of[4].log_file, of[4].HasField("before")) == ([], "", False)
    inspection.on_request(Down(inspect=Inspect(generation=2, rank=3)))
    await asyncio.sleep(0)
    assert looks == 3


async def test_a_failed_inspection_is_logged_and_the_next_one_is_answered(tmp_path: Path) -> None:
    reported, fails, unhandled = list[tuple[int, RankEvidence]](), True, list[Any]()
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))

    async def stack(_rank: int) -> str | None:
        if fails:
            raise OSError("no more processes")
        return "a stack"

    inspection = Inspection(
        lambda *printed: reported.append(printed), stack, lambda _rank: (), log=get_logger()
    )
    with capture_logs() as logs:
        inspection.on_request(Down(inspect=Inspect(generation=2, rank=3)))
        await asyncio.sleep(0.01)
        gc.collect()  # asyncio reports an unretrieved error when its task is collected
        await asyncio.sleep(0)
    assert [(line["event"], line["rank"], line["reason"]) for line in logs] == [
        ("rank.not_inspected", 3, "OSError: no more processes")
    ]
    assert not unhandled
    fails = False
    inspection.on_request(Down(inspect=Inspect(generation=2, rank=3)))
    async with asyncio.timeout(5):
        while not reported:  # noqa: ASYNC110  # a thread reads no file
            await asyncio.sleep(0.01)
    assert reported[0][1].stack == "a stack"


def test_the_last_lines_of_a_large_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(5000)))
    lines = last_lines(file)
    assert len(lines) == TAIL_LINES
    assert lines[-1] == "line 4999 �"


def test_an_unreadable_log_file_is_shown_with_its_error_and_not_as_empty(tmp_path: Path) -> None:
    missing = tmp_path / "nothing"
    assert last_lines(missing) == [f"({missing} cannot be read: No such file or directory)"]
    assert last_lines(tmp_path) == [f"({tmp_path} cannot be read: Is a directory)"]
    missing.touch()
    assert last_lines(missing) == []
