"""The member of a torchrun agent on real coordinators: worlds, failures, spares, exits; without torchrun and torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from strata.agent.environment import Place
from strata.client import CoordinatorClient, parse_endpoints
from strata.config import Credentials
from strata.devcluster.local_cluster import LocalCluster
from strata.errors import ConfigError, JobFailed, Refused, StrataError, Unavailable
from strata.integrations.torchrun.launcher import RankFailure
from strata.integrations.torchrun.meeting import Met
from strata.integrations.torchrun.member import AgentMember, Preempted, Spare
from strata.integrations.torchrun.settings import NO_BREAKER, AgentSettings
from strata.v1.worlds_pb2 import (
    JOB_PHASE_RUNNING,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    Job,
    StopJobRequest,
)
from tests.processes import LIMIT_S

Joined = tuple[Place, Met]


async def open_store(address: str) -> int:
    """Replace torch's store: return a port without a server behind it."""
    return 4711


class Agents:
    """The agents of one job, in this process."""

    def __init__(self, endpoints: str, job: str) -> None:
        self._endpoints = endpoints
        self._job = job
        self._running: list[asyncio.Task[None]] = []

    def start(self, name: str, **change: Any) -> AgentMember:
        given: dict[str, Any] = {
            "run_id": self._job,
            "endpoints": parse_endpoints(self._endpoints),
            "credentials": Credentials(),
            "worker_id": name,
            "host": "here",
            "pid": os.getpid(),
            "slots": 1,
            "role": "default",
            "min_nodes": 2,
            "max_nodes": 2,
            "settle_s": 0.2,
            "max_no_progress_generations": NO_BREAKER,
            "attempt": 0,
            "join_timeout_s": LIMIT_S,
            "preempt": "job",
            "preempt_grace_s": 25.0,
            "local_addr": "",
        }
        member = AgentMember(AgentSettings(**(given | change)))
        self._running.append(asyncio.create_task(member.run()))
        return member

    async def end(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


@pytest.fixture
async def agents(cluster: LocalCluster, job: str) -> AsyncIterator[Agents]:
    it = Agents(cluster.endpoints, job)
    yield it
    await it.end()


async def joined(*members: AgentMember, failure: RankFailure | None = None) -> list[Joined]:
    """Return the places of these members once all are in one world."""
    async with asyncio.timeout(LIMIT_S):
        found = await asyncio.gather(*(member.join(failure, open_store) for member in members))
    assert len({place.generation for place, _ in found}) == 1
    return found


async def ended(member: AgentMember) -> None:
    assert await member.ended_within(LIMIT_S)


def has_request(member: AgentMember) -> bool:
    return member.notice_for_member is not None


async def raised(joining: Coroutine[Any, Any, Joined]) -> Exception:
    """Return the error with which a join ends."""
    try:
        async with asyncio.timeout(LIMIT_S):
            place, _ = await joining
    except (StrataError, Spare, Preempted) as error:
        return error
    raise AssertionError(f"joined generation {place.generation}")


async def test_members_rendezvous_at_rank_0_and_pass_their_environment_to_workers(
    agents: Agents,
) -> None:
    a, b = agents.start("a", slots=2), agents.start("b", slots=3)
    found = await joined(a, b)
    assert {(met.address, met.port) for _, met in found} == {("127.0.0.1", 4711)}
    assert sorted(place.ranks.start for place, _ in found) in ([0, 2], [0, 3])
    assert {place.world.size for place, _ in found} == {5}
    assert (a.outdated, a.closed) == (False, False)
    environment = a.environment()
    assert environment["STRATA_WORKER_ID"] == "a"
    assert stat.S_ISSOCK(os.stat(environment["STRATA_SOCKET"]).st_mode)  # noqa: PTH116
    assert "%r" in environment["STRATA_STACKS"], "one file a rank, though all find the same"
    assert "STRATA_RESTORE" not in environment


async def test_a_rank_failure_ends_the_generation_for_all_and_names_the_signal(
    agents: Agents, cluster: LocalCluster, job: str
) -> None:
    a, b = agents.start("a"), agents.start("b")
    first = await joined(a, b)
    failed = RankFailure(rank=first[0][0].ranks.start, code=-9, reason="was ended by SIGKILL")
    again = asyncio.create_task(a.join(failed, open_store))
    await ended(b)
    (second,) = await joined(b)
    assert (await again)[0].generation == second[0].generation == first[0][0].generation + 1
    assert second[0].member.first_rank == first[1][0].member.first_rank
    assert "rank" in second[0].world.reason
    assert "SIGKILL" in second[0].world.reason


async def test_a_newcomer_and_a_loss_are_both_a_reason_to_meet_again(agents: Agents) -> None:
    limits = {"min_nodes": 2, "max_nodes": 3}
    a, b = agents.start("a", **limits), agents.start("b", **limits)
    await joined(a, b)
    c = agents.start("c", **limits)
    await ended(a)
    await ended(b)
    grown = await joined(a, b, c)
    assert {place.world.size for place, _ in grown} == {3}
    await c.leave()
    await ended(a)
    shrunk = await joined(a, b)
    assert {place.world.size for place, _ in shrunk} == {2}


async def test_a_spare_replaces_a_departed_agent_and_ends_when_the_job_is_done(agents: Agents) -> None:
    a, b = agents.start("a"), agents.start("b")
    await joined(a, b)
    c = agents.start("c")
    waits_c = asyncio.create_task(c.join(None, open_store))
    assert await c.comes_true(lambda: c.standing_by, LIMIT_S)
    d = agents.start("d")
    waits_d = asyncio.create_task(raised(d.join(None, open_store)))
    assert await d.comes_true(lambda: d.standing_by, LIMIT_S)
    assert not waits_c.done()
    await b.leave(RankFailure(rank=0, code=1, reason="gave up"))
    await joined(a)
    await waits_c  # the spare that joined first
    a.finished()
    c.finished()
    assert isinstance(await waits_d, Spare)
    await a.leave()
    await c.leave()
    assert a.closed


async def test_a_finished_job_is_closed_to_its_attempt_and_open_to_the_next(agents: Agents) -> None:
    one = {"min_nodes": 1, "max_nodes": 1}
    a = agents.start("a", attempt=1, **one)
    await joined(a)
    a.finished()
    await a.leave()
    for attempt in (0, 1):
        late = agents.start(f"late-{attempt}", attempt=attempt, **one)
        error = await raised(late.join(None, open_store))
        assert isinstance(error, Refused)
        assert "is done" in str(error)
        assert late.closed
    again = agents.start("a", attempt=2, **one)
    ((place, _),) = await joined(again)
    assert place.generation == 2


async def test_a_finished_agent_is_left_out_of_the_next_world(agents: Agents) -> None:
    """A finished agent waits in torch's exit barrier and can no longer start workers."""
    limits = {"min_nodes": 1, "max_nodes": 2}
    a, b = agents.start("a", **limits), agents.start("b", **limits)
    first = await joined(a, b)
    a.finished()
    failed = RankFailure(rank=first[1][0].ranks.start, code=1, reason="exited with 1")
    again = asyncio.create_task(b.join(failed, open_store))
    await ended(a)
    async with asyncio.timeout(LIMIT_S):
        place, _ = await again
    assert place.world.size == 1
    await a.leave()


async def test_the_no_progress_limit_fails_the_job_with_the_last_reason(agents: Agents) -> None:
    a = agents.start("a", min_nodes=1, max_nodes=1, max_no_progress_generations=1)
    await joined(a)
    error = await raised(a.join(RankFailure(rank=0, code=3, reason="exited with 3"), open_store))
    assert isinstance(error, JobFailed)
    assert "exited with 3" in str(error)
    assert a.closed


async def test_an_agent_without_a_world_gives_up_after_its_join_timeout(agents: Agents) -> None:
    a = agents.start("a", join_timeout_s=0.5)
    error = await raised(a.join(None, open_store))
    assert isinstance(error, Unavailable)
    assert "no world with a place for this agent within 0.5 s" in str(error)


async def test_a_join_without_any_coordinator_times_out(agents: Agents) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        endpoints = parse_endpoints(f"127.0.0.1:{nobody.getsockname()[1]}")
        a = agents.start("a", endpoints=endpoints, join_timeout_s=0.5)
        error = await raised(a.join(None, open_store))
    assert isinstance(error, Unavailable)


async def test_an_agent_fails_at_once_if_its_socket_path_is_too_long(
    agents: Agents, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    error = await raised(agents.start("a").join(None, open_store))
    assert isinstance(error, ConfigError)
    assert "TMPDIR" in error.hint


async def test_a_store_out_of_reach_is_given_up_when_its_generation_ends(agents: Agents) -> None:
    a, b = agents.start("a"), agents.start("b")
    await joined(a, b)
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        met = Met(address="127.0.0.1", port=nobody.getsockname()[1], role_rank=0, role_size=1)
        with pytest.raises(ConnectionError, match="not reached within"):
            await a.reach(met, 0.2)
        reaching = asyncio.create_task(a.reach(met, LIMIT_S))
        await b.leave()
        with pytest.raises(ConnectionAbortedError):
            await reaching


@pytest.mark.parametrize("drained", [False, True])
async def test_a_drained_or_preempted_agent_reports_its_workers_as_stopped_and_ends(
    agents: Agents, cluster: LocalCluster, job: str, drained: bool
) -> None:
    limits = {"min_nodes": 1, "max_nodes": 2}
    a, b = agents.start("a", slots=2, **limits), agents.start("b", **limits)
    first = await joined(a, b)
    rank = first[0][0].ranks.start
    request = StopJobRequest(
        job=job,
        action=STOP_ACTION_DRAIN if drained else STOP_ACTION_PREEMPT,
        worker_ids=["a"] if drained else [],
        grace_ms=60_000,
    )
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        await asyncio.to_thread(client.call, request)
    assert await a.comes_true(lambda: a.notice_for_member is not None, LIMIT_S)
    stopped = RankFailure(rank=rank, code=75, reason="exited with 75")
    error = await raised(a.join(stopped, open_store))
    assert isinstance(error, Preempted)
    await a.leave()
    if drained:
        await ended(b)
        ((place, _),) = await joined(b)
        assert place.world.size == 1
    else:
        stopped = RankFailure(rank=first[1][0].ranks.start, code=75, reason="exited with 75")
        assert isinstance(await raised(b.join(stopped, open_store)), Preempted)


def status_once_forming(client: CoordinatorClient) -> Job:
    """Return the job's status once its world is forming, after the last member has left."""
    until = time.monotonic() + LIMIT_S
    while not (status := client.job_status()).world.forming:
        assert time.monotonic() < until, status
        time.sleep(0.05)
    return status


@pytest.mark.parametrize("ends", [75, 1], ids=["with 75", "by a traceback after it has stopped"])
async def test_an_agent_without_restarts_left_ends_as_preempted_not_failed(
    agents: Agents, cluster: LocalCluster, job: str, ends: int
) -> None:
    """torchrun requests no further rendezvous then, because it treats its workers' exit codes as a failure."""
    limits = {"min_nodes": 1, "max_nodes": 2, "max_no_progress_generations": 1}
    a, b = agents.start("a", slots=2, **limits), agents.start("b", **limits)
    first = await joined(a, b)
    with CoordinatorClient.connect(cluster.endpoints, job=job) as client:
        request = StopJobRequest(job=job, action=STOP_ACTION_PREEMPT, grace_ms=60_000)
        await asyncio.to_thread(client.call, request)
        for member, (place, _) in zip((a, b), first, strict=True):
            assert await member.comes_true(partial(has_request, member), LIMIT_S)
            for rank in place.ranks:
                member.note_stopped(rank)
            rank = place.ranks.start
            await member.leave(RankFailure(rank=rank, code=ends, reason=f"exited with {ends}"))
            assert member.stopped, "the agent is to end with 75"
        status = await asyncio.to_thread(status_once_forming, client)
    assert status.phase == JOB_PHASE_RUNNING
    assert "failed" not in status.world.reason


async def test_a_worker_exit_with_75_without_a_stop_request_is_a_failure(agents: Agents) -> None:
    a, _ = agents.start("a"), agents.start("b")
    await joined(a, _)
    await a.leave(RankFailure(rank=0, code=75, reason="exited with 75"))
    assert not a.stopped


async def test_a_signal_to_one_agent_may_preempt_only_its_member(
    agents: Agents, cluster: LocalCluster, job: str
) -> None:
    limits = {"min_nodes": 1, "max_nodes": 2, "preempt": "member", "preempt_grace_s": 40.0}
    a, b = agents.start("a", **limits), agents.start("b", **limits)
    ((place, _), _) = await joined(a, b)
    environment = a.environment()
    assert environment["STRATA_TRAIN_PREEMPT"] == "member", "for a signal that reaches a worker"
    assert environment["STRATA_TRAIN_PREEMPT_GRACE_S"] == "40.0"
    gave_up: list[str] = []
    preempting = asyncio.create_task(a.preempt("SIGTERM", gave_up.append))
    assert await a.comes_true(lambda: a.notice_for_member is not None, LIMIT_S)
    assert b.notice_for_member is None
    stopped = RankFailure(rank=place.ranks.start, code=75, reason="exited with 75")
    assert isinstance(await raised(a.join(stopped, open_store)), Preempted)
    await a.leave()
    await preempting
    await ended(b)
    ((place, _),) = await joined(b)
    assert (place.world.size, gave_up) == (1, [])


async def test_a_closed_rendezvous_makes_every_agent_leave_at_once(agents: Agents) -> None:
    a, b = agents.start("a"), agents.start("b")
    await joined(a, b)
    await a.close()
    for member in (a, b):
        await ended(member)
        assert member.closed
        assert isinstance(await raised(member.join(None, open_store)), Preempted)


async def test_a_second_agent_of_one_name_is_refused_and_the_first_goes_on(agents: Agents) -> None:
    one = {"min_nodes": 1, "max_nodes": 1}
    a = agents.start("a", **one)
    await joined(a)
    error = await raised(agents.start("a", **one).join(None, open_store))
    assert isinstance(error, Refused)
    assert "alive elsewhere" in str(error)
    with contextlib.suppress(TimeoutError):
        assert not await a.ended_within(0.1)
