"""The watches workload: readers follow a job's keys through the replicas, and resume at other replicas.

The members pass barriers, so that keys change. A reader opens a watch at one replica after another, each time from
its last resume token, and records every message on arrival.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import sys
from contextlib import AbstractAsyncContextManager
from typing import Any, Final

from strata.config import Credentials
from strata.core.timing import Timing
from strata.errors import ClusterRestored, StrataError
from strata.session.endpoints import parse_endpoints
from strata.transport.channel import Connection, connected
from strata.v1.common_pb2 import Token
from strata.v1.watch_pb2 import WatchRequest, WatchResponse
from strata.v1.watch_pb2_grpc import WatchStub
from strata.wire.status import translated
from strata_chaos.workloads import barriers
from strata_chaos.workloads.program import Options, Stop, Workload, main
from strata_chaos.workloads.recording import Recorder

PAUSE_S: Final = 0.1
STAY_S: Final = (2.0, 25.0)
"""Range of the time that a reader stays at one replica."""
PREFIXES: Final = ("", "barriers/", "w")


def client(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Pass barriers as a member; an extra client watches."""
    if options.is_member:
        barriers.client(options, recorder, stop)
    else:
        asyncio.run(follow(options, recorder, stop))


async def follow(options: Options, recorder: Recorder, stop: Stop) -> None:
    """Watch at one replica after another until `stop` is set."""
    rng = options.rng("watch", options.client, options.life)
    prefix = PREFIXES[(options.client or 0) % len(PREFIXES)]
    credentials = Credentials.load(env=os.environ)
    endpoints = parse_endpoints(options.endpoints, credentials)
    token = Token()
    stream = 0
    while not stop.is_set():
        stream += 1
        endpoint = rng.choice(endpoints)
        try:
            with recorder.operation(
                "watch",
                announce=True,
                job=options.job,
                prefix=prefix,
                stream=stream,
                endpoint=str(endpoint),
                resume=token.revision if token.uid else None,
                uid=token.uid,
            ):
                line = connected(endpoint, timing=Timing.derive(), credentials=credentials)
                await watch(options, recorder, stop, line, prefix, token, stream, rng)
        except ClusterRestored:
            token = Token()  # a token of another cluster is not valid here
        except StrataError:
            await asyncio.sleep(PAUSE_S)


async def watch(
    options: Options,
    recorder: Recorder,
    stop: Stop,
    line: AbstractAsyncContextManager[Connection],
    prefix: str,
    token: Token,
    stream: int,
    rng: random.Random,
) -> None:
    """Record one stream and keep its token, until the stream breaks, its time is over, or `stop` is set."""
    async with line as connection:
        stub: Any = WatchStub(connection.channel)
        with translated("a coordinator"):
            call = stub.Watch(
                WatchRequest(job=options.job, prefix=prefix, token=token), metadata=connection.metadata
            )
            try:
                async with asyncio.timeout(rng.uniform(*STAY_S)):
                    async for response in call:
                        record(recorder, response, stream)
                        if response.HasField("token"):
                            token.CopyFrom(response.token)
                        if stop.is_set():
                            return
            except TimeoutError:
                return
            finally:
                call.cancel()


def record(recorder: Recorder, response: WatchResponse, stream: int) -> None:
    """Record one message, with digests instead of values."""
    events = [
        [
            event.key,
            event.mod_revision,
            event.create_revision,
            None if event.deleted else hashlib.sha256(event.value).hexdigest()[:16],
        ]
        for event in response.events
    ]
    reached = response.token.revision if response.HasField("token") else None
    recorder.note(
        "watch.message",
        stream=stream,
        result={"resync": response.resync, "events": events, "revision": reached, "uid": response.token.uid},
    )


WORKLOAD: Final = Workload(name="watches", clients=2, extra=3, client=client)

if __name__ == "__main__":
    sys.exit(main(WORKLOAD))
