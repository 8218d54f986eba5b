"""The board of the newest reports of ranks and devices."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from strata.coordinator.reports.interest import POLL_S
from strata.coordinator.reports.progress import (
    MAX_STACK_CHARS,
    MAX_STACKS,
    MAX_WHERE_CHARS,
    MAX_WORD_CHARS,
    NEWS_BYTES,
    UNSERVED_S,
    ProgressBoard,
)
from strata.core.stop.save_hold import MAX_HOST_CHARS, MAX_REASON_CHARS
from strata.testing.virtual_time import in_virtual_time
from strata.v1.members_pb2 import (
    DeviceStatus,
    MemberDevices,
    MemberLastSeen,
    RankEvidence,
    RankProgress,
    SaveHold,
    StepTimes,
)
from strata.v1.session_pb2 import Progress, Tick
from tests.not_none import not_none
from tests.unit.coordinator.rig import now
from tests.unit.coordinator.serving_rig import Cluster, Member, in_world


def printed(rank: int, step: int, phase: str = "step", **more: object) -> RankProgress:
    return RankProgress(rank=rank, step=step, phase=phase, **more)  # type: ignore[arg-type]  # fields by name


def one(board: ProgressBoard, rank: int = 0) -> RankProgress:
    (found,) = board.ranks("j", 1, [rank])
    return found


@pytest.fixture
def board() -> ProgressBoard:
    return ProgressBoard()


@in_virtual_time()
async def test_a_stall_lasts_until_the_rank_reports_something_else(board: ProgressBoard) -> None:
    board.note("j", 1, [printed(0, 7)], own=True)
    await asyncio.sleep(30)
    board.note("j", 1, [printed(0, 7, age_ms=30_050, stalled_ms=30_050, stack="File train.py")], own=True)
    assert (one(board).stalled_ms, one(board).stack) == (30_000, "File train.py")
    assert board.phases("j", 1) == {0: "step, step 7, stalled for 30 s"}
    await asyncio.sleep(10)
    assert one(board).stalled_ms == 40_000, "it grows by itself"
    board.note("j", 1, [printed(0, 7, age_ms=40_000)], own=False)
    assert one(board).stalled_ms == 40_000, "an older message by way of a peer ends nothing"
    board.note("j", 1, [printed(0, 8)], own=True)
    assert (one(board).stalled_ms, one(board).stack) == (0, "")


@in_virtual_time()
async def test_a_late_rank_s_activity_ends_when_it_moves_and_step_times_stay(
    board: ProgressBoard,
) -> None:
    times = StepTimes(compute_us=7, median_compute_us=8, steady_steps=9)
    board.note("j", 1, [printed(0, 7, step_times=times, usual_ms=500)], own=True)
    await asyncio.sleep(3)
    late = printed(0, 7, age_ms=3_000, late_ms=3_000, where="w" * 9999, activity="data", process="p" * 99)
    board.note("j", 1, [late], own=True)
    await asyncio.sleep(1)
    known = one(board)
    assert (known.late_ms, known.usual_ms, known.activity) == (4_000, 500, "data"), "it grows by itself"
    assert (len(known.where), len(known.process)) == (MAX_WHERE_CHARS, MAX_WORD_CHARS)
    assert known.step_times == times
    board.note("j", 1, [printed(0, 7, age_ms=4_000)], own=False)
    assert one(board).late_ms == 4_000, "an older message by way of a peer ends nothing"
    board.note("j", 1, [printed(0, 8, step_times=StepTimes(compute_us=-5))], own=True)
    assert (one(board).late_ms, one(board).where, one(board).process) == (0, "", "")
    assert one(board).step_times.compute_us == 0


@in_virtual_time()
async def test_a_save_hold_lasts_until_a_newer_report_without_one(board: ProgressBoard) -> None:
    hold = SaveHold(step=20, held_ms=5000, reason="disk full", host="a")
    board.note("j", 1, [printed(0, 20)], own=True)
    await asyncio.sleep(1)
    board.note("j", 1, [printed(0, 20, save_hold=hold)], own=True)
    await asyncio.sleep(10)
    assert one(board).save_hold == hold
    assert one(board).age_ms == 10_000, "so it is held for 15 s by now"
    board.note("j", 1, [printed(0, 20, age_ms=10_900)], own=False)
    assert one(board).HasField("save_hold"), "an older word by way of a peer ends nothing"
    board.note("j", 1, [printed(0, 24, save_hold=hold)], own=True)
    assert one(board).HasField("save_hold")
    board.note("j", 1, [printed(0, 24)], own=True)
    assert not one(board).HasField("save_hold"), "it ends without a step"
    board.note("j", 1, [printed(0, 24, age_ms=500, save_hold=hold)], own=False)
    assert not one(board).HasField("save_hold")
    board.note(
        "j", 1, [printed(1, 1, save_hold=SaveHold(held_ms=-1, reason="x" * 9999, host="h" * 9999))], own=True
    )
    bounded = one(board, 1).save_hold
    assert (bounded.held_ms, len(bounded.reason), len(bounded.host)) == (0, MAX_REASON_CHARS, MAX_HOST_CHARS)


@in_virtual_time()
async def test_stored_stacks_and_texts_are_bounded(board: ProgressBoard) -> None:
    for rank in range(MAX_STACKS + 10):
        board.note("j", 1, [printed(rank, 100 - rank % 2, stalled_ms=1, stack="x" * 99_999)], own=True)
    kept = [r for r in board.ranks("j", 1, range(1000)) if r.stack]
    assert len(kept) == MAX_STACKS
    assert {r.step for r in board.ranks("j", 1, range(1000)) if not r.stack} == {100}, (
        "those ahead lose theirs"
    )
    assert max(len(r.stack) for r in kept) == MAX_STACK_CHARS
    board.note("j", 1, [printed(0, -1, stalled_ms=-5, step_us=-1, trace_file="/" * 9999)], own=True)
    assert one(board).step_us == 0


@in_virtual_time()
async def test_news_is_sent_in_messages_of_bounded_size(board: ProgressBoard) -> None:
    board.note("j", 1, [printed(r, 1, stalled_ms=1, stack="x" * 4000) for r in range(64)], own=True)
    board.note("j", 1, [printed(r, 1, "p" * 64, trace_file="/" * 500) for r in range(100, 3000)], own=True)
    devices = [DeviceStatus(index=i, name="H200", fault="f" * 200) for i in range(8)]
    for worker in range(500):
        board.note_devices("j", MemberDevices(worker_id=f"w{worker}", devices=devices), own=True)
    letters = board.news()
    assert len(letters) > 2
    assert max(letter.ByteSize() for letter in letters) < NEWS_BYTES + 100_000
    assert sum(len(letter.ranks) for letter in letters) == 64 + 2900
    assert sum(len(letter.devices) for letter in letters) == 500
    assert board.news() == []
    board.resend()
    assert sum(len(letter.ranks) for letter in board.news()) == 64 + 2900


@in_virtual_time()
async def test_heartbeats_of_departed_members_are_forgotten_while_news_is_read(board: ProgressBoard) -> None:
    stays = MemberLastSeen(worker_id="stays", incarnation=1, age_ms=3_600_000)
    for number in range(600):
        passes = MemberLastSeen(worker_id=f"w{number}", incarnation=2 + number)
        board.note_last_seen("j", [stays, passes], own=number % 2 == 0)
        board.news()
        await asyncio.sleep(1)
    last_seen = board.last_seen("j", "stays", 1)
    assert last_seen is not None, "its replica says so each second, though it has been silent for an hour"
    assert board.last_seen("j", "w599", 601) is not None
    assert not any(board.last_seen("j", f"w{n}", 2 + n) for n in range(600 - int(UNSERVED_S) - 2))


@in_virtual_time()
async def test_devices_belong_to_an_incarnation_and_go_with_the_member(board: ProgressBoard) -> None:
    board.note_devices(
        "j", MemberDevices(worker_id="w", incarnation=5, devices=[DeviceStatus(index=1)]), own=True
    )
    board.note_devices("j", MemberDevices(worker_id="w", incarnation=4), own=False)
    assert [d.index for d in board.devices_of("j", "w", 5)] == [1]
    assert not list(board.devices_of("j", "w", 4))
    board.forget_member("j", "w")
    assert not list(board.devices("j"))
    assert board.news() == []


# -- members report more while a client inspects a rank, through any replica, and no longer


async def answering(member: Member, rank: int) -> None:
    """Answer each inspection of a rank, as an agent does."""
    seen = 0
    while True:
        requests = member.all("inspect")
        if len(requests) > seen:
            seen = len(requests)
            evidence = RankEvidence(rank=rank, stack=f"stack {seen}", log=["a line"])
            member.send(progress=Progress(generation=1, evidence=[evidence]))
        member.send(tick=Tick())
        await asyncio.sleep(0.1)


def looks(c: Cluster, replica: str) -> Any:
    return c[replica].service.live


@in_world("r1", "r2", members=2)
async def test_an_inspection_at_any_replica_brings_evidence_and_heartbeat_ages(
    c: Cluster, members: list[Member]
) -> None:
    tasks = [c.tasks.create_task(answering(member, rank)) for rank, member in enumerate(members)]
    service = looks(c, "r3")
    await asyncio.sleep(5)
    assert members[0].all("inspect") == []
    assert service.last_seen("job", "w0", members[0].incarnation) is None
    for _ in range(6):
        service.look("job", 0)
        service.look("job", None)
        await asyncio.sleep(1)
    found = not_none(service.evidence("job", 1, 0))
    assert found.stack.startswith("stack ")
    assert list(found.log) == ["a line"]
    assert service.evidence("job", 1, 1) is None, "nobody looks at rank 1"
    assert members[1].all("inspect") == []
    for name in ("w0", "w1"):
        assert (
            now()
            - not_none(
                service.last_seen("job", name, next(m.incarnation for m in members if m.worker == name))
            )
            < 4
        )
    await asyncio.sleep(2 * POLL_S + 12)
    count = len(members[0].all("inspect"))
    assert service.evidence("job", 1, 0) is None
    await asyncio.sleep(10)
    assert len(members[0].all("inspect")) == count, "nobody looks any more"
    for task in tasks:
        task.cancel()


@in_world("r1", "r1", members=2)
async def test_evidence_about_another_members_rank_is_ignored(c: Cluster, members: list[Member]) -> None:
    members[0].send(progress=Progress(generation=1, evidence=[RankEvidence(rank=1, stack="made up")]))
    await asyncio.sleep(2)
    assert looks(c, "r1").evidence("job", 1, 1) is None
