"""One etcd member as seen through one connection.

gRPC's own retries are off: a retry behind our back would turn a known outcome into an unknown one.
An endpoint always has exactly one TCP connection of its own (`use_local_subchannel_pool`), is
reconnected by itself, and says whether it is ready, so that a call is sent only where a connection
stands: a refused connection is then found before anything was sent.

etcd allows a client one ping in 5 s, and none on a connection without streams; more ends the
connection (`too_many_pings`). So a frozen member is found by calls that time out and by a watch's
silence; pings are the last resort.
"""

from __future__ import annotations

from typing import Final, Protocol

import grpc

from strata.errors import ConfigError
from strata.etcd.options import Address, TlsConfig
from strata.etcdapi.auth_pb2_grpc import AuthStub
from strata.etcdapi.cluster_pb2_grpc import ClusterStub
from strata.etcdapi.kv_pb2_grpc import KVStub
from strata.etcdapi.lease_pb2_grpc import LeaseStub
from strata.etcdapi.maintenance_pb2_grpc import MaintenanceStub
from strata.etcdapi.watch_pb2_grpc import WatchStub

_OPTIONS: Final[list[tuple[str, object]]] = [
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # a list of a large keyspace passes gRPC's default of 4 MiB; what may be sent, etcd decides
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    # an attempt may take this long (default 20 s; a busy machine needs a second for TLS), and the next
    # one follows soon
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # a connection kept for the day another member fails must not fall asleep
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
]

READY: Final = grpc.ChannelConnectivity.READY
SHUTDOWN: Final = grpc.ChannelConnectivity.SHUTDOWN


class Health:
    """What is known of one member, shared by every connection to it."""

    __slots__ = ("blamed_at",)

    def __init__(self) -> None:
        self.blamed_at = float("-inf")
        """When a call there last failed without a clear answer."""


class Report(Protocol):
    """Hears that a channel's state changed; `lost`: a connection that stood does so no more."""

    def __call__(self, endpoint: Endpoint, *, lost: bool) -> None: ...


class Endpoint:
    """A channel to one member, its services, and what we know of its health."""

    __slots__ = (
        "auth",
        "channel",
        "cluster",
        "health",
        "kv",
        "lease",
        "maintenance",
        "name",
        "watch",
    )

    def __init__(self, address: Address, tls: TlsConfig | None, health: Health) -> None:
        if address.tls is not None and address.tls != (tls is not None):
            scheme, have = ("https", "no TLS files") if address.tls else ("http", "TLS files")
            raise ConfigError(f"etcd endpoint {scheme}://{address.target}, but {have} are configured")
        self.name = address.target
        self.health = health
        options = list(_OPTIONS)
        if tls is None:
            self.channel = grpc.aio.insecure_channel(self.name, options=options)
        else:
            if tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", tls.server_name))
            self.channel = grpc.aio.secure_channel(self.name, tls.credentials(), options=options)
        self.kv = KVStub(self.channel)
        self.watch = WatchStub(self.channel)
        self.lease = LeaseStub(self.channel)
        self.cluster = ClusterStub(self.channel)
        self.maintenance = MaintenanceStub(self.channel)
        self.auth = AuthStub(self.channel)

    @property
    def ready(self) -> bool:
        """Hold when a connection stands. Asked before every call: it costs 0.1 µs."""
        return self.channel.get_state() is READY

    async def keep_connected(self, report: Report) -> None:
        """Reconnect for ever, and report every change of the channel's state."""
        stood = False
        state = self.channel.get_state(try_to_connect=True)
        while state is not SHUTDOWN:
            stands = state is READY
            report(self, lost=stood and not stands)
            stood = stands
            await self.channel.wait_for_state_change(state)
            state = self.channel.get_state(try_to_connect=True)
