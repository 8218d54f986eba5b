"""The loop that drives controllers: the errors of one controller must not affect the others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from strata.coordinator.controllers.jobs import EVERY_S, JobController
from strata.coordinator.controllers.loop import drive
from strata.coordinator.view.mirror import Mirror
from strata.core.kv.txn import Event, KeyValue, WatchBatch
from strata.core.stop.last_step import BEGIN_BARRIER, STOP_BARRIER
from strata.errors import NotLeader, Unavailable
from strata.testing.memory_store import MemoryStore
from strata.testing.virtual_time import in_virtual_time
from tests.unit.coordinator.rig import KEYS, Rig, in_rig, now, rig


class Counter:
    """A controller that counts its turns, and fails the first `fails` of them."""

    name = "counter"
    tick_s = 10.0

    def __init__(self, *, fails: int = 0, error: Exception | None = None) -> None:
        self.turns: list[float] = []
        self.fails = fails
        self.error = error or Unavailable("not now")
        self.delay_s: float | None = None
        self.admission: asyncio.Event | None = None

    def wants(self, batch: WatchBatch) -> bool:
        return bool(batch.events)

    async def turn(self) -> float | None:
        self.turns.append(now())
        if self.admission is not None:
            await self.admission.wait()
        if self.fails:
            self.fails -= 1
            raise self.error
        return self.delay_s


async def driven(r: Rig, controller: Counter, for_s: float) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(for_s):
            await drive(controller, r.mirror)


@in_rig(rig)
async def test_a_controller_runs_at_the_start_on_changes_and_at_its_tick(r: Rig) -> None:
    controller = Counter()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(driven(r, controller, 25))
        await asyncio.sleep(4)
        r.put("a")
    assert [round(t - controller.turns[0]) for t in controller.turns] == [0, 4, 14, 24]


@in_rig(rig)
async def test_changes_during_a_turn_make_one_further_turn(r: Rig) -> None:
    controller = Counter()
    controller.admission = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(driven(r, controller, 5))
        await asyncio.sleep(1)
        for _ in range(10):
            await r.mirror.at_least(r.put("a"))
        controller.admission.set()
    assert len(controller.turns) == 2


@in_virtual_time()
async def test_long_controller_turns_leave_time_for_other_tasks() -> None:
    class Long(Counter):
        async def turn(self) -> float | None:
            await asyncio.sleep(0.05)  # a real turn might not yield for that long
            return await super().turn()

    async with rig() as r:
        controller = Long()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(driven(r, controller, 3))
            for _ in range(200):
                await r.mirror.at_least(r.put("a"))
                await asyncio.sleep(0.01)
        assert 10 <= len(controller.turns) <= 15, "one in 0.15 s, and one more for the last changes"


@pytest.mark.parametrize("error", [Unavailable("etcd is away"), KeyError("a bug")])
@in_rig(rig)
async def test_a_failure_is_tried_again_with_growing_pauses(r: Rig, error: Exception) -> None:
    controller = Counter(fails=8, error=error)
    await driven(r, controller, 60)
    pauses = [b - a for a, b in zip(controller.turns, controller.turns[1:], strict=False)]
    assert [round(p, 1) for p in pauses[:8]] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert round(pauses[8]) == 10


@in_rig(rig)
async def test_the_loss_of_the_fence_passes_through(r: Rig) -> None:
    with pytest.raises(NotLeader):
        await drive(Counter(fails=1, error=NotLeader("over")), r.mirror)


# -- the queue of jobs ------------------------------------------------------------------------


class Desk(JobController):
    """A controller that records the jobs it works on."""

    name = "desk"
    tick_s = 1000.0
    folders = frozenset({"workers"})

    def __init__(self, r: Rig) -> None:
        super().__init__(keys=KEYS, mirror=r.mirror)
        self.worked: list[str] = []
        self.bad: set[str] = set()
        self.delay_s: dict[str, float] = {}

    async def work(self, name: str) -> float | None:
        self.worked.append(name)
        if name in self.bad:
            raise KeyError(name)
        return self.delay_s.get(name)

    async def after(self, seconds: float) -> list[str]:
        """Return the jobs that the controller works on in the next `seconds`."""
        await asyncio.sleep(seconds)
        worked, self.worked = self.worked, []
        return worked


@asynccontextmanager
async def desk(*jobs: str) -> AsyncIterator[tuple[Rig, Desk]]:
    """Drive a `Desk` for these jobs."""
    async with rig() as r, asyncio.TaskGroup() as tasks:
        for job in jobs:
            r.put(f"jobs/{job}/spec")
        made = Desk(r)
        driving = tasks.create_task(drive(made, r.mirror))
        yield r, made
        driving.cancel()


@in_virtual_time()
async def test_only_jobs_with_changed_keys_are_processed() -> None:
    async with desk("a", "b") as (r, at_desk):
        assert await at_desk.after(1) == ["a", "b"]
        r.put("jobs/b/workers/w")
        r.put("jobs/a/latest")
        r.put("uid-of-something-else")
        assert await at_desk.after(1) == ["b"]


@in_virtual_time()
async def test_all_jobs_are_processed_periodically() -> None:
    async with desk("a") as (_r, at_desk):
        at_desk.tick_s = 1.0
        assert await at_desk.after(2 * EVERY_S + 5) == ["a"] * 3


@in_virtual_time()
async def test_a_job_is_processed_again_after_its_requested_delay() -> None:
    async with desk("a", "b") as (_r, at_desk):
        at_desk.delay_s = {"a": 2.0}
        assert await at_desk.after(5) == ["a", "b", "a", "a"]


@in_virtual_time()
async def test_one_jobs_error_stops_no_other_job_and_ends_with_its_cause() -> None:
    async with desk("bad", "good") as (r, at_desk):
        at_desk.bad = {"bad"}
        await asyncio.sleep(1)
        r.put("jobs/good/workers/w")
        for _ in range(100):  # a flood of changes does not hasten its next turn
            r.put("jobs/bad/workers/w")
        worked = await at_desk.after(12)
        assert worked.count("good") == 2
        assert 5 <= worked.count("bad") <= 10
        at_desk.bad = set()
        assert await at_desk.after(10) == ["bad"]
        r.put("jobs/bad/workers/w")
        assert await at_desk.after(1) == ["bad"]


# -- changes that make a controller look at a job

JOB = KEYS.job("j")


class Queue(JobController):
    name = "queue"
    folders = frozenset({"world"})
    barriers = frozenset({STOP_BARRIER})
    attempts = frozenset({"suspects"})


@pytest.mark.parametrize(
    ("key", "due"),
    [
        (JOB.head, True),
        (JOB.latest, False),
        (JOB.barrier_floor(STOP_BARRIER, 1), True),
        (JOB.barrier_floor(BEGIN_BARRIER, 1), False),
        (JOB.outcome("step", 1, 7), False),
        (JOB.checkpoint(20, 1), True),
        (JOB.suspect(20, 1, "x", "primary", "host-a"), True),
        (JOB.ack(20, 1, "x", 0), False),
    ],
)
def test_only_keys_that_a_controller_named_make_a_job_due(key: str, due: bool) -> None:
    """A world of another size waits for one barrier; a world that cannot begin waits for damage reports.

    Neither waits for acks.
    """
    queue = Queue(keys=KEYS, mirror=Mirror(MemoryStore().client("r1"), KEYS, new_uid="uid", clock=float))
    kv = KeyValue(key=key, value=b"{}", create_revision=5, mod_revision=5, version=1)
    assert queue.wants(WatchBatch(revision=5, events=(Event(kv=kv),))) is due
