"""gRPC as the client uses it: channels, the session's stream, unary calls.

A channel is made fresh for each connection, with a subchannel pool of its own: gRPC would
otherwise share one connection, and its backoff, between all channels to an address. Its own
retries are off, because a call whose outcome is unknown is repeated only by who knows that it may
be (PROTOCOLS 2.3). Proxies from the environment are not used: one that answers pings would hide a
death. Both sides ping: a replica whose host is gone is left within `detect_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import grpc
import grpc.aio

from strata.client import fork
from strata.client.endpoints import Endpoint
from strata.client.terms import Dial
from strata.core.timing import Timing
from strata.errors import Unavailable
from strata.session.link import MAX_MESSAGE_BYTES, Link
from strata.v1.session_pb2 import Down, Up
from strata.v1.session_pb2_grpc import SessionsStub
from strata.wire.status import translated
from strata.wire.streams import dialled

CONNECT_S: Final = 2.0


def channel_options(timing: Timing | None) -> list[tuple[str, int]]:
    """Return the options of every channel of ours; without `timing` it sends no pings."""
    return [
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        *(timing.client_options() if timing is not None else ()),
    ]


@asynccontextmanager
async def connected(
    endpoint: Endpoint, *, timing: Timing | None = None, connect_s: float = CONNECT_S
) -> AsyncIterator[grpc.aio.Channel]:
    """Have a channel that has reached `endpoint`, or has failed to and lets calls say why.

    `Unavailable` when neither is known within `connect_s`. While it is open its socket is closed
    in forked children.
    """
    fork.allow_grpc()
    with fork.guarding(endpoint):
        async with grpc.aio.insecure_channel(endpoint.target, options=channel_options(timing)) as channel:
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


def dialer(timing: Timing | None) -> Dial:
    """Return how a session's stream to an endpoint is opened, pinged as `timing` says.

    Without `timing` there are no pings of ours: a rank's supervisor is on the same host and sends
    its own, and when it dies the kernel closes the socket.
    """
    return lambda endpoint: _session(endpoint, timing)


@asynccontextmanager
async def _session(endpoint: Endpoint, timing: Timing | None) -> AsyncIterator[Link[Down, Up]]:
    async with connected(endpoint, timing=timing) as channel:
        with translated(str(endpoint)):
            call: Any = SessionsStub(channel).Session()
            async with dialled(call, str(endpoint)) as link:
                yield link
