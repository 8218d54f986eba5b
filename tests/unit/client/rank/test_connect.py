from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any, cast

import pytest

import strata
import strata.agent.standalone
from strata import errors
from strata.agent.rank_process import RankProcess
from strata.agent.standalone import StandaloneAgent
from strata.client.event_loop import BackgroundLoop
from strata.client.member_session import MemberSession
from strata.client.rank import connect as joining
from strata.client.rank import standalone
from strata.client.rank.rank_client import RankClient
from strata.config import Credentials
from strata.session.endpoints import Endpoint, parse_endpoints
from strata.session.link import Link
from strata.session.terms import EXIT_REPORT_S, Dial
from strata.testing.links import Switchboard, pair
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import AgentStart, Down, Up
from tests.unit.client.fake_rank import NoThread
from tests.unit.client.fake_replica import FakeReplica, done
from tests.unit.coordinator.rig import in_rig


@asynccontextmanager
async def coordinator(*, up: bool = True) -> AsyncIterator[FakeReplica]:
    """Let every join reach one replica, which serves as "a:1" and "b:1"."""
    board = Switchboard(delay_s=0.0005)
    made = FakeReplica(board, "a:1")
    made.answer = lambda up: made.links[-1].close() if up.WhichOneof("message") == "leave" else done(up)
    if not up:
        made.down()

    agents: list[asyncio.Task[None]] = []

    def own_agent(start: AgentStart) -> Dial:
        @asynccontextmanager
        async def dial(_: Endpoint) -> AsyncIterator[Link[Down, Up]]:
            ours, theirs = pair()
            with RankProcess(os.getpid()) as process:
                agent = StandaloneAgent(start, process)
                agents.append(asyncio.create_task(agent.run(cast("Link[Up, Down]", theirs), asyncio.Event())))
                try:
                    yield cast("Link[Down, Up]", ours)
                finally:
                    ours.close()
                    await asyncio.wait(agents)

        return dial

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standalone, "own_agent", own_agent)
        patch.setattr(
            strata.agent.standalone,
            "MemberSession",
            functools.partial(MemberSession, dial=lambda _: board.dial("client", "a:1")),
        )
        yield made
    joining._shared.clear()


async def connect(
    endpoints: str = "a:1,b:1", worker: str = "w", *, timeout_s: float | None = 30.0
) -> RankClient:
    registration = Registration(job="j", worker_id=worker, boot="boot", slots=1)
    background = cast("BackgroundLoop", NoThread())
    addresses = parse_endpoints(endpoints)
    start = standalone.start_of([endpoints], 5.0, Credentials(insecure=True))
    join = functools.partial(standalone.join, background, start, registration)
    return await joining._share(background, (frozenset(addresses), worker), join, timeout_s)


async def joined(met: FakeReplica, number: int = 1, **more: Any) -> RankClient:
    """Join as the `number`-th session of this replica."""
    join = asyncio.create_task(connect(**more))
    await greeted(met, number)
    await asyncio.sleep(0.1)
    met.world(1)
    return await join


async def greeted(met: FakeReplica, times: int) -> None:
    await met.until(lambda: len(met.hellos) == times)


@in_rig(coordinator)
async def test_a_standalone_trainer_that_connects_again_shares_its_session(met: FakeReplica) -> None:
    joins = [asyncio.create_task(connect()), asyncio.create_task(connect("b:1,a:1"))]
    await greeted(met, 1)
    await asyncio.sleep(0.1)
    met.world(1)
    first, second = [await join for join in joins]
    assert len(met.hellos) == 1
    assert (await connect())._shared_session is first._shared_session is second._shared_session
    assert first._shared_session.users == 3


@in_rig(coordinator)
async def test_another_worker_or_other_endpoints_are_another_session(met: FakeReplica) -> None:
    for number, (endpoints, worker) in enumerate([("a:1", "w"), ("a:1", "v"), ("a:1,b:1", "w")]):
        await joined(met, number + 1, endpoints=endpoints, worker=worker)
    assert len(met.hellos) == 3


@in_rig(coordinator)
async def test_connecting_after_the_last_client_closed_joins_again(met: FakeReplica) -> None:
    for number in (1, 2):
        client = await joined(met, number)
        again = await connect()
        await client._close(0, "done")
        assert len(met.all("leave")) == number - 1
        await again._close(0, "done")
        assert len(met.all("leave")) == number


