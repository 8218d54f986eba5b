"""The board of what ranks and devices last said."""

from __future__ import annotations

import asyncio

from strata.coordinator.members.progress import MAX_STACK_CHARS, MAX_STACKS, NEWS_BYTES, ProgressBoard
from strata.testing.virtual_time import in_virtual_time
from strata.v1.members_pb2 import DeviceStatus, MemberDevices, RankProgress


def said(rank: int, step: int, phase: str = "step", **more: object) -> RankProgress:
    return RankProgress(rank=rank, step=step, phase=phase, **more)  # type: ignore[arg-type]  # fields by name


def one(board: ProgressBoard, rank: int = 0) -> RankProgress:
    (found,) = board.ranks("j", 1, [rank])
    return found


@in_virtual_time()
async def test_a_stall_lasts_until_the_rank_says_something_else() -> None:
    board = ProgressBoard()
    board.note("j", 1, [said(0, 7)], own=True)
    await asyncio.sleep(30)
    board.note("j", 1, [said(0, 7, age_ms=30_050, stalled_ms=30_050, stack="File train.py")], own=True)
    assert (one(board).stalled_ms, one(board).stack) == (30_000, "File train.py")
    assert board.phases("j", 1) == {0: "step, step 7, stalled for 30 s"}
    await asyncio.sleep(10)
    assert one(board).stalled_ms == 40_000, "it grows by itself"
    board.note("j", 1, [said(0, 7, age_ms=40_000)], own=False)
    assert one(board).stalled_ms == 40_000, "an older message by way of a peer ends nothing"
    board.note("j", 1, [said(0, 8)], own=True)
    assert (one(board).stalled_ms, one(board).stack) == (0, "")


@in_virtual_time()
async def test_what_is_kept_is_bounded() -> None:
    board = ProgressBoard()
    for rank in range(MAX_STACKS + 10):
        board.note("j", 1, [said(rank, 100 - rank % 2, stalled_ms=1, stack="x" * 99_999)], own=True)
    kept = [r for r in board.ranks("j", 1, range(1000)) if r.stack]
    assert len(kept) == MAX_STACKS
    assert {r.step for r in board.ranks("j", 1, range(1000)) if not r.stack} == {100}, (
        "those ahead lose theirs"
    )
    assert max(len(r.stack) for r in kept) == MAX_STACK_CHARS
    board.note("j", 1, [said(0, -1, stalled_ms=-5, step_us=-1, trace_file="/" * 9999)], own=True)
    assert one(board).step_us == 0


@in_virtual_time()
async def test_news_are_told_in_messages_of_bounded_size() -> None:
    board = ProgressBoard()
    board.note("j", 1, [said(r, 1, stalled_ms=1, stack="x" * 4000) for r in range(64)], own=True)
    board.note("j", 1, [said(r, 1, "p" * 64, trace_file="/" * 500) for r in range(100, 3000)], own=True)
    devices = [DeviceStatus(index=i, name="H200", fault="f" * 200) for i in range(8)]
    for worker in range(500):
        board.note_devices("j", MemberDevices(worker_id=f"w{worker}", devices=devices), own=True)
    letters = board.news()
    assert len(letters) > 2
    assert max(letter.ByteSize() for letter in letters) < NEWS_BYTES + 100_000
    assert sum(len(letter.ranks) for letter in letters) == 64 + 2900
    assert sum(len(letter.devices) for letter in letters) == 500
    assert board.news() == []
    board.tell_again()
    assert sum(len(letter.ranks) for letter in board.news()) == 64 + 2900


@in_virtual_time()
async def test_devices_belong_to_an_incarnation_and_go_with_the_member() -> None:
    board = ProgressBoard()
    board.note_devices(
        "j", MemberDevices(worker_id="w", incarnation=5, devices=[DeviceStatus(index=1)]), own=True
    )
    board.note_devices("j", MemberDevices(worker_id="w", incarnation=4), own=False)
    assert [d.index for d in board.devices_of("j", "w", 5)] == [1]
    assert not list(board.devices_of("j", "w", 4))
    board.forget_member("j", "w")
    assert not list(board.devices("j"))
    assert board.news() == []
