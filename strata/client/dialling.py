"""Connecting to where a route leads, for as long as the route says, which learns how it went."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

from strata.client.endpoints import Endpoint, Route
from strata.client.terms import Dial
from strata.errors import Unavailable
from strata.session.link import Link
from strata.v1.session_pb2 import Down, Up


async def connect(route: Route, endpoint: Endpoint, dial: Dial, stack: AsyncExitStack) -> Link[Down, Up]:
    """Return a stream to `endpoint`, the route's current one, of which `stack` lets go.

    `Unavailable` when there is none within `route.connect_s`.
    """
    clock = asyncio.get_running_loop().time
    began, limit_s, made = clock(), route.connect_s, False
    try:
        async with asyncio.timeout(limit_s):
            link = await stack.enter_async_context(dial(endpoint))
        made = True
        return link
    except TimeoutError:
        raise Unavailable(f"{endpoint} did not answer within {limit_s:g} s") from None
    finally:
        route.connected(clock() - began, made=made)
