"""A relayed watch that survives its replica: ordered, without gaps, whoever serves it."""

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
    """Yield the keys of a job below `prefix`: first all that are there (`resync`), then each change.

    Goes on at another replica after the last revision that was yielded. `Unavailable` when none
    serves for `timeout_s`; what will not change by trying again is raised at once. A watch that was served once
    ends with a refusal only after one more in a row than there are endpoints: a credential may have been renewed
    since it began, and an endpoint that is down may serve it later.
    """
    clock = asyncio.get_running_loop().time
    route, token = Route(endpoints, rng), Token()
    refusals = 0
    """How often in a row endpoints refused who we are."""
    served_at, trouble = clock(), ""
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
            if refusals > route.count:  # the first one may be of a credential that was renewed since
                raise
            trouble = error.message
    raise Unavailable(
        f"no coordinator served the watch within {timeout_s:g} s" + (f": {trouble}" if trouble else "")
    )
