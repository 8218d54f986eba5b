"""The watch for stalled ranks, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from structlog.testing import capture_logs

from strata.client.rank.stall_watch import POLL_S, STACKS, Actions, StallWatch
from strata.core.health.stalls import StallLimits
from strata.observe import get_logger
from strata.testing.virtual_time import in_virtual_time
from strata.v1.members_pb2 import RankProgress, SaveHold
from tests.unit.coordinator.rig import in_rig

DUMP = 'Thread 0x1 (most recent call first):\n  File "train.py", line {rank} in {where}\n'


class Node:
    """A stall watch, with its reports, its stack requests and the ranks it killed."""

    def __init__(self, *, evict: bool = False) -> None:
        self.reported: list[RankProgress] = []
        self.requests: list[int] = []
        self.first_request = asyncio.Event()
        self.dump_s = 0.1
        self.asking = 0
        self.at_once: list[int] = []
        self.states: dict[int, str] = {}
        self.evicted: list[tuple[int, int, str]] = []
        self.where: dict[int, str] = {}
        self.blamed: set[int] | None = set()
        actions = Actions(
            log=get_logger(),
            tell=self._tell,
            stack=self._stack,
            trace=self._trace,
            process=lambda rank: self.states.get(rank, "sleeping"),
            evict=self._evict if evict else None,
            blame=self._blame,
        )
        self.watch = StallWatch(StallLimits.derive(5.0), actions)
        self.watch.watch(1)

    def _tell(self, generation: int, ranks: Sequence[RankProgress]) -> None:
        self.reported += ranks

    async def _stack(self, rank: int) -> str | None:
        self.requests.append(rank)
        self.first_request.set()
        self.asking += 1
        self.at_once.append(self.asking)
        await asyncio.sleep(self.dump_s)
        self.asking -= 1
        return DUMP.format(rank=rank, where=self.where.get(rank, "backward"))

    async def _trace(self, rank: int) -> tuple[Path, int] | None:
        return (Path("/traces/rank_1"), 2048) if rank == 1 else None

    async def _blame(self) -> Collection[int] | None:
        await asyncio.sleep(0.1)
        return self.blamed

    def _evict(self, rank: int, generation: int, reason: str) -> None:
        self.evicted.append((rank, generation, reason))

    def say(self, rank: int, step: int, phase: str = "step", generation: int = 1) -> None:
        self.watch.on_progress(generation, [RankProgress(rank=rank, step=step, phase=phase)])

    async def train(self, ranks: int, steps: int) -> None:
        """Let ranks run steps of one second each."""
        for step in range(steps + 1):
            for rank in range(ranks):
                self.say(rank, step)
            await asyncio.sleep(1)

    @property
    def stalled(self) -> list[RankProgress]:
        return [report for report in self.reported if report.stalled_ms]


@asynccontextmanager
async def watched(*, evict: bool = False) -> AsyncIterator[Node]:
    node = Node(evict=evict)
    task = asyncio.create_task(node.watch.run())
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@in_rig(watched)
async def test_reports_are_passed_on_with_the_duration_of_steps(node: Node) -> None:
    await node.train(1, 4)
    last = node.reported[-1]
    assert (last.step, last.usual_ms) == (4, 1_000)
    assert (round(last.step_us, -2), round(last.median_step_us, -2)) == (1_000_000, 1_000_000)
    for step, own_us in ((5, 7), (6, 9), (7, 50)):
        node.watch.on_progress(1, [RankProgress(rank=0, step=step, phase="step", step_us=own_us)])
    last = node.reported[-1]
    assert (last.step_us, last.median_step_us) == (50, 9), "what the rank itself measured counts"
    node.say(9, 3, generation=8)
    assert node.reported[-1].rank == 9, "of a generation that is not watched: passed on as it is"


@in_virtual_time()
async def test_a_save_hold_is_passed_on_and_logged_at_its_begin_and_end() -> None:
    hold = SaveHold(step=4, reason="disk full", host="a")
    async with watched() as node:
        with capture_logs() as logs:
            await node.train(1, 4)
            for step in (5, 6):
                node.watch.on_progress(1, [RankProgress(rank=0, step=step, phase="step", save_hold=hold)])
            assert node.reported[-1].save_hold == hold
            await asyncio.sleep(30)
            assert node.stalled[-1].save_hold == hold, "the word of its stall does not end the hold"
            node.say(0, 7)
        assert not node.reported[-1].HasField("save_hold")
        assert [line["event"] for line in logs if "saves" in line["event"]] == [
            "rank.saves_held",
            "rank.saves_no_longer_held",
        ]


@in_rig(watched)
async def test_a_stalled_rank_is_reported_once_with_its_stack_and_trace(node: Node) -> None:
    await node.train(3, 5)
    for step in range(6, 21):
        node.say(0, step)
        node.say(2, step)
        await asyncio.sleep(1)
    (report,) = node.stalled
    assert (report.rank, report.step, report.phase) == (1, 5, "step")
    assert 10_000 <= report.stalled_ms < 12_000
    assert report.age_ms >= report.stalled_ms
    assert "line 1 in backward" in report.stack
    assert (report.trace_file, report.trace_bytes) == ("/traces/rank_1", 2048)
    assert node.requests == [1, 1], "when it is late, and when that is a stall"
    node.say(1, 6)
    assert node.reported[-1].stalled_ms == 0


@in_rig(watched)
async def test_a_late_rank_is_reported_with_its_activity_before_it_is_stalled(node: Node) -> None:
    node.where, node.states = {1: "all_reduce"}, {2: "stopped"}
    await node.train(3, 5)
    await asyncio.sleep(2.0 + 0.5 + 0.2)  # two of three usual steps remain; the next check; the stacks
    late = [report for report in node.reported if report.late_ms]
    found = {
        report.rank: (report.where, report.activity, report.process, report.stalled_ms) for report in late
    }
    assert found == {
        0: ("backward (train.py)", "code", "sleeping", 0),
        1: ("all_reduce (train.py)", "code", "sleeping", 0),
        2: ("", "", "stopped", 0),
    }
    assert all(report.age_ms >= 3_000 for report in late)
    assert 2 not in node.requests, "a stopped process answers nothing"
    node.say(1, 6)
    assert (node.reported[-1].late_ms, node.reported[-1].where, node.reported[-1].process) == (0, "", "")


@in_rig(watched)
async def test_a_rank_that_moves_while_its_stack_is_requested_is_not_late(node: Node) -> None:
    await node.train(1, 5)
    await node.first_request.wait()
    node.say(0, 6)
    reported = len(node.reported)
    await asyncio.sleep(1)
    assert not [each for each in node.reported[reported - 1 :] if each.late_ms or each.where]


@in_rig(watched)
async def test_late_ranks_are_reported_before_their_stacks_arrive(
    node: Node,
) -> None:
    node.dump_s, node.states = 3.0, {39: "stopped"}
    await node.train(40, 5)
    await asyncio.sleep(2.0)
    node.reported.clear()
    await asyncio.sleep(POLL_S + 0.1)
    first = {report.rank: report for report in node.reported}
    assert set(first) == set(range(40))
    assert all(report.late_ms and not report.where for report in first.values())
    assert {rank for rank, report in first.items() if report.process} == {39}, "it is not asked anything"
    node.say(0, 6)  # the rank moves on, and stalls again while the other ranks' stacks are requested
    node.reported.clear()
    await asyncio.sleep(3.0 + POLL_S + 0.1)
    assert [report.rank for report in node.reported if report.late_ms and not report.where] == [0]
    await asyncio.sleep(3.0 * 4)
    last = {report.rank: report.where for report in node.reported}
    assert {rank for rank, where in last.items() if where} == set(range(39))


@in_rig(watched)
async def test_stack_requests_to_many_ranks_are_limited(node: Node) -> None:
    await node.train(40, 5)
    await asyncio.sleep(12)
    assert len(node.stalled) == 40
    assert max(node.at_once) == STACKS
    last = {report.rank: report for report in node.reported}
    assert sum(1 for report in last.values() if report.stack) == STACKS
    assert {report.where for report in last.values()} == {"backward (train.py)"}, (
        "each was asked, some at a time"
    )


@in_rig(watched)
async def test_a_departed_rank_or_one_of_another_generation_is_not_watched(node: Node) -> None:
    await node.train(2, 5)
    node.watch.on_detached(1, 0)
    node.watch.on_detached(7, 1)
    await asyncio.sleep(12)
    assert [report.rank for report in node.stalled] == [1]
    node.watch.watch(2)
    await asyncio.sleep(60)
    assert len(node.stalled) == 1


@in_rig(watched, evict=True)
async def test_the_rank_that_holds_up_the_others_is_evicted(node: Node) -> None:
    node.where, node.blamed = {2: "fetch"}, set(range(8))
    await node.train(4, 5)
    await asyncio.sleep(20)
    ((rank, generation, reason),) = node.evicted
    assert (rank, generation) == (2, 1)
    assert reason.startswith("stalled: no progress at step 5 (step) for ")
    assert "most others are in backward (train.py)" in reason


@in_rig(watched, evict=True)
async def test_a_rank_that_the_coordinators_blame_is_evicted_by_its_own_agent(node: Node) -> None:
    node.where, node.blamed = {2: "fetch"}, {9}
    await node.train(4, 5)
    await asyncio.sleep(30)
    assert node.evicted == [], "another node's rank"
    node.blamed = {1, 9}
    await asyncio.sleep(2)
    assert [rank for rank, *_ in node.evicted] == [1]


@in_rig(watched, evict=True)
async def test_no_rank_is_evicted_while_no_coordinator_answers(node: Node) -> None:
    node.where, node.blamed = {2: "fetch"}, None
    await node.train(4, 5)
    await asyncio.sleep(60)
    assert node.evicted == [], "the ranks may wait for coordinators, and nothing can follow without them"
    node.blamed = {2}
    await asyncio.sleep(2)
    assert node.evicted == [], "now they may move again"
    await asyncio.sleep(5)
    assert [rank for rank, *_ in node.evicted] == [2]


@in_rig(watched)
async def test_no_rank_is_evicted_unless_eviction_is_enabled(node: Node) -> None:
    await node.train(4, 5)
    await asyncio.sleep(100)
    assert node.evicted == []
