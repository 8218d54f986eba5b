"""gRPC streams as links, over a real connection on this machine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, ClassVar

import grpc
import grpc.aio
import pytest

from strata.errors import Conflict, StrataError, Unavailable
from strata.v1.session_pb2 import ArrivalRefused, Down, Tick, Up
from strata.v1.session_pb2_grpc import SessionsServicer, SessionsStub, add_SessionsServicer_to_server
from strata.wire import streams
from strata.wire.streams import ClientStream, ServerStream, dialled, serve_stream

Logic = Callable[[ServerStream[Up, Down]], Awaitable[None]]


class Servicer(SessionsServicer):
    """Runs a test's logic on every stream, and puts the end of each into `ended`."""

    def __init__(self, logic: Logic, tasks: asyncio.TaskGroup) -> None:
        self.logic = logic
        self.tasks = tasks
        self.ended: asyncio.Queue[str] = asyncio.Queue()

    async def Session(  # type: ignore[override]  # noqa: N802  # it reads and writes through its context
        self, request_iterator: Any, context: Any
    ) -> None:
        async def serve(link: ServerStream[Up, Down]) -> None:
            try:
                await self.logic(link)
                self.ended.put_nowait("ended")
            except asyncio.CancelledError:
                self.ended.put_nowait("cancelled")
                raise

        await serve_stream(context, serve, self.tasks.create_task)


@asynccontextmanager
async def served(logic: Logic) -> AsyncIterator[tuple[Servicer, str, grpc.aio.Server]]:
    async with asyncio.TaskGroup() as tasks:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        servicer = Servicer(logic, tasks)
        add_SessionsServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield servicer, f"127.0.0.1:{port}", server
        finally:
            await server.stop(0)


@asynccontextmanager
async def client(address: str) -> AsyncIterator[ClientStream[Down, Up]]:
    async with grpc.aio.insecure_channel(address) as channel:
        call: Any = SessionsStub(channel).Session()
        async with dialled(call, address) as link:
            yield link


def tick(sequence: int) -> Tick:
    return Tick(sequence=sequence)


async def echo(link: ServerStream[Up, Down]) -> None:
    while (up := await link.recv()) is not None:
        link.send(Down(tick=up.tick))


async def test_messages_keep_their_order_both_ways() -> None:
    async with served(echo) as (servicer, address, _), client(address) as link:
        for number in range(500):
            link.send(Up(tick=tick(number)))
        got: list[int] = []
        while len(got) < 500:
            down = await link.recv()
            assert down is not None
            got.append(down.tick.sequence)
        assert got == list(range(500))
        link.close()
        assert await servicer.ended.get() == "ended"
        assert await link.recv() is None


async def test_messages_sent_before_the_close_arrive_and_then_the_error() -> None:
    async def says_no(link: ServerStream[Up, Down]) -> None:
        await link.recv()
        for number in range(3):
            link.send(Down(tick=tick(number)))
        link.close(Conflict("no", hint="because"))
        link.send(Down(tick=tick(99)))

    async with served(says_no) as (_, address, _server), client(address) as link:
        link.send(Up(tick=tick(0)))
        got = [await link.recv() for _ in range(3)]
        assert [down.tick.sequence for down in got if down is not None] == [0, 1, 2]
        with pytest.raises(Conflict, match="no") as refused:
            await link.recv()
        assert refused.value.hint == "because"


async def test_a_return_of_the_logic_is_a_clean_end() -> None:
    async def returns(link: ServerStream[Up, Down]) -> None:
        link.send(Down(tick=tick(1)))

    async with served(returns) as (_, address, _server), client(address) as link:
        assert (await link.recv()) is not None
        assert await link.recv() is None


@pytest.mark.parametrize(
    "failure", [grpc.aio.UsageError("RPC already finished."), asyncio.InvalidStateError()]
)
async def test_a_write_that_fails_at_a_clean_end_does_not_break_the_link(failure: Exception) -> None:
    """This side sends a tick just as the other side ends the stream, as after a request to leave."""
    over = asyncio.Event()

    class Call:
        async def read(self) -> Any:
            await over.wait()
            return grpc.aio.EOF

        async def write(self, request: Any) -> None:
            over.set()
            raise failure

        async def done_writing(self) -> None:
            pass

        async def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.OK

        def cancel(self) -> bool:
            return False

    async with dialled(Call(), "there") as link:
        link.send(Up(tick=tick(1)))
        assert await link.recv() is None
        assert link.broke


async def test_a_bug_ends_its_stream_and_no_other() -> None:
    async def breaks(link: ServerStream[Up, Down]) -> None:
        if (await link.recv()) == Up(tick=tick(13)):
            raise RuntimeError("a bug")
        await echo(link)

    async with served(breaks) as (_, address, _server), client(address) as good, client(address) as bad:
        good.send(Up(tick=tick(1)))
        bad.send(Up(tick=tick(13)))
        with pytest.raises(StrataError, match="internal error"):
            await bad.recv()
        good.send(Up(tick=tick(2)))
        down = await good.recv()
        assert down is not None
        assert down.tick.sequence == 2


