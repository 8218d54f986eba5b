"""The gRPC server of a replica: one port for clients and peers.

If the replica has a certificate, the port uses TLS and requires a client certificate or a token. The check of the
configuration decides on which addresses plaintext is allowed. `access.admission` decides which calls a caller may
make. Health and reflection reveal nothing about jobs, and are open to every caller that the transport accepts. The
options serve three purposes:

1. Liveness by pings (`core.timing`).
2. One server a port: with SO_REUSEPORT a second server would silently take half of the connections.
3. Capacity for thousands of streams opened at the same time; with its default options gRPC refuses a quarter of them.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from strata.config import CoordinatorConfig, is_loopback, split_address
from strata.coordinator.access.admission import Admission
from strata.coordinator.access.connection_limiter import ConnectionLimiter, connection_shares
from strata.coordinator.calls.admin import AdminCalls
from strata.coordinator.calls.table import SERVICES, Calls
from strata.coordinator.context import ReadResource, ReplicaContext
from strata.coordinator.rpc.handlers import Handlers
from strata.coordinator.rpc.streams import Streams
from strata.coordinator.rpc.unsent_answers import Ledger
from strata.coordinator.service import Service
from strata.core.access.unsent_answers import DebtLimits, Debts
from strata.core.timing import Timing
from strata.errors import ConfigError, Unavailable
from strata.observe import get_logger
from strata.security.tls import read_pem
from strata.session.link import MAX_MESSAGE_BYTES, Link
from strata.v1 import peers_pb2_grpc as peers
from strata.v1.peers_pb2 import PeerDown, PeerUp
from strata.wire.status import translated
from strata.wire.streams import dialled
from strata.wire.tls import ServerTls, open_channel, shown

MAX_PENDING: Final = 20_000
STOP_GRACE_S: Final = 2.0
HANDSHAKE_S: Final = 5.0
"""The maximum time from accepting a connection until its first SETTINGS frame."""
IDLE_S: Final = 60.0
"""A connection without a stream for this long is closed with GOAWAY; the client's next call opens another."""
MAX_STREAMS: Final = 64
"""The maximum number of streams open on one connection; a client queues further calls. An agent has one stream
for all its ranks. The memory and time that reset streams cost grow with this number: see ADR 0047."""
DEBTS: Final = DebtLimits()
log = get_logger()


class Server:
    """The serving half of a replica over gRPC; a `Serving`."""

    def __init__(
        self,
        context: ReplicaContext,
        service: Service,
        read: ReadResource | None = None,
        debts: DebtLimits = DEBTS,
    ) -> None:
        self._context = context
        self._admission = Admission(context.config, now=_now, measures=context.measures)
        self._ledger = Ledger(measures=context.measures, debts=Debts(limits=debts))
        self._service = service
        admin = AdminCalls(
            context,
            read,
            peer_ready=lambda instance: instance in service.peers.ready(),
            sessions=service.failure_detector.sessions,
        )
        self._calls = Calls(context.mirror, service.rows, admin.rows(), cluster=context.keys.cluster)
        self._health = health.aio.HealthServicer()
        self._server: grpc.aio.Server | None = None
        self._limits = connection_shares(context.config).grpc
        self._limiter: ConnectionLimiter | None = None
        self._tasks: asyncio.TaskGroup | None = None

    async def start(self) -> str:
        config = self._context.config
        options = server_options(self._context.timing, most_connections=self._limits.most)
        server = grpc.aio.server(options=options)
        self._add_services(server)
        _host, port = split_address("coordinator.listen", config.listen)
        bound = bind(server, config)
        self._limiter = ConnectionLimiter(bound, self._limits, self._context.connections, self._admission)
        await server.start()
        self._server = server
        for name in ("", *(service.full_name for service in SERVICES.values())):
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        if config.advertise:
            return config.advertise
        return config.listen if port else f"{config.listen.rpartition(':')[0]}:{bound}"

    async def run(self) -> None:
        assert self._limiter is not None, "start comes before run"
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            beside = [
                tasks.create_task(self._limiter.run(), name="connections"),
                tasks.create_task(self._admission.review(), name="review of open streams"),
                tasks.create_task(self._ledger.collect(self._limiter.end), name="unread answers"),
            ]
            try:
                await self._service.run()
            finally:
                self._tasks = None  # no stream starts from here on
                for task in beside:
                    task.cancel()

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        self._service.part()
        if self._server is not None:
            await self._server.stop(STOP_GRACE_S)

    def _spawn(self, logic: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a stream's logic for as long as this replica serves."""
        if self._tasks is None:
            logic.close()  # otherwise Python warns that the coroutine was never awaited
            raise Unavailable("this replica does not serve yet, or no longer")
        return self._tasks.create_task(logic)

    def _add_services(self, server: grpc.aio.Server) -> None:
        streams = Streams(self._service, self._admission, self._ledger, self._spawn)
        handlers = Handlers(self._calls, self._admission, self._ledger, streams.by_method())
        server.add_generic_rpc_handlers((handlers,))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        names = [service.full_name for service in SERVICES.values()]
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)


