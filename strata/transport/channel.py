"""The client side's gRPC: channels, connections, and the session's stream.

Each connection makes a new channel with a subchannel pool of its own: otherwise gRPC would share one
connection, and its backoff, between all channels to an address. gRPC's own retries are off: only the caller
knows whether a call with an unknown outcome may be repeated (PROTOCOLS 2.3). Proxies from the environment are
not used: a proxy that answers pings would hide the death of a replica. Both sides ping: the connection to a
replica on a lost host ends within `detect_s`.

Certificates and the token are read for each connection, so replacing them requires no restart.
"""

from __future__ import annotations

import asyncio
import datetime as dt
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from strata.config import Credentials
from strata.core.timing import Timing
from strata.errors import Unavailable
from strata.security.probe import explain
from strata.security.tls import read_pem
from strata.session import fork
from strata.session.endpoints import Endpoint, check_plaintext
from strata.session.link import MAX_MESSAGE_BYTES, Link
from strata.session.terms import Dial
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.wire.status import translated
from strata.wire.streams import dialled
from strata.wire.tls import Metadata, open_channel, shown

CONNECT_S: Final = 2.0


def channel_options(timing: Timing | None) -> list[tuple[str, int]]:
    """Return the options of all our channels; without `timing` the channel sends no pings."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *(timing.client_options() if timing is not None else ()),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """A channel, and the metadata with our credentials that every call on it sends."""

    channel: grpc.aio.Channel
    metadata: Metadata


@asynccontextmanager
async def connected(
    endpoint: Endpoint,
    *,
    timing: Timing | None = None,
    credentials: Credentials | None = None,
) -> AsyncIterator[Connection]:
    """Open a connection to `endpoint`. If connecting fails, each call on the returned connection raises the
    cause.

    Raise `Unavailable` if neither success nor failure is known within `CONNECT_S`. Raise `ConfigError` or
    `Unauthenticated` if certificates are the cause of the failure.
    """
    fork.allow_grpc()
    own = credentials or Credentials()
    check_plaintext(endpoint, own)
    now = dt.datetime.now(dt.UTC)
    pem = read_pem(own, now) if endpoint.tls else None
    metadata = () if endpoint.path else shown(own)
    async with open_channel(endpoint.target, options=channel_options(timing), pem=pem) as channel:
        try:
            async with asyncio.timeout(CONNECT_S):
                reached = await _settled(channel)
        except TimeoutError:
            raise Unavailable(f"{endpoint} did not answer within {CONNECT_S:g} s") from None
        if not reached and not endpoint.path:
            why = await explain(endpoint.host, endpoint.port, own, tls=endpoint.tls, now=now)
            if why is not None:
                raise why
        yield Connection(channel=channel, metadata=metadata)


async def _settled(channel: grpc.aio.Channel) -> bool:
    """Return whether the connection succeeded, once that is known."""
    state = channel.get_state(try_to_connect=True)
    while state not in {grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.TRANSIENT_FAILURE}:
        await channel.wait_for_state_change(state)
        state = channel.get_state(try_to_connect=True)
    return state is grpc.ChannelConnectivity.READY


def dialer(timing: Timing, credentials: Credentials | None = None) -> Dial:
    """Return the function that opens a session's stream to an endpoint, with pings as in `timing`."""
    return lambda endpoint: _session(endpoint, timing, credentials)


@asynccontextmanager
async def _session(
    endpoint: Endpoint, timing: Timing, credentials: Credentials | None
) -> AsyncIterator[Link[Down, Up]]:
    async with connected(endpoint, timing=timing, credentials=credentials) as connection:
        with translated(str(endpoint)):
            call: Any = SessionsStub(connection.channel).Session(metadata=connection.metadata)
            async with dialled(call, str(endpoint)) as link:
                yield link
