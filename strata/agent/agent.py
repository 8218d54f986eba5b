"""`Agent`: a node's membership in a job, the same for every launcher of its ranks.

Every node has an agent: the process of `strata run`, or torchrun's agent process. This module has the steps that both
agents need: meet the other members of a new world, report rank exits, request a common stop, leave the job. The agent's
owner decides which processes are the ranks and when they start and end. Ranks attach at the socket of `agent.serving`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from socket import gethostname
from typing import Any, Final, Protocol

from google.protobuf.message import Message

from strata.agent.addresses import find_route_towards
from strata.agent.environment import Place
from strata.agent.exit_reports import ExitReports
from strata.agent.joining import join_barrier
from strata.agent.notices import request_common_stop
from strata.config.training import PREEMPT_MEMBER
from strata.errors import BarrierTimeout
from strata.observe import get_logger
from strata.session.endpoints import Endpoint
from strata.session.terms import EXIT_REPORT_S
from strata.transport import name_lookup
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import StopNotice

log = get_logger()

REPORT_S: Final = 5.0
"""How long a leaving agent waits for its rank exits to become durable before it logs that it is waiting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """The settings of this member, known from the start."""

    job: str
    worker_id: str
    endpoints: tuple[Endpoint, ...]
    shown_endpoints: str
    """Value of STRATA_ENDPOINTS in the ranks' environment."""
    address: str = ""
    """Address of this node for other nodes; "" means the local address of the route to a coordinator."""
    join_timeout_s: float
    """How long the members of a world wait for each other."""
    preempt: str
    """Which members leave when this node gets a signal: all members of the job, or only this one."""
    preempt_grace_s: float
    """How long the ranks may take, after such a signal, to save a common step."""


class Upstream(Protocol):
    """The methods the agent needs of its session with the coordinators."""

    def arrive(self, arrival: Arrival) -> Awaitable[BarrierOutcome]:
        """Arrive and return the round's outcome; `StaleGeneration` if a newer world exists."""
        ...

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        """Return the response to `request`, which must be of a kind that a session carries."""
        ...

    async def rank_exit(
        self, *, generation: int, rank: int, code: int, reason: str, early: bool = False
    ) -> None:
        """Return once the exit of a rank is durable, or its generation has ended."""
        ...

    async def leave(self, reason: str) -> None:
        """Return once the coordinators have removed this member, or the time limit has passed."""
        ...


class Admission(Protocol):
    """The attachment point of this node's ranks."""

    def set_place(self, place: Place | None) -> None:
        """Admit only the ranks of `place` from now on; None admits no rank."""
        ...

    def in_process(self) -> frozenset[int]:
        """Return the local ranks that are attached and can go on in another generation."""
        ...

    def move(self, place: Place, local_ranks: Collection[int]) -> None:
        """Send these local ranks of the previous generation their place in the new one."""
        ...


