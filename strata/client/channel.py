"""gRPC as the client uses it: channels, the session's stream, unary calls.

A channel is made fresh for each connection, with a subchannel pool of its own: gRPC would
otherwise share one connection, and its backoff, between all channels to an address. Its own
retries are off, because a call whose outcome is unknown is repeated only by who knows that it may
be (PROTOCOLS 2.3). Proxies from the environment are not used: one that answers pings would hide a
death. Both sides ping: a replica whose host is gone is left within `KeepAlive.limit_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from strata.client import fork
from strata.client.endpoints import Endpoint
from strata.errors import Unavailable
from strata.session.link import Link
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.wire.status import translated
from strata.wire.streams import dialled

MAX_MESSAGE_BYTES: Final = 4 << 20
CONNECT_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepAlive:
    """How soon this side finds out that the other side's host or process stopped."""

    time_ms: int = 1000
    timeout_ms: int = 2000

    @property
    def limit_s(self) -> float:
        return (self.time_ms + self.timeout_ms) / 1000


def channel_options(keepalive: KeepAlive | None) -> list[tuple[str, int | str]]:
    """Return the options of every channel of ours; without `keepalive` it sends no pings."""
    options: list[tuple[str, int | str]] = [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 2000),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ]
    if keepalive is not None:
        options += [
            ("grpc.keepalive_time_ms", keepalive.time_ms),
            ("grpc.keepalive_timeout_ms", keepalive.timeout_ms),
            ("grpc.keepalive_permit_without_calls", 1),
            ("grpc.http2.max_pings_without_data", 0),
            ("grpc.http2.ping_timeout_ms", keepalive.timeout_ms),
        ]
    return options


@asynccontextmanager
async def connected(
    endpoint: Endpoint, *, keepalive: KeepAlive | None = None, connect_s: float = CONNECT_S
) -> AsyncIterator[grpc.aio.Channel]:
    """Have a channel that has reached `endpoint`, or has failed to and lets calls say why.

    `Unavailable` when neither is known within `connect_s`. While it is open its socket is closed
    in forked children.
    """
    fork.refuse_in_child()
    with fork.guarding(endpoint):
        async with grpc.aio.insecure_channel(endpoint.target, options=channel_options(keepalive)) as channel:
            try:
                async with asyncio.timeout(connect_s):
                    await _settled(channel)
            except TimeoutError:
                raise Unavailable(f"{endpoint} did not answer within {connect_s:g} s") from None
            yield channel


async def _settled(channel: grpc.aio.Channel) -> None:
    state = channel.get_state(try_to_connect=True)
    while state not in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)


@asynccontextmanager
async def dial_coordinator(endpoint: Endpoint) -> AsyncIterator[Link[Down, Up]]:
    """Open a session's stream to a coordinator replica."""
    async with _session(endpoint, KeepAlive()) as link:
        yield link


@asynccontextmanager
async def dial_supervisor(endpoint: Endpoint) -> AsyncIterator[Link[Down, Up]]:
    """Open a session's stream to the supervisor on the same host.

    Without pings of ours: the supervisor sends them, and when it dies the kernel closes the socket.
    """
    async with _session(endpoint, None) as link:
        yield link


@asynccontextmanager
async def _session(endpoint: Endpoint, keepalive: KeepAlive | None) -> AsyncIterator[Link[Down, Up]]:
    async with connected(endpoint, keepalive=keepalive) as channel:
        with translated(str(endpoint)):
            call: Any = SessionsStub(channel).Session()
            async with dialled(call, str(endpoint)) as link:
                yield link
