"""For a client that does not read, a replica keeps limited bytes for a limited time; then it closes the connection."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import pytest

from strata.config import CoordinatorConfig, Credentials
from strata.coordinator.calls.pages import ANSWER_BYTES
from strata.core.access.unsent_answers import DebtLimits
from strata.core.ids import AttemptId
from strata.core.kv.records import (
    CheckpointRecord,
    CheckpointState,
    CheckpointType,
    DatasetSpec,
    JobSpec,
    encode,
)
from strata.errors import QuotaExceeded
from strata.v1.admin_pb2 import GetStatusRequest
from strata.v1.admin_pb2_grpc import AdminStub
from strata.v1.checkpoints_pb2 import ListCheckpointsRequest
from strata.v1.datasets_pb2 import ListDatasetsRequest
from strata.v1.members_pb2 import Registration
from strata.v1.peers_pb2 import PeerHello, PeerUp
from strata.v1.session_pb2 import Call, Hello, Leave, Up
from strata.v1.watch_pb2 import WatchRequest
from strata.wire.status import from_rpc
from tests.integration.abuse.attacker import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    WINDOW_UPDATE,
    frame,
    polite,
    request,
    settings,
)
from tests.unit.coordinator.grpc_rig import LIMIT_S, Served, served

LIMITS = DebtLimits(each_bytes=4 * ANSWER_BYTES, all_bytes=6 * ANSWER_BYTES, longest_s=2.0, least_s=0.5)
CONFIG = CoordinatorConfig(listen="127.0.0.1:0")
SESSION = "/strata.v1.Sessions/Session"
LIST = "/strata.v1.Datasets/ListDatasets"


class Unread:
    """A connection that answers pings and keeps the flow-control windows of its streams closed."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._stream = -1
        self.over = asyncio.create_task(polite(reader, writer))

    def call(self, path: str, message: Any, *, more: bool = False) -> int:
        """Make a call and read none of its answer; return its stream."""
        self._stream += 2
        self._writer.write(frame(HEADERS, END_HEADERS, self._stream, request(path.encode())))
        self.send(self._stream, message, flags=0 if more else END_STREAM)
        return self._stream

    def send(self, stream: int, message: Any, *, flags: int = 0) -> None:
        """Send a message on an open stream."""
        body = message.SerializeToString()
        self._writer.write(frame(DATA, flags, stream, b"\0" + struct.pack(">I", len(body)) + body))

    def read(self, *streams: int, size: int = 1 << 24) -> None:
        """Open the windows of these streams by `size` bytes, so that answers can be sent."""
        for stream in (0, *streams):
            self._writer.write(frame(WINDOW_UPDATE, 0, stream, struct.pack(">I", size)))


@asynccontextmanager
async def unread(server: Served) -> AsyncIterator[Unread]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(PREFACE + settings(initial_window_size=0))
    made = Unread(reader, writer)
    try:
        yield made
    finally:
        made.over.cancel()
        await asyncio.gather(made.over, return_exceptions=True)
        writer.transport.abort()


@pytest.fixture
async def server() -> AsyncIterator[Served]:
    async with served(CONFIG, LIMITS) as made:
        job = made.context.keys.job("job")
        made.put(job.spec, encode(JobSpec()))
        for number in range(5):
            made.put(job.dataset_spec(f"d{number}"), encode(DatasetSpec(shards=1, uri="u" * 60_000)))
        for step in range(4):
            record = CheckpointRecord(
                attempt=AttemptId("a"),
                step=step,
                generation=0,
                type=CheckpointType.FULL,
                state=CheckpointState.COMMITTED,
                ranks=1,
                path=f"file:///x/{step}",
                metadata={"note": "n" * 60_000},
            )
            made.put(job.checkpoint(step, 0), encode(record))
        await made.context.mirror.fresh()
        yield made


async def until(what: Any, *, within_s: float = LIMIT_S) -> None:
    async with asyncio.timeout(within_s):
        while not what():  # noqa: ASYNC110  # there is no event for what gRPC has done
            await asyncio.sleep(0.01)


async def answered(server: Served) -> int:
    """Return the number of replicas that GetStatus lists to another client."""
    async with server.channel(Credentials()) as channel:
        stub: Any = AdminStub(channel)
        return len((await stub.GetStatus(GetStatusRequest(), timeout=5.0)).replicas)


def of(server: Served, outcome: str) -> int:
    return server.context.measures.unread.child(outcome).value


async def test_an_answer_is_owed_until_its_last_byte_was_sent(server: Served) -> None:
    async with unread(server) as slow:
        stream = slow.call(LIST, ListDatasetsRequest(job="job"))
        await until(lambda: server.debts.total_bytes > 240_000)
        await asyncio.sleep(0.3)
        assert server.debts.total_bytes > 240_000, "it was given to gRPC, which has sent nothing of it"
        slow.read(stream)
        await until(lambda: server.debts.total_bytes == 0, within_s=1.0)
        assert not slow.over.done()


