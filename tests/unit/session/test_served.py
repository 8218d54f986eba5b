"""The served side of one session, from its Hello to its end, over a link in memory."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from strata.errors import Conflict, InvalidArgument, QuotaExceeded, StrataError, Unavailable
from strata.session.served import End, Limits, Session, serve
from strata.testing.links import MemoryLink, pair
from strata.testing.virtual_time import in_virtual_time
from strata.v1 import barriers_pb2, checkpoints_pb2, session_pb2, worlds_pb2
from strata.v1.session_pb2 import Down, Up
from strata.wire.errors import unpack


def up(**message: Any) -> Up:
    """Return an `Up` whose nested messages are dicts; protobuf accepts those, its type stubs do not."""
    return Up(**message)


class Recorder:
    """A handler that records its messages, and answers calls once the test sets `gate`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        self.gate = asyncio.Event()
        self.gate.set()
        self.session: Session | None = None
        self.refusal: Exception | None = None

    async def accept(self, hello: session_pb2.Hello, session: Session) -> Recorder:
        if self.refusal is not None:
            raise self.refusal
        self.session = session
        session.send(Down(welcome=session_pb2.Welcome(replica=hello.member.worker_id)))
        return self

    def arrivals(self, arrivals: Sequence[barriers_pb2.Arrival]) -> None:
        self.seen += [f"arrival {a.name}" for a in arrivals]

    def progress(self, progress: session_pb2.Progress) -> None:
        self.seen.append(f"progress {progress.generation}")

    async def rank_exit(self, rank_exit: session_pb2.RankExit) -> session_pb2.Reply:
        await self.gate.wait()
        self.seen.append(f"exit {rank_exit.rank}")
        return session_pb2.Reply(done=session_pb2.Done())

    async def call(self, call: session_pb2.Call) -> session_pb2.Reply:
        match call.WhichOneof("request"):
            case "get_world":
                await self.gate.wait()
                return session_pb2.Reply(get_world=worlds_pb2.GetWorldResponse())
            case "get_checkpoint":
                large = checkpoints_pb2.Checkpoint(reason="x" * (4 << 20))
                return session_pb2.Reply(
                    get_checkpoint=checkpoints_pb2.GetCheckpointResponse(checkpoint=large)
                )
            case "get_recovery":
                raise Conflict("no")
            case _:
                raise RuntimeError("a bug")

    async def leave(self, leave: session_pb2.Leave) -> None:
        if leave.reason == "impossible":
            raise Unavailable("etcd is away")
        self.seen.append(f"leave {leave.reason}")

    def tick(self, sequence: int) -> session_pb2.Tick:
        return session_pb2.Tick(sequence=sequence, ready=True)

    def ended(self, end: End) -> None:
        self.end.set_result(end)


HELLO = up(hello={"member": {"worker_id": "w1"}})


@asynccontextmanager
async def served(
    handler: Recorder, *, limits: Limits | None = None, outbox_limit: int = 4096
) -> AsyncIterator[MemoryLink]:
    client, server = pair(outbox_limit=outbox_limit)
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(serve(server, handler.accept, limits=limits))
        try:
            yield client
        finally:
            client.close()
            await task


async def drain(link: MemoryLink) -> None:
    while await link.recv() is not None:
        pass


@in_virtual_time()
async def test_a_session_begins_with_hello_and_welcome() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        assert (await link.recv()).welcome.replica == "w1"
    assert await handler.end is End.BROKEN


@pytest.mark.parametrize("first", [up(tick={"sequence": 1}), up()], ids=["a tick", "nothing known"])
@in_virtual_time()
async def test_without_a_hello_there_is_no_session(first: Up) -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(first)
        with pytest.raises(InvalidArgument):
            await link.recv()
    assert not handler.end.done()


@in_virtual_time()
async def test_a_hello_that_does_not_come_ends_the_stream() -> None:
    async with served(Recorder()) as link:
        with pytest.raises(Unavailable, match="Hello"):
            await link.recv()


@pytest.mark.parametrize(
    ("refusal", "seen"),
    [(Conflict("alive elsewhere"), Conflict), (RuntimeError("a bug"), StrataError)],
)
@in_virtual_time()
async def test_a_refused_hello_ends_the_stream_with_the_reason(
    refusal: Exception, seen: type[StrataError]
) -> None:
    handler = Recorder()
    handler.refusal = refusal
    async with served(handler) as link:
        link.send(HELLO)
        with pytest.raises(seen):
            await link.recv()


