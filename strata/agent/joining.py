"""The join barrier: the members of a world meet before any of them starts a rank.

The barrier has two uses. Its payload carries the address of the ranks' rendezvous. And no member passes the
barrier before every member has ended its ranks of the previous generation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable
from typing import Protocol

from strata.agent.rendezvous import JOIN_BARRIER
from strata.client.rank.barriers import payloads_of
from strata.errors import BarrierBroken, BarrierTimeout, StaleGeneration, StrataError
from strata.observe import get_logger
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.session_pb2 import WorldUpdate

log = get_logger()


class Upstream(Protocol):
    """The method that the join barrier needs of the session with the coordinators."""

    def arrive(self, arrival: Arrival) -> Awaitable[BarrierOutcome]:
        """Arrive and return the round's outcome; `StaleGeneration` if a newer world exists."""
        ...


async def join_barrier(
    upstream: Upstream,
    update: WorldUpdate,
    *,
    job: str,
    payload: bytes,
    timeout_s: float,
    superseded: Awaitable[None],
) -> dict[int, bytes] | None:
    """Return the payloads of the members of `update`'s world, by first rank, once every member has arrived.

    Return None if the world ended first, or `superseded` returned. `BarrierTimeout` names the members that did not
    arrive within `timeout_s`.
    """
    first, slots = update.place.first_rank, update.place.slots
    arrival = Arrival(
        job=job,
        name=JOIN_BARRIER,
        generation=update.world.generation,
        round=1,
        ranks=range(first, first + slots),
        payloads=[payload] + [b""] * (slots - 1),
        phases=["join"] * slots,
        timeout_ms=round(1000 * timeout_s),
    )

    async def arrived() -> BarrierOutcome:
        return await upstream.arrive(arrival)  # may raise before it returns an awaitable

    met = asyncio.ensure_future(arrived())
    over = asyncio.ensure_future(superseded)
    try:
        await asyncio.wait({met, over}, return_when=asyncio.FIRST_COMPLETED)
        return None if over.done() else payloads_of(met.result())
    except BarrierTimeout:
        raise  # a `BarrierBroken` that the caller has to act on
    except (StaleGeneration, BarrierBroken) as error:
        log.info("world.ended_early", generation=update.world.generation, reason=error.message)
        return None
    finally:
        met.cancel()
        over.cancel()
        with contextlib.suppress(asyncio.CancelledError, StrataError):
            await met
