"""An agent's reports about its member, the same for `strata run` and torchrun."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from socket import gethostname
from typing import Any

import pytest

from strata.agent import agent as core
from strata.agent.agent import Agent, AgentConfig
from strata.config.training import PREEMPT_JOB, PREEMPT_MEMBER
from strata.errors import BarrierBroken, BarrierTimeout
from strata.session.endpoints import parse_endpoints
from strata.v1.barriers_pb2 import BARRIER_RESULT_RELEASED, Arrival, BarrierOutcome
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
    World,
    WorldMember,
)

WORLD = WorldUpdate(
    world=World(generation=3, size=4, members=2),
    place=WorldMember(worker_id="b", slots=2, first_rank=2, incarnation=5),
)


@dataclass(slots=True)
class Upstream:
    """A session that answers immediately with the given outcome, and records its calls."""

    outcome: BarrierOutcome | Exception = field(default_factory=BarrierOutcome)
    exits: list[tuple[int, int, int, str]] = field(default_factory=list)
    requests: list[StopJobRequest] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    deaf: bool = False

    async def arrive(self, arrival: Arrival) -> BarrierOutcome:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome

    async def call(self, request: Any, *, timeout_s: float | None) -> Any:
        self.requests.append(request)
        return StopJobResponse(notice=StopNotice(generation=3, action=request.action))

    async def rank_exit(
        self, *, generation: int, rank: int, code: int, reason: str, early: bool = False
    ) -> None:
        if self.deaf:
            await never()
        self.exits.append((generation, rank, code, reason))

    async def leave(self, reason: str) -> None:
        self.left.append(reason)


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def agent(upstream: Upstream, *, preempt: str = PREEMPT_JOB, address: str = "192.0.2.1") -> Agent:
    config = AgentConfig(
        job="j",
        worker_id="b",
        endpoints=parse_endpoints("192.0.2.9:1"),
        shown_endpoints="https://c:1",
        address=address,
        join_timeout_s=60.0,
        preempt=preempt,
        preempt_grace_s=20.0,
    )
    return Agent(config, upstream, detect_s=5.0)


async def test_members_meet_and_ranks_find_their_place() -> None:
    released = BarrierOutcome(result=BARRIER_RESULT_RELEASED, payloads={0: b"there"})
    it = agent(Upstream(released))
    assert await it.meet(WORLD, b"", superseded=never()) == {0: b"there"}
    place = it.place(WORLD, master_addr="192.0.2.7", master_port=4711)
    assert (place.generation, list(place.ranks), place.member.incarnation) == (3, [2, 3], 5)
    assert (place.endpoints, place.master_addr, place.detect_s) == ("https://c:1", "192.0.2.7", 5.0)
    assert await it.address() == "192.0.2.1"


async def test_a_fallback_host_name_is_not_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's name is only a fallback: other nodes may not resolve it, and the next generation may find a route."""
    found = ["", "192.0.2.5", "192.0.2.6"]

    async def find(_host: str, _port: int) -> str:
        return found.pop(0)

    monkeypatch.setattr(core, "find_route_towards", find)
    it = agent(Upstream(), address="")
    assert await it.address() == gethostname()
    assert await it.address() == "192.0.2.5"
    assert await it.address() == "192.0.2.5", "a route that was found is kept"


async def test_a_member_that_does_not_come_ends_the_world_by_name() -> None:
    upstream = Upstream(BarrierTimeout("rank 0 of a did not come", missing=["a"]))
    it = agent(upstream)
    assert await it.meet(WORLD, b"", superseded=never()) is None
    await it.reports.wait_delivered()
    assert upstream.exits == [(3, 2, 1, "the world was not joined: rank 0 of a did not come")]


async def test_a_world_that_ended_is_reported_as_no_members_failure() -> None:
    upstream = Upstream(BarrierBroken("a died", missing=["a"]))
    it = agent(upstream)
    assert await it.meet(WORLD, b"", superseded=never()) is None
    assert it.reports.all_delivered
    assert not upstream.exits


@pytest.mark.parametrize(
    ("preempt", "action", "leaving"),
    [(PREEMPT_JOB, STOP_ACTION_PREEMPT, []), (PREEMPT_MEMBER, STOP_ACTION_DRAIN, ["b"])],
)
async def test_a_signal_requests_a_stop_of_the_job_or_of_this_member(
    preempt: str, action: int, leaving: list[str]
) -> None:
    upstream = Upstream()
    notice = await agent(upstream, preempt=preempt).request_common_stop(3, "SIGTERM")
    (request,) = upstream.requests
    assert (request.action, list(request.worker_ids), request.grace_ms) == (action, leaving, 20_000)
    assert request.reason == "SIGTERM to b"
    assert notice is not None
    assert notice.action == action


async def test_a_leaving_agent_waits_for_its_exit_reports_or_a_short_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(core, "REPORT_S", 0.01)
    upstream = Upstream(deaf=True)
    it, shorten_deadline = agent(upstream), asyncio.Event()
    it.reports.report(3, 2, 0, "exited with 0")
    leaving = asyncio.create_task(it.leave_once_reported("done", shorten_deadline=shorten_deadline))
    await asyncio.sleep(0.1)
    assert not upstream.left, "no coordinator has heard how rank 2 ended"
    shorten_deadline.set()
    await leaving
    assert upstream.left == ["done"]