@in_virtual_time()
async def test_a_hello_whose_sender_closed_is_cancelled() -> None:
    handler, given_up = Recorder(), asyncio.Event()

    async def accept(hello: session_pb2.Hello, session: Session) -> Recorder:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            given_up.set()
            raise
        return await handler.accept(hello, session)

    client, server = pair()
    serving = asyncio.create_task(serve(server, accept))
    client.send(HELLO)
    client.send(up(tick={"sequence": 0}))
    await asyncio.sleep(1)
    client.close()
    await asyncio.sleep(0.1)
    assert given_up.is_set()
    assert serving.done()
    assert handler.session is None


@in_virtual_time()
async def test_a_hello_whose_acceptance_was_cancelled_is_refused() -> None:
    async def accept(hello: session_pb2.Hello, session: Session) -> Recorder:
        raise asyncio.CancelledError

    client, server = pair()
    serving = asyncio.create_task(serve(server, accept))
    client.send(HELLO)
    with pytest.raises(Unavailable):
        await client.recv()
    await serving


@in_virtual_time()
async def test_little_is_read_before_the_welcome() -> None:
    async def accept(hello: session_pb2.Hello, session: Session) -> Recorder:
        await asyncio.sleep(5)
        raise Conflict("alive elsewhere")

    client, server = pair()
    serving = asyncio.create_task(serve(server, accept, limits=Limits(early_bytes=3000)))
    client.send(HELLO)
    for _ in range(10):
        client.send(up(arrivals={"arrivals": [{"name": "x" * 1000}]}))
    await asyncio.sleep(1)
    assert client.backlog == 7
    await serving


@in_virtual_time()
async def test_a_session_that_is_cancelled_just_as_its_hello_is_answered_ends() -> None:
    handler, answered = Recorder(), asyncio.Event()

    async def accept(hello: session_pb2.Hello, session: Session) -> Recorder:
        await answered.wait()
        return await handler.accept(hello, session)

    client, server = pair()
    serving = asyncio.create_task(serve(server, accept))
    client.send(HELLO)
    await asyncio.sleep(1)
    answered.set()
    for _ in range(10):
        await asyncio.sleep(0)
        if handler.session is not None:
            break
    serving.cancel()
    await asyncio.wait((serving,))
    assert await handler.end is End.CLOSED


@in_virtual_time()
async def test_messages_before_the_welcome_are_handled_after_it() -> None:
    handler = Recorder()

    async def accept(hello: session_pb2.Hello, session: Session) -> Recorder:
        await asyncio.sleep(1)
        return await handler.accept(hello, session)

    for limits in (Limits(early=1), Limits(early=3), Limits(), Limits(early_bytes=1)):
        handler.seen, handler.end = [], asyncio.get_running_loop().create_future()
        client, server = pair()
        serving = asyncio.create_task(serve(server, accept, limits=limits))
        client.send(HELLO)
        for name in "abc":
            client.send(up(arrivals={"arrivals": [{"name": name}]}))
        assert (await client.recv()).HasField("welcome")
        client.send(up(arrivals={"arrivals": [{"name": "d"}]}))
        client.send(up(leave={"reason": "done"}))
        await serving
        assert handler.seen == ["arrival a", "arrival b", "arrival c", "arrival d", "leave done"]
        assert await handler.end is End.LEFT


@in_virtual_time()
async def test_a_second_hello_ends_the_session() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(HELLO)
        with pytest.raises(InvalidArgument):
            await link.recv()
        assert await handler.end is End.CLOSED


@in_virtual_time()
async def test_messages_are_dispatched_in_order_and_a_slow_call_holds_up_none() -> None:
    handler = Recorder()
    handler.gate.clear()
    async with served(handler) as link:
        for message in (
            HELLO,
            up(call={"id": 7, "get_world": {}}),
            up(arrivals={"arrivals": [{"name": "a"}, {"name": "b"}]}),
            up(progress={"generation": 3}),
            up(call={"id": 8, "get_recovery": {}}),
        ):
            link.send(message)
        assert (await link.recv()).HasField("welcome")
        overtook = (await link.recv()).reply
        assert (overtook.id, overtook.error.code) == (8, "CONFLICT")
        assert handler.seen == ["arrival a", "arrival b", "progress 3"]
        handler.gate.set()
        reply = (await link.recv()).reply
        assert reply.id == 7
        assert reply.HasField("get_world")


@in_virtual_time()
async def test_a_bug_in_a_call_is_answered_and_the_session_goes_on() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(up(call={"id": 1, "list_checkpoints": {}}))
        assert (await link.recv()).reply.error.code == "STRATA"
        link.send(up(call={"id": 2, "get_world": {}}))
        assert (await link.recv()).reply.id == 2


