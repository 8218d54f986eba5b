"""Sessions over real gRPC with real processes: crash, freeze, outage, and the list of services of a server."""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from strata.devcluster.etcd_cluster import EtcdCluster
from strata.errors import Conflict, InvalidArgument, NotFound, StaleIncarnation, Unavailable
from strata.processes.children import Child
from strata.v1 import members_pb2, session_pb2, worlds_pb2
from strata.v1.members_pb2_grpc import MembersStub
from strata.v1.session_pb2 import Leave, Up
from strata.v1.worlds_pb2_grpc import WorldsStub
from strata.wire.status import translated
from tests.integration.replicas import LIMIT_S, OPTIONS, ROOT, Replicas

PROGRAM = Path(__file__).resolve().parents[1] / "member_program.py"
DETECT_S = 2.0


@pytest.fixture(scope="module")
def processes(etcd: EtcdCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    """Three replicas for this file; a test that kills a replica starts it again."""
    with closing(Replicas(etcd, "sessions", tmp_path_factory.mktemp("logs"), detect_s=DETECT_S)) as made:
        yield made


@pytest.fixture
async def replicas(processes: Replicas, request: pytest.FixtureRequest) -> AsyncIterator[Replicas]:
    processes.job = re.sub("[^a-z0-9]+", "-", request.node.name)[:60].strip("-")
    async with processes as made:
        yield made


async def members(replicas: Replicas, name: str) -> dict[str, int]:
    """Return the incarnation of every member in one replica's view."""
    async with grpc.aio.insecure_channel(replicas[name].address, options=OPTIONS) as channel:
        stub: Any = MembersStub(channel)
        with translated(name):
            answer = await stub.ListMembers(members_pb2.ListMembersRequest(job=replicas.job), timeout=5.0)
        return {m.worker_id: m.incarnation for m in answer.members}


async def wait_exit(replicas: Replicas, worker: str) -> float:
    """Return the time at which a replica that did not serve the member no longer sees it."""
    async with asyncio.timeout(LIMIT_S):
        while worker in await members(replicas, "r2"):  # noqa: ASYNC110  # polls another process
            await asyncio.sleep(0.02)
    return time.monotonic()


def start_member(replicas: Replicas, worker: str) -> Child:
    """Start a member's process at the first replica; return once it is registered."""
    read, write = os.pipe()
    child = Child.start(
        [sys.executable, PROGRAM, replicas["r1"].address, replicas.job, worker],
        stdout=write,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.readline().startswith("incarnation")
    return child


@pytest.mark.journey
async def test_a_killed_process_is_found_after_the_grace(replicas: Replicas) -> None:
    child = await asyncio.to_thread(start_member, replicas, "w")
    child.kill()
    killed_at = time.monotonic()
    assert 0.3 < await wait_exit(replicas, "w") - killed_at < 1.5, "a grace of 0.4 s"


async def test_a_frozen_process_is_found_in_time(replicas: Replicas) -> None:
    child = await asyncio.to_thread(start_member, replicas, "w")
    try:
        child.pause()
        frozen_at = time.monotonic()
        assert await wait_exit(replicas, "w") - frozen_at < DETECT_S + 1.0
    finally:
        child.kill()


@pytest.mark.slow
async def test_members_survive_the_kill_and_restart_of_all_replicas(replicas: Replicas) -> None:
    three = await replicas.world("r1", "r2", "r3")
    before = {m.worker: m.incarnation for m in three}
    for name in replicas.names:
        replicas[name].kill()
    for member in three:
        await member.over.wait()
        assert isinstance(member.error, Unavailable)
    await asyncio.sleep(2 * DETECT_S)  # the outage itself
    for name in replicas.names:
        replicas[name].start()
    await replicas.ready()
    for member, name in zip(three, ("r2", "r3", "r1"), strict=True):
        await member.connect(name)
    await asyncio.sleep(7.0)  # longer than the leader waits before it removes orphans
    assert await members(replicas, "r1") == before
    assert [m.over.is_set() for m in three] == [False] * 3
    assert (await three[0].world()).world.generation == 1


async def test_refusals_over_the_wire_are_our_errors(replicas: Replicas) -> None:
    replicas.members = 1
    first = await replicas.member("w").connect("r1")
    newcomer = replicas.member("w", boot="another")
    newcomer.dial("r2")
    await newcomer.over.wait()
    assert isinstance(newcomer.error, Conflict)
    assert newcomer.error.hint
    stale = replicas.member("w", boot="third")
    stale.dial("r3", incarnation=1)
    await stale.over.wait()
    assert isinstance(stale.error, StaleIncarnation)
    wrong = replicas.member("no spaces")
    wrong.dial("r1")
    await wrong.over.wait()
    assert isinstance(wrong.error, InvalidArgument)
    async with replicas._dial("x", "r1") as link:
        link.send(Up(tick=session_pb2.Tick()))
        with pytest.raises(InvalidArgument, match="Hello"):
            await link.recv()
    assert (await first.call(get_world={"job": "other"})).error.code == "REFUSED"
    first.send(leave=Leave(reason="test"))
    await first.over.wait()
    assert first.error is None
    assert await members(replicas, "r1") == {}


async def test_unary_errors_carry_code_and_hint(replicas: Replicas) -> None:
    async with grpc.aio.insecure_channel(replicas["r1"].address) as channel:
        stub: Any = WorldsStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raw:
            await stub.GetWorld(worlds_pb2.GetWorldRequest(job="nobody"))
        assert raw.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(NotFound, match="nobody") as found, translated("r1"):
            await stub.GetWorld(worlds_pb2.GetWorldRequest(job="nobody"))
        assert found.value.hint
        with pytest.raises(InvalidArgument), translated("r1"):
            await stub.GetWorld(worlds_pb2.GetWorldRequest(job="a/b"))


async def test_a_message_above_4_mib_is_refused_and_the_server_lives(replicas: Replicas) -> None:
    async with grpc.aio.insecure_channel(replicas["r1"].address) as channel:
        stub: Any = WorldsStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raw:
            await stub.GetWorld(worlds_pb2.GetWorldRequest(job="x" * (5 << 20)))
        assert raw.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await replicas["r1"].status() is not None


async def test_health_and_reflection_are_on(replicas: Replicas) -> None:
    async with grpc.aio.insecure_channel(replicas["r1"].address) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        for service in ("", "strata.v1.Sessions"):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[arg-type]  # serves aio too
        call = reflection.ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {s.name for s in (await call.read()).list_services_response.service}
        call.cancel()
        folder = ROOT / "proto" / "strata" / "v1"
        services = {
            f"strata.v1.{name}"
            for path in folder.glob("*.proto")
            for name in re.findall(r"^service (\w+)", path.read_text(), re.MULTILINE)
        }
        assert services <= names, "a service that no replica serves"


async def test_a_port_that_is_taken_is_a_clear_error(etcd: EtcdCluster, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "strata", "coordinator", f"--etcd={etcd.endpoints[0]}"]
        command += [f"--listen=127.0.0.1:{port}", "--http=127.0.0.1:0", "--cluster=taken"]
        child = Child.start(command, log=tmp_path / "log")
        assert await child.join_async(LIMIT_S) == 2
    output = child.tail()
    assert f"127.0.0.1:{port}" in output
    assert "Address already in use" in output
    assert "Traceback" not in output