async def test_a_message_that_cannot_be_written_ends_its_stream_and_no_other() -> None:
    async def says_nonsense(link: ServerStream[Up, Down]) -> None:
        if (await link.recv()) == Up(tick=tick(13)):
            link.send("nonsense")  # type: ignore[arg-type]  # on purpose
        await echo(link)

    async with (
        served(says_nonsense) as (_, address, _server),
        client(address) as good,
        client(address) as bad,
    ):
        good.send(Up(tick=tick(1)))
        bad.send(Up(tick=tick(13)))
        with pytest.raises(StrataError, match="internal error"):
            await bad.recv()
        good.send(Up(tick=tick(2)))
        down = await good.recv()
        assert down is not None
        assert down.tick.sequence == 2


async def test_a_vanished_client_ends_recv_and_cancels_nothing() -> None:
    async with served(echo) as (servicer, address, _), grpc.aio.insecure_channel(address) as channel:
        call: Any = SessionsStub(channel).Session()
        await call.write(Up(tick=tick(1)))
        await call.read()
        call.cancel()
        assert await servicer.ended.get() == "ended"


async def test_a_vanished_server_is_unavailable() -> None:
    async with served(echo) as (_, address, server), client(address) as link:
        link.send(Up(tick=tick(1)))
        await link.recv()
        await server.stop(0)
        with pytest.raises(Unavailable):
            await link.recv()
        link.send(Up(tick=tick(2)))
        assert link.backlog <= 1


async def test_a_closed_port_is_unavailable() -> None:
    async with client("127.0.0.1:9") as link:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
            await link.recv()


async def test_a_close_from_another_task_ends_a_pending_recv() -> None:
    reading: asyncio.Future[ServerStream[Up, Down]] = asyncio.get_running_loop().create_future()

    async def waits(link: ServerStream[Up, Down]) -> None:
        await link.recv()
        reading.set_result(link)
        assert await link.recv() is None

    async with served(waits) as (servicer, address, _), client(address) as link:
        link.send(Up(tick=tick(1)))
        (await reading).close(Conflict("enough"))
        with pytest.raises(Conflict):
            await link.recv()
        assert await servicer.ended.get() == "ended"


async def test_a_cancelled_reader_is_cancelled() -> None:
    async with served(echo) as (_, address, _server), client(address) as link:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await link.recv()


async def test_a_slow_reader_loses_the_stream_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "FLUSH_S", 0.2)
    large = Down(arrival_refused=ArrivalRefused(name="x" * 60_000))

    async def floods(link: ServerStream[Up, Down]) -> None:
        await link.recv()
        while not link.closed:
            link.send(large)
            await asyncio.sleep(0)
        assert link.backlog <= streams.OUTBOX_LIMIT

    async with served(floods) as (servicer, address, _), client(address) as link:
        link.send(Up(tick=tick(1)))
        assert await servicer.ended.get() == "ended"
        with pytest.raises(Unavailable, match="too slowly"):
            await drain(link)


async def test_a_sent_message_is_accounted_until_it_is_written_or_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams, "FLUSH_S", 0.1)
    window = asyncio.Event()

    class Context:
        async def read(self) -> Any:
            await asyncio.get_running_loop().create_future()

        async def write(self, message: Any) -> None:
            await window.wait()

    class Account:
        owed: ClassVar[list[int]] = []

        def check(self) -> None:
            pass

        def owe(self, size_bytes: int) -> Callable[[], None]:
            self.owed.append(size_bytes)
            return lambda: self.owed.remove(size_bytes)

    link: ServerStream[Up, Down] = ServerStream(Context(), Account())  # type: ignore[arg-type]  # no abort is needed
    for number in range(1, 5):
        link.send(Down(arrival_refused=ArrivalRefused(name="x" * 1000 * number)))
    assert [size // 1000 for size in Account.owed] == [2, 3, 4, 5], "1 KiB more each"
    writer = asyncio.create_task(link.pump())
    await asyncio.sleep(0)
    assert len(Account.owed) == 4, "also the one whose write waits for a window"
    link.close()
    link.drop()
    assert [size // 1000 for size in Account.owed] == [2]
    window.set()
    await writer
    assert Account.owed == []


async def test_the_backlog_of_a_reader_is_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "FLUSH_S", 0.2)
    large = Down(arrival_refused=ArrivalRefused(name="x" * 1_000_000))
    owed: list[int] = []

    async def floods(link: ServerStream[Up, Down]) -> None:
        await link.recv()
        while not link.closed:
            link.send(large)
            owed.append(link.backlog)
            await asyncio.sleep(0)

    async with served(floods) as (servicer, address, _), client(address) as link:
        link.send(Up(tick=tick(1)))
        assert await servicer.ended.get() == "ended"
        assert max(owed) <= streams.SERVED_BYTES // 1_000_000 < streams.OUTBOX_LIMIT


async def drain(link: ClientStream[Down, Up]) -> None:
    while await link.recv() is not None:
        pass
