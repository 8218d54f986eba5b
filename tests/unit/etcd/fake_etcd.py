"""A server with etcd's API whose answers a test chooses, for answers that no real etcd gives on demand.

The behaviour of a real etcd is tested in tests/integration.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, Self

import grpc

from strata.etcd import EtcdStore, Timing
from strata.etcdapi import (
    auth_pb2,
    cluster_pb2,
    header_pb2,
    kv_pb2,
    lease_pb2,
    maintenance_pb2,
    mvcc_pb2,
    watch_pb2,
)

LIMIT_S = 10.0
"""The longest wait of a test for an expected message."""

Reply = Callable[[Any, Any], Awaitable[Any]]


async def soon(awaitable: Awaitable[Any]) -> Any:
    return await asyncio.wait_for(awaitable, LIMIT_S)


class Session:
    """One stream that a client opened. A test reads the client's requests, sends answers, and ends the stream."""

    def __init__(self, metadata: dict[str, str]) -> None:
        self.metadata = metadata
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.answers: asyncio.Queue[Any] = asyncio.Queue()
        self.ended = asyncio.Event()

    async def request(self) -> Any:
        return await soon(self.requests.get())

    def send(self, answer: Any) -> None:
        self.answers.put_nowait(answer)

    def end(self, code: grpc.StatusCode, text: str) -> None:
        self.answers.put_nowait((code, text))

    async def run(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async def listen() -> None:
            async for request in requests:
                self.requests.put_nowait(request)

        listening = asyncio.create_task(listen())
        try:
            while True:
                answer = await self.answers.get()
                if isinstance(answer, tuple):
                    await context.abort(*answer)
                yield answer
        finally:
            listening.cancel()
            self.ended.set()


class FakeEtcd:
    """One member. `replies` maps a method to its reply; opened streams arrive in two queues."""

    def __init__(self, port: int = 0) -> None:
        self.cluster_id = 7
        self.term = 1
        self.revision = 1
        self.version = "3.5.30"
        self.calls: list[tuple[str, Any, dict[str, str]]] = []
        self.replies: dict[str, Reply] = {}
        self.watches: asyncio.Queue[Session] = asyncio.Queue()
        self.renewals: asyncio.Queue[Session] = asyncio.Queue()
        self.server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self.port = self.server.add_insecure_port(f"127.0.0.1:{port}")
        self._serve("KV", Range=kv_pb2.RangeRequest, Txn=kv_pb2.TxnRequest, Compact=kv_pb2.CompactionRequest)
        self._serve("Lease", LeaseGrant=lease_pb2.LeaseGrantRequest, LeaseRevoke=lease_pb2.LeaseRevokeRequest)
        self._serve("Maintenance", Status=maintenance_pb2.StatusRequest)
        self._serve("Cluster", MemberList=cluster_pb2.MemberListRequest)
        self._serve("Auth", Authenticate=auth_pb2.AuthenticateRequest)
        self.snapshot: Callable[[Any], AsyncIterator[bytes]] | None = None
        """Takes the call's context; yields the pieces of a snapshot."""
        self._serve_snapshot()
        self._serve_stream("Watch", "Watch", watch_pb2.WatchRequest, self.watches)
        self._serve_stream("Lease", "LeaseKeepAlive", lease_pb2.LeaseKeepAliveRequest, self.renewals)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.stop(None)

    def header(self, revision: int | None = None) -> header_pb2.ResponseHeader:
        return header_pb2.ResponseHeader(
            cluster_id=self.cluster_id,
            raft_term=self.term,
            revision=self.revision if revision is None else revision,
        )

    def count(self, method: str) -> int:
        return sum(name == method for name, _, _ in self.calls)

    def _serve(self, service: str, **methods: Any) -> None:
        def handler(method: str, request_type: Any) -> Any:
            async def behave(request: Any, context: Any) -> Any:
                self.calls.append((method, request, dict(context.invocation_metadata())))
                reply = self.replies.get(method)
                answer = None if reply is None else await reply(request, context)
                return self._default(method, request) if answer is None else answer

            return grpc.unary_unary_rpc_method_handler(behave, request_type.FromString, _to_bytes)

        handlers = {method: handler(method, request) for method, request in methods.items()}
        self._add(service, handlers)

    def _serve_stream(
        self, service: str, method: str, request_type: Any, sessions: asyncio.Queue[Session]
    ) -> None:
        async def behave(requests: Any, context: Any) -> AsyncIterator[Any]:
            session = Session(dict(context.invocation_metadata()))
            sessions.put_nowait(session)
            async for answer in session.run(requests, context):
                yield answer

        handler: Any = grpc.stream_stream_rpc_method_handler(behave, request_type.FromString, _to_bytes)
        self._add(service, {method: handler})

    def _serve_snapshot(self) -> None:
        async def behave(request: Any, context: Any) -> AsyncIterator[Any]:
            self.calls.append(("Snapshot", request, dict(context.invocation_metadata())))
            if self.snapshot is not None:
                async for blob in self.snapshot(context):
                    yield maintenance_pb2.SnapshotResponse(blob=blob)

        request_type = maintenance_pb2.SnapshotRequest
        handler: Any = grpc.unary_stream_rpc_method_handler(behave, request_type.FromString, _to_bytes)
        self._add("Maintenance", {"Snapshot": handler})

    def _add(self, service: str, handlers: dict[str, Any]) -> None:
        name = f"etcdserverpb.{service}"
        self.server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(name, handlers)])

    def _default(self, method: str, request: Any) -> Any:
        header = self.header()
        match method:
            case "Range":
                return kv_pb2.RangeResponse(header=header)
            case "Txn":
                return kv_pb2.TxnResponse(header=header, succeeded=True)
            case "Compact":
                return kv_pb2.CompactionResponse(header=header)
            case "LeaseGrant":
                return lease_pb2.LeaseGrantResponse(header=header, ID=1, TTL=request.TTL)
            case "LeaseRevoke":
                return lease_pb2.LeaseRevokeResponse(header=header)
            case "MemberList":
                return cluster_pb2.MemberListResponse(header=header)
            case "Status":
                return maintenance_pb2.StatusResponse(header=header, version=self.version)
            case _:
                token = f"token-{self.count('Authenticate')}"
                return auth_pb2.AuthenticateResponse(header=header, token=token)

    async def next_watch(self) -> tuple[Session, watch_pb2.WatchCreateRequest]:
        """Return the next watch that a client opens, after confirming its creation."""
        session: Session = await soon(self.watches.get())
        create = (await session.request()).create_request
        session.send(watch_pb2.WatchResponse(header=self.header(), created=True))
        return session, create

    def events(self, *revisions: int, header: int | None = None, fragment: bool = False) -> Any:
        return watch_pb2.WatchResponse(
            header=self.header(revisions[-1] if header is None else header),
            fragment=fragment,
            events=[
                mvcc_pb2.Event(kv=mvcc_pb2.KeyValue(key=b"k", value=b"v", mod_revision=revision))
                for revision in revisions
            ],
        )

    def progress(self, revision: int) -> Any:
        return watch_pb2.WatchResponse(header=self.header(revision), watch_id=-1)

    def canceled(self, reason: str = "", compact_revision: int = 0) -> Any:
        return watch_pb2.WatchResponse(
            header=self.header(),
            canceled=True,
            cancel_reason=reason,
            compact_revision=compact_revision,
        )