async def test_only_a_client_with_too_many_unread_bytes_is_refused_and_disconnected(server: Served) -> None:
    async with unread(server) as slow:
        for _ in range(40):
            slow.call(LIST, ListDatasetsRequest(job="job"))
        await until(lambda: of(server, "refused") > 30)
        assert LIMITS.each_bytes <= server.debts.total_bytes < LIMITS.each_bytes + ANSWER_BYTES
        assert await answered(server) == 1
        assert not slow.over.done()
        async with asyncio.timeout(LIMITS.longest_s + 5):
            await asyncio.wait([slow.over])
        assert isinstance(slow.over.exception(), asyncio.IncompleteReadError | ConnectionError)
        await until(lambda: server.debts.total_bytes == 0)
        assert of(server, "closed") == 1
        assert await answered(server) == 1


async def test_above_the_total_limit_the_oldest_unread_connections_close_first(server: Served) -> None:
    async with unread(server) as one, unread(server) as two, unread(server) as three:
        for slow in (one, two, three):
            for _ in range(4):
                slow.call(LIST, ListDatasetsRequest(job="job"))
            await until(lambda: not server.debts.total_bytes % 4)
            await asyncio.sleep(0.05)
        await until(lambda: server.debts.total_bytes <= LIMITS.all_bytes, within_s=LIMITS.longest_s - 0.3)
        assert one.over.done()
        assert not three.over.done()


async def test_the_connection_of_an_unread_watch_is_closed_after_the_limit(server: Served) -> None:
    async with unread(server) as slow:
        for _ in range(3):
            slow.call("/strata.v1.Watch/Watch", WatchRequest(job="job"))
        await until(lambda: server.debts.total_bytes > 3 * 200_000)
        async with asyncio.timeout(LIMITS.longest_s + 5):
            await asyncio.wait([slow.over])
        await until(lambda: server.debts.total_bytes == 0)


def hello(worker: str) -> Up:
    return Up(hello=Hello(member=Registration(job="job", worker_id=worker, boot="b", slots=1)))


def requested(number: int) -> Up:
    return Up(call=Call(id=number, list_checkpoints=ListCheckpointsRequest(job="job")))


async def welcomed(server: Served, *workers: str) -> None:
    job = server.context.keys.job("job")
    for worker in workers:
        await until(lambda worker=worker: server.context.mirror.view.get(job.worker(worker)))


async def test_unread_replies_on_sessions_are_limited_like_unread_answers(server: Served) -> None:
    """Many sessions with many calls each (e5 of issue 21): without a limit they used 64 MiB a session forever."""
    workers = ("w0", "w1", "w2")
    async with unread(server) as slow:
        streams = [slow.call(SESSION, hello(worker), more=True) for worker in workers]
        await welcomed(server, *workers)
        most = 0
        for number in range(1, 61):
            for stream in streams:
                slow.send(stream, requested(number))
            await asyncio.sleep(0.005)
            most = max(most, server.debts.total_bytes)
        await until(lambda: of(server, "refused") > 100)
        assert LIMITS.each_bytes <= most
        assert server.debts.total_bytes < LIMITS.each_bytes + 2 * ANSWER_BYTES, "refusals are small"
        async with asyncio.timeout(LIMITS.longest_s + 5):
            await asyncio.wait([slow.over])
        await until(lambda: server.debts.total_bytes == 0)
        assert of(server, "closed") == 1


async def test_a_member_that_reads_slowly_is_not_cut_off(server: Served) -> None:
    async with unread(server) as slow:
        stream = slow.call(SESSION, hello("w0"), more=True)
        await welcomed(server, "w0")
        for number in range(1, 4):
            slow.send(stream, requested(number))
            for _ in range(10):  # each answer is read within half of the longest allowed time
                slow.read(stream, size=32 << 10)
                await asyncio.sleep(LIMITS.longest_s / 20)
        assert not slow.over.done()
        assert of(server, "refused") == of(server, "closed") == 0
        slow.read(stream)
        await until(lambda: server.debts.total_bytes == 0)


async def test_a_link_between_replicas_that_is_not_read_ends(server: Served) -> None:
    async with unread(server) as slow:
        slow.call(
            "/strata.v1.Peers/Link",
            PeerUp(hello=PeerHello(replica="r1", instance="instance-r1-1")),
            more=True,
        )
        async with asyncio.timeout(LIMITS.longest_s + 5):
            await asyncio.wait([slow.over])
        await until(lambda: server.debts.total_bytes == 0)


async def test_a_session_whose_client_leaves_without_reading_is_closed(server: Served) -> None:
    """The session's final status queues behind a Welcome that fits no window.

    Without a close, all of the session's memory would stay in use.
    """
    async with unread(server) as slow:
        stream = slow.call(SESSION, hello("w0"), more=True)
        await welcomed(server, "w0")
        slow.send(stream, Up(leave=Leave()))
        async with asyncio.timeout(LIMITS.longest_s + 5):
            await asyncio.wait([slow.over])
        await until(lambda: of(server, "closed") == 1)


async def test_a_refusal_arrives_as_quota_exceeded_with_a_hint() -> None:
    async with served(CONFIG, DebtLimits(each_bytes=0)) as server, server.channel(Credentials()) as channel:
        stub: Any = AdminStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GetStatus(GetStatusRequest(), timeout=5.0)
        error = from_rpc(raised.value, server.address)
        assert isinstance(error, QuotaExceeded)
        assert "read the answers" in error.hint
