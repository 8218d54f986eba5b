from __future__ import annotations

import asyncio
from pathlib import Path

from strata.client.inspection import TAIL_LINES, Inspection, last_lines
from strata.v1.members_pb2 import RankEvidence
from strata.v1.session_pb2 import Down, Inspect, Tick


class Session:
    def __init__(self) -> None:
        self.told: list[tuple[int, RankEvidence]] = []

    def evidence(self, generation: int, evidence: RankEvidence) -> None:
        self.told.append((generation, evidence))


async def test_one_look_at_a_rank_at_a_time_is_answered(tmp_path: Path) -> None:
    log, session, go = tmp_path / "log", Session(), asyncio.Event()
    log.write_text("first\nsecond\n")
    looks = 0

    async def stack(rank: int) -> str | None:
        nonlocal looks
        looks += 1
        await go.wait()
        return f"where rank {rank} stands"

    inspection = Inspection(session, stack, lambda rank: log if rank == 3 else None)
    for _ in range(5):
        inspection.on_request(Down(inspect=Inspect(generation=2, rank=3)))
    inspection.on_request(Down(tick=Tick()))
    inspection.on_request(Down(inspect=Inspect(generation=2, rank=4)))
    await asyncio.sleep(0)
    assert looks == 2
    go.set()
    async with asyncio.timeout(5):
        while len(session.told) < 2:  # noqa: ASYNC110  # a thread reads the file
            await asyncio.sleep(0.01)
    told = {evidence.rank: evidence for _generation, evidence in session.told}
    assert told[3].stack == "where rank 3 stands"
    assert list(told[3].log) == ["first", "second"]
    assert told[3].log_file == str(log)
    assert (list(told[4].log), told[4].log_file) == ([], "")
    inspection.on_request(Down(inspect=Inspect(generation=2, rank=3)))
    await asyncio.sleep(0)
    assert looks == 3


def test_the_last_lines_of_a_large_file(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"".join(b"line %d \xff\n" % number for number in range(5000)))
    lines = last_lines(file)
    assert len(lines) == TAIL_LINES
    assert lines[-1] == "line 4999 �"
    assert last_lines(tmp_path / "nothing") == []
    assert last_lines(tmp_path) == []
