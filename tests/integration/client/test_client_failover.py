"""The client's session while coordinators and other members die or freeze."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing

import pytest

from strata import errors
from strata.client.rank.rank_client import RankClient
from strata.devcluster.local_cluster import LocalCluster, LocalCoordinator
from strata.v1.worlds_pb2 import GetWorldRequest
from tests.cluster_fixtures import StartCluster, restart_all
from tests.integration.client.test_client import LIMIT_S, Trainers
from tests.integration.client.test_fork import Program, program
from tests.polling import until

DETECT_S = 2.0
NOISE_S = 4.0
"""Additional seconds on a busy machine."""


@pytest.fixture(scope="module")
def breakable(start_module_cluster: StartCluster) -> LocalCluster:
    return start_module_cluster(coordinators=3, detect_s=DETECT_S)


@pytest.fixture
def trainers(breakable: LocalCluster, job: str) -> Iterator[Trainers]:
    for coordinator in breakable.coordinators:
        coordinator.child.resume()
    restart_all(breakable)
    these = Trainers(breakable, job)
    yield these
    for coordinator in breakable.coordinators:
        coordinator.child.resume()
    restart_all(breakable)
    these.close()


@pytest.fixture
def unhurried(start_cluster: StartCluster, job: str) -> Iterator[Trainers]:
    """Trainers that never count as frozen, even on a busy machine: for tests that freeze no trainer."""
    these = Trainers(start_cluster(coordinators=1, detect_s=20.0), job)
    yield these
    these.close()


def serving(trainers: Trainers, client: RankClient) -> LocalCoordinator:
    """Return the coordinator that serves this session."""
    welcome = client._session.welcome
    assert welcome is not None
    return next(c for c in trainers.cluster.coordinators if c.name == welcome.replica)


@pytest.mark.journey
def test_killing_the_serving_coordinator_breaks_no_barrier(trainers: Trainers) -> None:
    three = trainers.join(3)
    before = [c.incarnation for c in three]
    waiting = [trainers.pool.submit(c.barrier, "b", b"x") for c in three[:2]]
    lost = serving(trainers, three[0])
    lost.child.kill()
    until(lambda: three[0].connected and serving(trainers, three[0]) is not lost)
    whole = {0: b"x", 1: b"x", 2: b"x"}
    assert three[2].barrier("b", b"x") == whole
    assert [future.result(LIMIT_S) for future in waiting] == [whole, whole]
    for round_ in range(3):
        assert trainers.all(lambda c, r=round_: c.barrier("b", b"%d" % r))  # type: ignore[misc]
    for client in three:
        client.check()
    assert [c.incarnation for c in three] == before


def test_clients_fail_over_from_a_frozen_coordinator(trainers: Trainers) -> None:
    two = trainers.join(2)
    frozen = serving(trainers, two[0])
    frozen.child.pause()
    until(lambda: serving(trainers, two[0]) is not frozen)
    assert trainers.all(lambda c: c.barrier("b", timeout_s=LIMIT_S)) == [{}, {}]
    assert {c.generation for c in two} == {1}


@pytest.mark.journey
def test_clients_reconnect_after_an_outage_of_all_coordinators(trainers: Trainers) -> None:
    two = trainers.join(2)
    before = [c.incarnation for c in two]
    waiting = trainers.pool.submit(two[0].barrier, "b", b"x")
    for coordinator in trainers.cluster.coordinators:
        coordinator.child.kill()
    until(lambda: not any(c.connected for c in two))
    with pytest.raises(errors.Unavailable, match="within 1 s"):
        two[1].call(GetWorldRequest(job=trainers.job), timeout_s=1)
    restart_all(trainers.cluster)
    until(lambda: all(c.connected for c in two))
    assert two[1].barrier("b", b"y") == {0: b"x", 1: b"y"}
    assert waiting.result(LIMIT_S) == {0: b"x", 1: b"y"}
    assert [c.incarnation for c in two] == before
    for client in two:
        client.check()


@asynccontextmanager
async def other_member(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch, *words: str
) -> AsyncIterator[tuple[RankClient, Program]]:
    """Form a world of a trainer in this process and a program of `fork_programs` in its own process."""
    monkeypatch.setenv("STRATA_JOB", trainers.job)
    monkeypatch.setenv("LEAST", "2")  # so that either of the two may create the job
    joining = trainers.pool.submit(trainers.join, 1, min_workers=2)
    async with program(words[0], trainers.cluster.endpoints, *words[1:]) as run:
        (survivor,) = await asyncio.wrap_future(joining)
        yield survivor, run


async def noticed(trainers: Trainers, survivor: RankClient, strike: Callable[[], None]) -> float:
    """Return the seconds from `strike` until the survivor's barrier broke."""
    waiting = asyncio.wrap_future(trainers.pool.submit(survivor.barrier, "never"))
    began = time.monotonic()
    strike()
    with pytest.raises((errors.BarrierBroken, errors.StaleGeneration)):
        await asyncio.wait_for(waiting, LIMIT_S)
    return time.monotonic() - began


async def test_a_killed_trainer_is_noticed_although_its_forked_child_lives(
    unhurried: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with other_member(unhurried, monkeypatch, "parent") as (survivor, run):
        for name in ("before", "after"):
            await asyncio.to_thread(survivor.barrier, name)
        child = (await run.says("child"))["child"]
        try:
            await run.says("parent")
            after_s = await noticed(unhurried, survivor, run.process.kill)
            os.kill(child, 0)
        finally:
            os.kill(child, signal.SIGKILL)
        assert after_s <= 1.5 + NOISE_S


async def test_a_frozen_trainer_is_noticed_within_detect_s(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with other_member(trainers, monkeypatch, "idle") as (survivor, run):
        await run.says("idle")
        after_s = await noticed(trainers, survivor, lambda: run.process.send_signal(signal.SIGSTOP))
        assert after_s <= DETECT_S + 1 + NOISE_S


@pytest.mark.slow
async def test_a_trainer_that_holds_the_gil_stays_in_its_world(
    start_cluster: StartCluster, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    detect_s = 4.0  # a ping must be answered within half of this time, even on a busy machine
    with closing(Trainers(start_cluster(coordinators=3, detect_s=detect_s), job)) as these:
        async with other_member(these, monkeypatch, "held_gil", f"{3 * detect_s}") as (survivor, run):
            await run.says("holding")
            await asyncio.to_thread(survivor.barrier, "after")
            await run.says("held")
            assert survivor.generation == 1
            assert await run.ended() == 0


async def test_a_trainer_that_is_started_again_takes_its_name_back(
    trainers: Trainers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with other_member(trainers, monkeypatch, "idle") as (survivor, run):
        first = await run.says("idle")
        run.process.kill()
        async with program("idle", trainers.cluster.endpoints) as again:
            second = await again.says("idle")
            assert second["incarnation"] > first["incarnation"]
            await asyncio.to_thread(survivor.rejoin, timeout_s=LIMIT_S)
            assert survivor.world_size == 2
