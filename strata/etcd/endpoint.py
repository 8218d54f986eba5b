"""Endpoint: one etcd member as seen through one connection.

gRPC's own retries are off: a hidden retry would turn a known outcome into an unknown one. An endpoint always
has exactly one TCP connection of its own (`use_local_subchannel_pool`) and reconnects by itself. An endpoint
shows whether it is ready, so that calls are sent only over an established connection. A refused connection is
then noticed before anything was sent.

etcd allows a client one ping in 5 s, and none on a connection without streams; etcd ends a connection with more
pings (`too_many_pings`). So calls that time out and a watch's silence reveal a frozen member; pings are the
last resort.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import grpc
import grpc.aio

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
    # the list of a large keyspace exceeds gRPC's default of 4 MiB; etcd limits what may be sent
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),
    # an attempt may take this long (default 20 s; a busy machine needs a second for TLS), and the next one
    # follows soon
    ("grpc.min_reconnect_backoff_ms", 3_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # a connection kept for the failure of another member must not become idle
    ("grpc.client_idle_timeout_ms", 2**31 - 1),
]

POLL_S: Final = 1.0
"""How often the client checks for replaced files while there is no connection."""

READY: Final = grpc.ChannelConnectivity.READY
SHUTDOWN: Final = grpc.ChannelConnectivity.SHUTDOWN


class Health:
    """The health of one member, shared by every connection to it."""

    __slots__ = ("blamed_at",)

    def __init__(self) -> None:
        self.blamed_at = float("-inf")
        """Time of the last call to this member that failed without a clear answer."""


class Report(Protocol):
    """Called when a channel's state changes; `lost`: an established connection was lost."""

    def __call__(self, endpoint: Endpoint, *, lost: bool) -> None: ...


class Endpoint:
    """A channel to one member, its services, and the member's health."""

    __slots__ = (
        "_address",
        "_closed",
        "_renewed",
        "_stamp",
        "_tls",
        "_waiting",
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
        self._tls = tls
        self._stamp = tls.stamp() if tls is not None else ()
        self._closed = False
        self._renewed = asyncio.Event()
        self._waiting: set[asyncio.Future[None]] = set()
        self._use(self._open())

    def _open(self) -> grpc.aio.Channel:
        """Return a channel with the present contents of the files; `ConfigError` if they cannot be read."""
        options = list(_OPTIONS)
        if self._tls is None:
            return grpc.aio.insecure_channel(self.name, options=options)
        if self._tls.server_name is not None:
            options.append(("grpc.ssl_target_name_override", self._tls.server_name))
        return grpc.aio.secure_channel(self.name, self._tls.credentials(), options=options)

    def _use(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.kv = KVStub(self.channel)
        self.watch = WatchStub(self.channel)
        self.lease = LeaseStub(self.channel)
        self.cluster = ClusterStub(self.channel)
        self.maintenance = MaintenanceStub(self.channel)
        self.auth = AuthStub(self.channel)

    @property
    def ready(self) -> bool:
        """Whether a connection is established. Checked before every call: it costs 0.1 µs."""
        return self.channel.get_state() is READY

    async def close(self) -> None:
        """Close the connection permanently."""
        self._closed = True
        await self.channel.close()

    async def _renew(self) -> None:
        """If files were replaced, open a channel with the new files: a channel uses the files with which it was
        opened.

        Called while there is no connection, so that no working connection is dropped.
        """
        now = self._tls.stamp() if self._tls is not None else ()
        if now == self._stamp:
            return
        try:
            channel = self._open()
        except ConfigError:
            return  # the files are being replaced at this moment: the next check finds them complete
        self._stamp = now
        before = self.channel
        self._use(channel)
        self._renewed.set()
        await before.close()
        if self._closed:
            await channel.close()

    async def keep_connected(self, report: Report) -> None:
        """Reconnect for ever, and report every change of the channel's state."""
        looking = asyncio.create_task(self._look(), name=f"etcd-files-{self.name}")
        try:
            await self._keep_connected(report)
        finally:
            looking.cancel()

    async def _look(self) -> None:
        """Check for replaced files while there is no connection.

        A channel does not show when it tries again: after the first failure its state is TRANSIENT_FAILURE
        until a connection is established. So this check polls.
        """
        while self._tls is not None and not self._closed:
            await asyncio.sleep(POLL_S)
            if not self.ready:
                await self._renew()

    async def _keep_connected(self, report: Report) -> None:
        was_ready = False
        state = self.channel.get_state(try_to_connect=True)
        while state is not SHUTDOWN:
            is_ready = state is READY
            report(self, lost=was_ready and not is_ready)
            was_ready = is_ready
            self._renewed.clear()
            changed = asyncio.ensure_future(self.channel.wait_for_state_change(state))
            renewed = asyncio.ensure_future(self._renewed.wait())
            try:
                await asyncio.wait((changed, renewed), return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                changed.cancel()
                raise
            finally:
                renewed.cancel()
                self._waiting.add(changed)  # gRPC ends this wait, at the latest when the channel closes
                changed.add_done_callback(self._waiting.discard)
            # if closed before the wait began, gRPC refuses to wait, and the state below is SHUTDOWN
            if changed.done() and not isinstance(changed.exception(), grpc.aio.UsageError):
                changed.result()
            state = self.channel.get_state(try_to_connect=True)