@in_rig(coordinator)
async def test_a_standalone_trainer_restarts_its_round_count_in_a_restored_cluster(met: FakeReplica) -> None:
    async def round_of(client: RankClient, number: int) -> int:
        meeting = asyncio.create_task(client._barrier("b", b"", (), None))
        arrival = (await met.next("arrivals", after=number)).arrivals[0]
        met.release(arrival)
        await meeting
        return int(arrival.round)

    client = await joined(met)
    assert [await round_of(client, number) for number in range(2)] == [1, 2]
    met.uid = f"{met.uid}.1.77aa"
    met.down()
    met.up()
    await greeted(met, 2)
    await asyncio.sleep(0.1)
    again = await joined(met, 3)
    assert (again.generation, again.rank) == (client.generation, client.rank), "the same place"
    assert await round_of(again, 2) == 1


@pytest.mark.parametrize("code", [0, 75])
@in_rig(coordinator)
async def test_an_exit_during_an_outage_is_reported_once_coordinators_return(
    met: FakeReplica, code: int
) -> None:
    """Without the report, the job would wait forever for members that count as dead, although the training is done."""
    client = await joined(met)
    met.down()
    closing = asyncio.create_task(client._close(code, "the training is done"))
    await asyncio.sleep(45.0)
    met.up()
    await closing
    assert [(exit_.generation, exit_.code) for exit_ in met.all("rank_exit")] == [(1, code)]
    assert len(met.all("leave")) == 1
    kinds = [up.WhichOneof("message") for up in met.received]
    assert kinds.index("rank_exit") < kinds.index("leave")


@in_rig(coordinator)
async def test_an_exit_that_cannot_be_reported_does_not_block_for_ever(met: FakeReplica) -> None:
    client = await joined(met)
    met.down()
    began = asyncio.get_running_loop().time()
    await client._close(0, "the training is done")
    assert EXIT_REPORT_S <= asyncio.get_running_loop().time() - began < EXIT_REPORT_S + 10.0


@in_rig(coordinator)
async def test_a_wait_for_another_threads_join_keeps_its_own_timeout(met: FakeReplica) -> None:
    join = asyncio.create_task(connect())
    await greeted(met, 1)
    with pytest.raises(errors.Unavailable, match="within 2 s"):
        await connect(timeout_s=2.0)
    met.world(1)
    assert (await join)._shared_session.users == 1


@in_rig(coordinator)
async def test_a_client_that_times_out_during_its_registration_leaves(met: FakeReplica) -> None:
    met.welcoming = False
    join = asyncio.create_task(connect(timeout_s=2.0))
    await asyncio.sleep(3.0)
    met.welcome(met.links[-1])
    with pytest.raises(errors.Unavailable, match="could not reach any coordinator within 2 s"):
        await join
    await met.next("leave")  # the agent leaves, because a member without a process must not stay


@in_rig(coordinator)
async def test_without_a_limit_a_world_is_waited_for_as_long_as_it_takes(
    met: FakeReplica, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no limit once the rank is a member.

    Before that, endpoints that do not answer cause an error within minutes.
    """
    caplog.set_level(logging.WARNING, logger="strata.client")
    join = asyncio.create_task(connect(timeout_s=None))
    await greeted(met, 1)
    await asyncio.sleep(1000)
    assert not join.done()
    assert "waiting for a world with a place for w" in caplog.text
    met.world(1)
    client = await join
    assert client.generation == 1
    rejoin = asyncio.create_task(client._rejoin(None))
    await asyncio.sleep(1000)
    assert not rejoin.done()
    met.world(2)
    await rejoin
    assert client.generation == 2


@in_rig(coordinator, up=False)
async def test_without_a_limit_a_coordinator_must_still_answer_within_300_s(met: FakeReplica) -> None:
    with pytest.raises(errors.Unavailable, match="could not reach any coordinator within 300 s"):
        await connect(timeout_s=None)


def test_endpoints_and_job_come_from_the_file_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("STRATA_SOCKET", "STRATA_ENDPOINTS", "STRATA_JOB"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.ConfigError, match="and knows no coordinator") as raised:
        strata.connect(timeout_s=0.2)
    assert "strata.toml" in raised.value.hint

    with closing(socket.socket()) as silent:
        silent.bind(("127.0.0.1", 0))  # and no process listens there
        where = f"127.0.0.1:{silent.getsockname()[1]}"
        Path("strata.toml").write_text(f'endpoints = ["{where}"]\njob = "no name"\n')
        with pytest.raises(errors.InvalidArgument, match="no name"):
            strata.connect(timeout_s=0.2)
        with pytest.raises(errors.Unavailable):
            strata.connect(job="j", timeout_s=0.2)