def server_options(timing: Timing, *, most_connections: int) -> list[tuple[str, int]]:
    """Return the options of a replica's server. ADR 0047 has the measurements of the options that limit an attack."""
    return [
        *timing.server_options(),
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.server_handshake_timeout_ms", int(1000 * HANDSHAKE_S)),
        ("grpc.max_connection_idle_ms", int(1000 * IDLE_S)),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", most_connections),
    ]


def bind(server: grpc.aio.Server, config: CoordinatorConfig) -> int:
    """Return the bound port; `ConfigError` with the reason if it cannot be bound.

    Some programs resolve `localhost` to ::1, others to 127.0.0.1. So a replica at 127.0.0.1 also serves ::1 at the
    same port, unless the machine has no ::1 or another program uses that port.
    """
    tls = None
    if config.serves_tls:
        verify = config.accepted_tokens_file is None
        tls = ServerTls(config.credentials, verify_clients=verify, now=_now).credentials()

    def add(address: str) -> tuple[int, str]:
        """Return the bound port, or the reason why it cannot be bound."""
        why = _bind_error(address)  # before gRPC tries, which would print long messages on standard error
        if why:
            return 0, why
        try:
            port = server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
        except RuntimeError as error:
            return 0, str(error)
        return port, ""

    bound, why = add(config.listen)
    if why:
        raise ConfigError(
            f"cannot serve at {config.listen}: {why}",
            hint="end the process that listens there, or give another address by --listen",
        )
    host, _port = split_address("coordinator.listen", config.listen)
    if host == "127.0.0.1":
        other = f"[::1]:{bound}"
        _, why = add(other)
        if why:
            log.warning("serves_ipv4_only", address=other, why=why)
    return bound


def _bind_error(address: str) -> str:
    """Return why the kernel refuses to bind an address, or an empty string. gRPC does not report the reason."""
    host, port = split_address("coordinator.listen", address)
    try:
        family, kind, protocol, _name, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as error:
        return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
    return ""


class Dialer:
    """Opens links to peers; each has a channel of its own, so that none waits for another's backoff."""

    def __init__(self, config: CoordinatorConfig, timing: Timing) -> None:
        self._config = config
        self._options: list[tuple[str, int]] = [
            *timing.client_options(),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ]

    @asynccontextmanager
    async def __call__(self, address: str) -> AsyncIterator[Link[PeerDown, PeerUp]]:
        credentials = self._config.credentials
        pem = read_pem(credentials, _now()) if self._config.serves_tls else None
        if pem is None and not credentials.insecure and not is_loopback(split_address("address", address)[0]):
            raise ConfigError(
                f"{address} is not a loopback address, and the connection would be plaintext",
                hint="its coordinator.advertise names one; give all replicas certificates, or --insecure",
            )
        metadata = shown(credentials)
        async with open_channel(address, options=self._options, pem=pem) as channel:
            with translated(address):
                call: Any = peers.PeersStub(channel).Link(metadata=metadata)
                async with dialled(call, address) as link:
                    yield link


def _now() -> dt.datetime:
    """The wall clock, for the validity of certificates and tokens."""
    return dt.datetime.now(dt.UTC)