def failing(code: grpc.StatusCode, text: str, *, times: int = 1 << 30) -> Reply:
    """Return a reply that fails `times` times, and then answers."""
    left = [times]

    async def reply(_request: Any, context: Any) -> Any:
        if left[0] > 0:
            left[0] -= 1
            await context.abort(code, text)

    return reply


def quick(**changes: float) -> Timing:
    """Return a `Timing` for tests: it skips pauses and starts at the first endpoint."""

    async def sleep(_seconds: float) -> None:
        await asyncio.sleep(0)

    return replace(Timing(request_s=2.0, sleep=sleep, chance=lambda: 0.0), **changes)  # type: ignore[arg-type]  # all fields are floats


def _to_bytes(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


@asynccontextmanager
async def store_on(
    *members: FakeEtcd, timing: Timing | None = None, user: str | None = None
) -> AsyncIterator[EtcdStore]:
    """A store that is connected to all members, and whose current endpoint is the first one."""
    endpoints = [member.address for member in members]
    password = None if user is None else "p"
    store = await EtcdStore.connect(endpoints, timing=timing or quick(), user=user, password=password)
    async with store:
        for connection in (store._connection, store._renewals):
            async with asyncio.timeout(LIMIT_S):
                for endpoint in connection.endpoints:
                    await endpoint.channel.channel_ready()
            # the member that connected first took the first calls
            for endpoint in connection.endpoints:
                endpoint.health.blamed_at = float("-inf")
            connection._choose()
        yield store