class Agent:
    """One member: its session with the coordinators, its reports to the coordinators, and the place of its ranks.

    `socket`, `detect_s` and `admission` are set once the agent serves ranks.
    """

    def __init__(
        self, config: AgentConfig, upstream: Upstream, *, socket: Path = Path(), detect_s: float = 0.0
    ) -> None:
        self.config = config
        self.socket = socket
        self.detect_s = detect_s
        self.admission: Admission | None = None
        self.reports = ExitReports(upstream)
        self._upstream = upstream
        self._address = ""

    def set_place(self, place: Place | None) -> None:
        """Admit only the ranks of `place` from now on; None admits no rank."""
        if self.admission is not None:
            self.admission.set_place(place)

    def in_process(self) -> frozenset[int]:
        """Return the local ranks that are attached and can go on in another generation."""
        return self.admission.in_process() if self.admission is not None else frozenset()

    def move(self, place: Place, local_ranks: Collection[int]) -> None:
        """Send these local ranks of the previous generation their place in the new one."""
        if self.admission is not None:
            self.admission.move(place, local_ranks)

    async def address(self) -> str:
        """Return this node's address for other nodes: the configured address, or the local address of the route
        to a coordinator.

        Without a route, return the host's name; the next call looks for a route again. A slow name service delays the
        call.
        """
        if not self._address:
            coordinator, given = self.config.endpoints[0], self.config.address
            self._address = given or await find_route_towards(coordinator.host, coordinator.port)
            address = self._address or gethostname()
            name_lookup.warn_if_slow(address, lambda text: log.warning("names.slow", reason=text))
            return address
        return self._address

    # -- a new world

    async def meet(
        self, update: WorldUpdate, payload: bytes, *, superseded: Awaitable[None]
    ) -> Mapping[int, bytes] | None:
        """Return the payloads of `update`'s members, keyed by each member's first rank, once every member has arrived.

        Return None if that world did not start: it ended, `superseded` returned, or a member did not arrive in time.
        A missing member is reported as a rank exit, so that the generation ends and the reason names that member.
        """
        world, first_rank = update.world, update.place.first_rank
        log.info(
            "world.joining",
            generation=world.generation,
            size=world.size,
            first_rank=first_rank,
            reason=world.reason,
        )
        try:
            return await join_barrier(
                self._upstream,
                update,
                job=self.config.job,
                payload=payload,
                timeout_s=self.config.join_timeout_s,
                superseded=superseded,
            )
        except BarrierTimeout as error:
            log.warning("world.not_joined", generation=world.generation, reason=error.message)
            reason = f"the world was not joined: {error.message}"
            self.reports.report(world.generation, first_rank, 1, reason)
            return None

    def place(self, update: WorldUpdate, *, master_addr: str, master_port: int) -> Place:
        """Return the place of this member's ranks in `update`'s world, with the address of their rendezvous."""
        return Place(
            job=self.config.job,
            worker_id=self.config.worker_id,
            world=update.world,
            member=update.place,
            master_addr=master_addr,
            master_port=master_port,
            socket=str(self.socket),
            endpoints=self.config.shown_endpoints,
            detect_s=self.detect_s,
            preempt=self.config.preempt,
            preempt_grace_s=self.config.preempt_grace_s,
        )

    # -- the end

    async def request_common_stop(
        self, generation: int, why: str, *, timeout_s: float | None = None
    ) -> StopNotice | None:
        """Request a common stop of all ranks of the generation; return the notice in force, or None.

        By `config.preempt`, either all members leave at that stop, or only this one. `Unavailable` if no coordinator
        answers in time.
        """
        return await request_common_stop(
            self._upstream,
            job=self.config.job,
            generation=generation,
            leaving=[self.config.worker_id] if self.config.preempt == PREEMPT_MEMBER else [],
            reason=f"{why} to {self.config.worker_id}",
            grace_s=self.config.preempt_grace_s,
            timeout_s=timeout_s,
        )

    async def leave(self, reason: str) -> None:
        """Leave the job for good; return once a coordinator confirms the departure, or after a time limit."""
        await self._upstream.leave(reason)

    async def leave_once_reported(
        self, reason: str, *, shorten_deadline: asyncio.Event | None = None
    ) -> None:
        """Leave the job for good once the exits of this member's ranks are durable, at the latest after
        `EXIT_REPORT_S`.

        After `REPORT_S`, setting `shorten_deadline` ends this wait.
        """
        await self.reports.wait_delivered(REPORT_S)
        if not self.reports.all_delivered:
            log.warning(
                "agent.exit_unreported", reason=f"no coordinator reached; waiting {EXIT_REPORT_S:g} s for one"
            )
            waits = [asyncio.ensure_future(self.reports.wait_delivered(EXIT_REPORT_S - REPORT_S))]
            if shorten_deadline is not None:
                waits.append(asyncio.ensure_future(_set(shorten_deadline)))
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
        await self.leave(reason)


async def _set(event: asyncio.Event) -> None:
    await event.wait()
