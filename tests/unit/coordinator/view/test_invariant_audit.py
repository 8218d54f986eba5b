"""A violated invariant of the view is counted and logged once, and shown as a finding of its job; it ends nothing."""

from __future__ import annotations

import asyncio

from structlog.testing import capture_logs

from strata.coordinator.view.invariant_audit import PAUSE_S, REMEMBERED
from strata.core.kv.records import BarrierFloor, encode
from strata.v1.worlds_pb2 import GetJobRequest
from tests.unit.coordinator.rig import in_rig
from tests.unit.coordinator.serving_rig import JOB, KEYS, Cluster, cluster

THREE = ("r1", "r2", "r3")
TWICE_S = 2.5 * PAUSE_S


async def diagnosis(c: Cluster, name: str) -> str:
    service = c[name].service
    answer = await service.calls.answer("get_job", GetJobRequest(job="job"), None)
    return str(answer.job.diagnosis)


def counted(c: Cluster, name: str) -> float:
    return c[name].context.measures.violations.child().value


@in_rig(cluster)
async def test_a_barrier_floor_without_an_outcome_is_logged_once_and_shown_until_repaired(c: Cluster) -> None:
    await c.world(*THREE)
    floor = JOB.barrier_floor("epoch", 1)
    with capture_logs() as logs:
        c.put(floor, encode(BarrierFloor(round=3)))
        await asyncio.sleep(TWICE_S)
        for _ in range(5):  # the job goes on changing
            c.put(JOB.root + "somebody-elses", b"{}")
            await asyncio.sleep(TWICE_S)
    found = [entry for entry in logs if entry["event"] == "invariant_violated"]
    what = "barrier epoch/1: the floor is 3, and that round has no outcome"
    assert [(entry["job"], entry["key"], entry["what"]) for entry in found] == [
        ("job", JOB.barriers, what)
    ] * 3
    for name in THREE:
        assert c[name].alive
        assert counted(c, name) == 1
        assert what in await diagnosis(c, name)
    c.delete(floor)
    await asyncio.sleep(TWICE_S)
    assert [await diagnosis(c, name) for name in THREE] == ["", "", ""]
    c.delete(JOB.root + "somebody-elses")
    await asyncio.sleep(1)


@in_rig(cluster, 1)
async def test_the_number_of_remembered_violations_is_bounded(c: Cluster) -> None:
    with capture_logs() as logs:
        for number in range(REMEMBERED + 50):
            c.put(KEYS.job(f"j{number}").barrier_floor("b", 1), encode(BarrierFloor(round=1)))
        await asyncio.sleep(60)
    assert sum(entry["event"] == "invariant_violated" for entry in logs) == REMEMBERED
    assert counted(c, "r1") == REMEMBERED
    for number in range(REMEMBERED + 50):
        c.delete(KEYS.job(f"j{number}").barrier_floor("b", 1))
    await asyncio.sleep(60)
    assert not c["r1"].context.invariants.violations("j1")


@in_rig(cluster)
async def test_unreadable_keys_end_no_replica(c: Cluster) -> None:
    await c.world(*THREE)
    odd = {
        JOB.barrier_generation("b", 1) + "not-a-number": b"{}",
        JOB.barriers + "b/not-a-number/floor": b"\xff",
        JOB.worlds + "zero/members": b"{}",
        KEYS.jobs + "no name/spec": b"{}",
    }
    for key, value in odd.items():
        c.put(key, value)
    await asyncio.sleep(TWICE_S)
    assert all(c[name].alive for name in THREE)
    assert await diagnosis(c, "r1")
    for key in odd:
        c.delete(key)
    await asyncio.sleep(TWICE_S)
    assert all(c[name].alive for name in THREE)
