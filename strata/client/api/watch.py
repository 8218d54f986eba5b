"""A watch served by a replica, ordered and without gaps; if the replica is lost, another replica continues the
watch.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Sequence

from strata.config import Credentials
from strata.errors import ConfigError, StrataError, Unauthenticated, Unavailable
from strata.session.endpoints import Endpoint, Route
from strata.session.terms import is_final
from strata.transport.channel import connected
from strata.v1.common_pb2 import Token
from strata.v1.watch_pb2 import WatchRequest, WatchResponse
from strata.v1.watch_pb2_grpc import WatchStub
from strata.wire.status import translated


async def watch(
    endpoints: Sequence[Endpoint],
    rng: random.Random,
    *,
    job: str,
    prefix: str = "",
    timeout_s: float,
    credentials: Credentials | None = None,
) -> AsyncGenerator[WatchResponse, None]:
    """Yield the keys of a job below `prefix`: first all existing keys (`resync`), then each change.

    If a replica is lost, the watch goes on at another replica after the last revision that was yielded. Raise
    `Unavailable` if no replica serves it for `timeout_s`. An error that a retry cannot change is raised
    immediately. Exception: once a replica has served the watch, refused credentials are retried, because they may
    have been renewed since the watch began, and an endpoint that is down now may accept them later. Such a refusal
    is raised only after more refusals in a row than there are endpoints.
    """
    clock = asyncio.get_running_loop().time
    route, token = Route(endpoints, rng), Token()
    refusals = 0
    """The number of refusals in a row for our credentials."""
    served_at, last_error = clock(), ""
    while clock() - served_at < timeout_s:
        endpoint, delay_s = route.next()
        await asyncio.sleep(delay_s)
        try:
            async with connected(endpoint, credentials=credentials) as connection:
                with translated(str(endpoint)):
                    request = WatchRequest(job=job, prefix=prefix, token=token)
                    call = WatchStub(connection.channel).Watch(request, metadata=connection.metadata)
                    async for response in call:
                        route.reached()
                        yield response
                        token, served_at = response.token, clock()
                        refusals = 0
        except StrataError as error:
            if not error.retryable and (not token.uid or is_final(error, welcomed=True)):
                raise
            refusals = refusals + 1 if isinstance(error, Unauthenticated | ConfigError) else 0
            if refusals > route.count:  # the first refusal may be of a credential renewed since
                raise
            last_error = error.message
    raise Unavailable(
        f"no coordinator served the watch within {timeout_s:g} s" + (f": {last_error}" if last_error else "")
    )