@in_virtual_time()
async def test_too_many_calls_at_once_are_refused_one_by_one() -> None:
    handler = Recorder()
    handler.gate.clear()
    async with served(handler, limits=Limits(calls=2)) as link:
        link.send(HELLO)
        await link.recv()
        for call_id in (1, 2, 3):
            link.send(up(call={"id": call_id, "get_world": {}}))
        refused = (await link.recv()).reply
        assert (refused.id, refused.error.code) == (3, "QUOTA_EXCEEDED")
        handler.gate.set()
        assert {(await link.recv()).reply.id for _ in range(2)} == {1, 2}


@in_virtual_time()
async def test_a_client_with_unread_replies_is_refused_calls_but_its_exit_is_received(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    handler = Recorder()

    def owed(_link: MemoryLink) -> None:
        raise QuotaExceeded("9 MiB are waiting for w1 to read them")

    monkeypatch.setattr(MemoryLink, "check", owed)
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(up(rank_exit={"id": 1, "rank": 3}))
        assert (await link.recv()).reply.HasField("done")
        link.send(up(call={"id": 2, "get_recovery": {}}))
        reply = (await link.recv()).reply
        assert isinstance(unpack(reply.error), QuotaExceeded), "and is not run"
    assert handler.seen == ["exit 3"]


@in_virtual_time()
async def test_a_leave_waits_for_the_exits_before_it_and_ends_the_stream_cleanly() -> None:
    handler = Recorder()
    handler.gate.clear()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(up(rank_exit={"id": 1, "rank": 4}))
        link.send(up(leave={"reason": "done"}))
        await asyncio.sleep(0)
        handler.gate.set()
        assert (await link.recv()).reply.HasField("done")
        assert await link.recv() is None
    assert handler.seen == ["exit 4", "leave done"]
    assert await handler.end is End.LEFT


@in_virtual_time()
async def test_a_leave_that_failed_is_reported_and_is_no_leave() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(up(leave={"reason": "impossible"}))
        with pytest.raises(Unavailable, match="etcd is away"):
            await link.recv()
    assert await handler.end is End.CLOSED


@in_virtual_time()
async def test_an_ending_session_sends_its_reason_to_the_client() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        assert handler.session is not None
        handler.session.end(Conflict("your place was taken"))
        ended = (await link.recv()).ended
        assert unpack(ended.error).message == "your place was taken"
        assert await link.recv() is None
    assert await handler.end is End.CLOSED


@in_virtual_time()
async def test_ticks_come_and_are_skipped_behind_a_backlog() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        first = (await link.recv()).tick
        assert first.ready
        link.stall()
        await asyncio.sleep(20)
        assert handler.session is not None
        assert handler.session.backlog == 1
        link.stall(False)
        await link.recv()
        assert (await link.recv()).tick.sequence > first.sequence + 2


@in_virtual_time()
async def test_a_client_that_does_not_read_loses_the_session_instead_of_messages() -> None:
    handler = Recorder()
    async with served(handler, outbox_limit=3) as link:
        link.send(HELLO)
        await link.recv()
        link.stall()
        assert handler.session is not None
        for _ in range(4):
            handler.session.send(Down(world=session_pb2.WorldUpdate()))
        link.stall(False)
        with pytest.raises(Unavailable, match="too slowly"):
            await drain(link)
    # this side ended the session, but the member did not leave: the handler treats it as a lost transport
    assert await handler.end is End.BROKEN


@in_virtual_time()
async def test_a_broken_transport_ends_the_session_though_a_call_is_under_way() -> None:
    handler = Recorder()
    handler.gate.clear()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(up(call={"id": 1, "get_world": {}}))
        await asyncio.sleep(0)
        link.break_off()
        assert await handler.end is End.BROKEN
        handler.gate.set()


@in_virtual_time()
async def test_an_answer_above_the_message_limit_is_refused_and_keeps_the_session() -> None:
    handler = Recorder()
    async with served(handler) as link:
        link.send(HELLO)
        await link.recv()
        link.send(up(call={"id": 7, "get_checkpoint": {}}))
        link.send(up(call={"id": 8, "get_world": {}}))
        refused, answered = (await link.recv()).reply, (await link.recv()).reply
    assert (refused.id, refused.error.code, refused.error.retryable) == (7, "QUOTA_EXCEEDED", False)
    assert (answered.id, answered.WhichOneof("response")) == (8, "get_world")
