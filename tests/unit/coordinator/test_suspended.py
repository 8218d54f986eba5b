"""A suspended replica gives every caller the reason, over a real connection on this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import grpc.aio
import pytest

from strata.coordinator import suspended
from strata.coordinator.suspended import Refusal
from strata.errors import Unavailable
from strata.v1.members_pb2 import ListMembersRequest
from strata.v1.members_pb2_grpc import MembersStub
from strata.v1.session_pb2 import Hello, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.wire.status import translated
from strata.wire.streams import dialled

REASON = "etcd was restored or replaced at 12:00:00"


@contextmanager
def refusing() -> Iterator[str]:
    """Serve refusals in a thread, so that they arrive while the client's event loop is busy."""

    async def serve() -> None:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((Refusal(lambda: Unavailable(REASON)),))
        bound.set_result(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        await asyncio.to_thread(ending.wait)
        await server.stop(0)

    bound: Future[str] = Future()
    ending = Event()
    with ThreadPoolExecutor() as threads:
        serving = threads.submit(asyncio.run, serve())
        try:
            yield bound.result(timeout=10)
        finally:
            ending.set()
            serving.result(timeout=10)


async def test_a_session_whose_hello_is_late_still_receives_the_reason() -> None:
    with refusing() as address:
        async with grpc.aio.insecure_channel(address) as channel:
            for _ in range(5):
                call: Any = SessionsStub(channel).Session()
                await call.wait_for_connection()
                time.sleep(0.05)  # the replica has the call, and this event loop reads nothing  # noqa: ASYNC251
                async with dialled(call, "a replica") as link:
                    link.send(Up(hello=Hello()))
                    with pytest.raises(Unavailable, match=REASON):
                        await link.recv()


async def test_a_unary_call_receives_the_reason() -> None:
    with refusing() as address:
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = MembersStub(channel)
            with pytest.raises(Unavailable, match=REASON), translated("a replica"):
                await stub.ListMembers(ListMembersRequest())


async def test_a_caller_that_sends_nothing_receives_the_reason_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suspended, "FIRST_MESSAGE_S", 0.05)
    with refusing() as address:
        async with grpc.aio.insecure_channel(address) as channel:
            call: Any = SessionsStub(channel).Session()
            async with dialled(call, "a replica") as link:
                with pytest.raises(Unavailable, match=REASON):
                    await link.recv()
