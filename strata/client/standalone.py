"""A standalone process: it has no agent, and is a member of its job by itself, over gRPC."""

from __future__ import annotations

import asyncio
import logging
import os
import random
from typing import Final

from strata.client import fork
from strata.client.endpoints import Endpoint
from strata.client.inspection import Inspection
from strata.client.lone_watch import Words, lone_watch, own_stacks
from strata.client.loop import BackgroundLoop
from strata.client.member import MemberSession
from strata.client.seat import Seat, Watcher, connected, placed, running
from strata.client.stall_watch import kept
from strata.client.storage_wait import patience_s, wait_for_storage
from strata.client.unary import UnaryClient
from strata.config import Credentials
from strata.core.timing import Timing
from strata.errors import Unavailable
from strata.v1.members_pb2 import Registration

log: Final = logging.getLogger("strata.client")

SAY_S: Final = 10.0
"""After which a standalone process says that it waits."""


async def join(
    background: BackgroundLoop,
    endpoints: tuple[Endpoint, ...],
    registration: Registration,
    timing: Timing,
    credentials: Credentials,
    timeout_s: float | None,
) -> Seat:
    """Register as a member with one rank, and wait for a world that has a place for it.

    Without `timeout_s` only the first coordinator must answer in time: a world may wait for members
    that come tomorrow.
    """
    fork.allow_grpc()
    if registration.reexecutes:  # it trains by strata.init, which saves
        await _storage_takes_saves(registration.job, endpoints, credentials)
    deadline = None if timeout_s is None else asyncio.get_running_loop().time() + timeout_s
    watcher = Watcher()
    session = MemberSession(
        endpoints, registration, watcher, rng=random.Random(), timing=timing, credentials=credentials
    )
    watch = lone_watch(session.progress, detect_s=timing.detect_s, environment=os.environ)
    session.on_request = Inspection(session.evidence, own_stacks, lambda _rank: (), log=Words()).on_request
    waits = "waiting for a world with a place for %s in job %s"
    saying = asyncio.get_running_loop().call_later(
        SAY_S, log.warning, waits, registration.worker_id, registration.job
    )
    serving = running(background, session)
    try:
        await connected(session, timeout_s, "any coordinator")
        async with asyncio.timeout_at(deadline):
            place = await placed(
                session, watcher, job=registration.job, worker_id=registration.worker_id, after=0
            )
    except TimeoutError:
        await session.leave("no world came about in time")
        why = f": {session.world.world.reason}" if session.world is not None else ""
        raise Unavailable(
            f"no world with a place for this member within {timeout_s:g} s{why}",
            hint="the job waits for more members, or has as many as it takes: see `strata members`",
        ) from None
    except Unavailable:
        await session.leave("no coordinator answered in time")  # one may be registering this member
        raise
    except BaseException:
        serving.cancel()
        raise
    finally:
        saying.cancel()
    watch.watch(place.generation)
    watching = background.submit(kept(watch.run, Words()))
    serving.add_done_callback(lambda _ended: watching.cancel())
    return Seat(session=session, watcher=watcher, place=place, owns_member=True, watch=watch)


async def _storage_takes_saves(job: str, endpoints: tuple[Endpoint, ...], credentials: Credentials) -> None:
    unary = UnaryClient(endpoints, random.Random(), credentials)
    try:
        await wait_for_storage(
            unary, job=job, taken_up=False, say=log.warning, over=log.info, limit_s=patience_s(os.environ)
        )
    finally:
        await unary.close()
