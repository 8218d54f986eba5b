"""One torchrun agent as a member of its job: what `strata run`'s supervisor is to its ranks.

torchrun keeps the processes, so this side has only to know the world, to meet the others in it, to
say how the workers ended, and to let those that use the library attach. All of it runs in the
process's background loop; the agent's thread asks by `AgentMember.join` and reads `outdated`.

    join: the workers' failure is told, if that is why → a newer world has a place here
          → the join barrier → the place
    a newer world: `outdated` until `join` is called again
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from strata.client import MemberSession
from strata.config import HealthConfig
from strata.config.run import PROCESS
from strata.core.exit_codes import PREEMPTED
from strata.core.timing import Timing
from strata.errors import BarrierTimeout, JobFailed, Refused, StrataError, Unavailable
from strata.integrations.torchrun import orphans
from strata.integrations.torchrun.launcher import RankFailure
from strata.integrations.torchrun.meeting import Met, Offer, meet
from strata.integrations.torchrun.settings import AgentSettings
from strata.launch.addresses import address_towards
from strata.launch.environment import OURS, Place, rank_environment
from strata.launch.health import Health, SomebodyElses
from strata.launch.joining import join_barrier
from strata.launch.relay import Relay
from strata.launch.relay_server import serving
from strata.launch.reports import ExitReports
from strata.observe import get_logger
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Welcome, WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    JOB_PHASE_PAUSED,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    JobSpec,
    StopJobRequest,
    StopNotice,
)

log = get_logger()

WORLD_JOIN_S: Final = 300.0
"""How long the members of a world wait for each other: an agent ends its workers before it joins."""
REACH_STEP_S: Final = 2.0
TELL_S: Final = 10.0
"""How long the end of a worker may take to become durable before an agent that ends gives up."""

OpenStore = Callable[[str], Awaitable[int]]
"""Opens a fresh store at this node's address and returns its port."""


class Spare(Exception):
    """The job is done, and had no place for this agent at the end."""


class Preempted(Exception):
    """This agent was asked to leave, and the job is to be put back into its queue."""


class AgentMember:
    """A member with `settings.slots` workers. Made in any thread; its coroutines run in the loop."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        registration = Registration(
            job=settings.run_id,
            worker_id=settings.worker_id,
            boot=uuid.uuid4().hex,
            host=settings.host,
            slots=settings.slots,
            pid=settings.pid,
            attempt=settings.attempt,
            spec=JobSpec(
                min_workers=settings.min_nodes,
                max_workers=settings.max_nodes,
                settle_s=settings.settle_s,
                max_fruitless_generations=settings.max_fruitless_generations,
            ),
        )
        self._session = MemberSession(
            settings.endpoints, registration, self, rng=random.Random(), credentials=settings.credentials
        )
        self._reports = ExitReports(self._session)
        self._news = asyncio.Event()
        self._relay: Relay | None = None
        self._health: Health | None = None
        self._door = Path()
        self._detect_s = 0.0
        self._handled = 0
        self._finishing = False
        self._told: set[str] = set()
        self._leaving: asyncio.Task[None] | None = None
        self.place: Place | None = None
        """Where the workers of the generation joined last stand."""
        self.met: Met | None = None

    # -- what the agent's thread reads

    @property
    def outdated(self) -> bool:
        """Whether the workers of the generation joined last are to end. Any thread; never blocks."""
        notice = self.asked_to_leave
        return self._over or (notice is not None and not notice.grace_ms)

    @property
    def _over(self) -> bool:
        """Whether the generation joined last has ended, or everything has."""
        place, update = self.place, self._session.world
        if place is None or self._session.error is not None:
            return True
        if update is None:
            return False
        return update.world.generation != place.generation or update.phase == JOB_PHASE_FAILED

    @property
    def closed(self) -> bool:
        """Whether the job has ended, or this agent is to leave it. Any thread; never blocks."""
        update = self._session.world
        if isinstance(self._session.error, JobFailed | Refused) or self.asked_to_leave is not None:
            return True
        return update is not None and update.phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED}

    @property
    def standing_by(self) -> bool:
        """Whether there is a world, and it has no place for this agent. Any thread; never blocks."""
        update = self._session.world
        return update is not None and not update.world.forming and not update.HasField("place")

    @property
    def asked_to_leave(self) -> StopNotice | None:
        """The notice by which this agent was asked to leave: one for all, or one that names it."""
        update = self._session.world
        if update is None or not update.HasField("notice"):
            return None
        notice = update.notice
        named = notice.action == STOP_ACTION_DRAIN and self._settings.worker_id in notice.worker_ids
        return notice if named or notice.action == STOP_ACTION_PREEMPT else None

    # -- its life

    async def run(self) -> None:
        """Hold the session, and the door that workers attach at, until `leave`.

        What ended the session meanwhile is raised by `join`.
        """
        session = asyncio.create_task(self._session.run(), name="session")
        connected = asyncio.create_task(self._session.wait_connected())
        try:
            await asyncio.wait({session, connected}, return_when=asyncio.FIRST_COMPLETED)
            if self._session.welcome is None:
                return
            timing = Timing.derive(self._session.welcome.detect_s)
            self._detect_s = timing.detect_s
            with tempfile.TemporaryDirectory(prefix="strata-") as folder:
                door = Path(folder) / "ranks.sock"
                health = Health(HealthConfig(), self._session, SomebodyElses(), detect_s=timing.detect_s)
                relay = Relay(
                    self._session,
                    worker_id=self._settings.worker_id,
                    detect_s=timing.detect_s,
                    grace_s=timing.reconnect_grace_s,
                    listener=health.stalls,
                    on_attached=lambda _rank, _generation: None,
                    on_silent=self._silent,
                )
                async with serving(relay, door, timing), health.watching(), orphans.ended_with_us(door):
                    self._relay, self._health, self._door = relay, health, door
                    self._news.set()
                    await asyncio.wait({session})
        finally:
            for task in (session, connected):
                task.cancel()
            await asyncio.gather(session, connected, return_exceptions=True)
            self._news.set()

    async def join(self, failure: RankFailure | None, open_store: OpenStore) -> tuple[Place, Met]:
        """Return where this agent's workers stand, once all agents of a newer world are there.

        Workers of the generation joined last do not run any more. If it was still the newest, it
        ends by this, because of `failure`. Raises what ended the session, `Spare`, `Preempted`, or
        `Unavailable` when `join_timeout_s` went by without enough agents.
        """
        self._end_generation(failure)
        self._check_asked()
        while True:
            update = await self._newer()
            self._handled = update.world.generation
            found = await self._meet(update, open_store)
            if found is None:
                continue
            self.place, self.met = found
            assert self._relay is not None
            assert self._health is not None
            self._relay.set_place(self.place)
            self._health.set_place(self.place)
            return found

    async def ended_within(self, limit_s: float) -> bool:
        """Return True once the generation joined last has ended, False if it has not by then."""
        return await self.comes_true(lambda: self.outdated, limit_s)

    async def comes_true(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once `condition`, looked at with every news of the session, holds; else False."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            return False
        return True

    async def reach(self, met: Met, limit_s: float) -> None:
        """Return once a connection to where the workers meet could be made.

        `OSError` after `limit_s`, or at once when the generation has ended.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while True:
            try:
                async with asyncio.timeout(REACH_STEP_S):
                    _reader, writer = await asyncio.open_connection(met.address, met.port)
            except (OSError, TimeoutError) as error:
                if self.outdated:
                    raise ConnectionAbortedError("the generation has ended") from None
                if loop.time() > deadline:
                    raise ConnectionError(f"not reached within {limit_s:g} s: {error}") from None
                await self.ended_within(0.1)
            else:
                writer.close()
                return

    def finished(self) -> None:
        """Say that all workers here ended well. Called in the loop, once the last of them has."""
        if self.place is None or self._finishing:
            return
        self._finishing = True
        for rank in self.place.ranks:
            self._reports.report(self.place.generation, rank, 0, "")
        self._leave_if_over()

    async def leave(self, failure: RankFailure | None = None) -> None:
        """Go for good; return once that is known or nobody hears it."""
        if failure is not None and self.place is not None and not self._over:
            self._reports.report(self.place.generation, failure.rank, failure.code, failure.reason)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_S):
                await self._reports.told()
        await self._session.leave("its workers are done" if self._finishing else "the agent ends")

    async def close(self) -> None:
        """Have every agent of the job leave, without a save; return once they are asked."""
        reason = f"closed by {self._settings.worker_id}"
        request = StopJobRequest(
            job=self._settings.run_id, action=STOP_ACTION_PREEMPT, reason=reason, now=True
        )
        await self._session.call(request, timeout_s=TELL_S)

    def environment(self) -> dict[str, str]:
        """Return what workers find of Strata in their environment; the same for all of them."""
        assert self.place is not None
        whole = rank_environment(
            self.place, local_rank=0, inherited={}, restarts=0, stacks="", restart=PROCESS
        )
        del whole["STRATA_STACKS"]  # a file a rank
        return {name: value for name, value in whole.items() if name.startswith(OURS)}

    # -- the observer of its session

    def on_connected(self, welcome: Welcome) -> None:
        self._told.clear()
        log.info("session.connected", replica=welcome.replica, incarnation=welcome.incarnation)
        self._news.set()

    def on_disconnected(self, reason: StrataError) -> None:
        self._tell("session.disconnected", reason.message)
        self._news.set()

    def on_world(self, update: WorldUpdate) -> None:
        if self._relay is not None:
            self._relay.on_world(update)
        self._leave_if_over()
        self._news.set()

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        if self._relay is not None:
            self._relay.on_outcome(outcome)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._relay is not None:
            self._relay.on_checkpoint(checkpoint)

    # -- inside

    def _leave_if_over(self) -> None:
        """An agent whose workers are done takes no part in a newer world: it cannot start them again."""
        update, place = self._session.world, self.place
        if not self._finishing or update is None or place is None or self._leaving is not None:
            return
        if update.world.generation != place.generation:
            self._leaving = asyncio.create_task(self._session.leave("its workers are done"))

    def _end_generation(self, failure: RankFailure | None) -> None:
        place = self.place
        if place is None:
            return
        self._handled = max(self._handled, place.generation)
        if not self._over:
            update = self._session.world
            told = failure or RankFailure(
                rank=place.member.first_rank, code=1, reason="torchrun ended the workers"
            )
            if self.outdated:  # this agent was asked to end them at once
                told = RankFailure(rank=told.rank, code=PREEMPTED, reason="ended at once, as asked")
            stopped = told.code == PREEMPTED and update is not None and update.HasField("notice")
            # who stops has saved; torchrun ends the others as soon as the first of them is gone
            for rank in place.ranks if stopped else (told.rank,):
                self._reports.report(place.generation, rank, told.code, told.reason)
        self.place = None
        if self._relay is not None and self._health is not None:
            self._relay.set_place(None)
            self._health.set_place(None)

    async def _newer(self) -> WorldUpdate:
        """Return a world newer than all handled ones, with a place here."""
        loop = asyncio.get_running_loop()
        waited_s, before = 0.0, loop.time()
        while True:
            self._news.clear()
            if self._session.error is not None:
                raise self._session.error
            update = self._session.world
            if update is not None and self._relay is not None:
                self._check_phase(update)
                self._check_asked()
                if self._is_ours(update):
                    return update
            limit_s = self._settings.join_timeout_s
            if waited_s >= limit_s:
                raise Unavailable(
                    f"no world with a place for this agent within {limit_s:g} s{self._why()}",
                    hint="start more agents, or lower --nnodes; join_timeout of --rdzv-conf is that time",
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(1.0, limit_s - waited_s)):
                    await self._news.wait()
            now = loop.time()
            if self._lacks_members():
                waited_s += now - before
            before = now

    def _is_ours(self, update: WorldUpdate) -> bool:
        world = update.world
        if world.generation <= self._handled:
            return False
        if world.forming:
            self._tell("world.waiting", world.reason)
            return False
        if not update.HasField("place"):
            self._tell(
                "world.waiting", f"the job has the {world.members} agents it takes; this one stands by"
            )
            return False
        return True

    def _check_phase(self, update: WorldUpdate) -> None:
        """Raise when the job has ended, and with it all that could be waited for."""
        if update.phase == JOB_PHASE_FAILED:
            raise JobFailed(f"job {self._settings.run_id} has failed: {update.phase_reason}")
        if update.phase == JOB_PHASE_DONE:
            raise Spare(f"job {self._settings.run_id} is done: {update.phase_reason}")

    def _check_asked(self) -> None:
        if (notice := self.asked_to_leave) is not None:
            raise Preempted(
                f"{self._settings.worker_id} was asked to leave job {self._settings.run_id}: {notice.reason}"
            )

    def _lacks_members(self) -> bool:
        """Whether it is for others that this agent waits: not for coordinators, nor as a spare."""
        update = self._session.world
        if self._session.welcome is None:
            return True
        if not self._session.connected or (update is not None and update.phase == JOB_PHASE_PAUSED):
            return False
        return update is None or update.world.forming or update.world.generation <= self._handled

    def _why(self) -> str:
        if self._session.welcome is None:
            trouble = self._session.last_trouble
            return f": {trouble.message}" if trouble is not None else ": no coordinator answered"
        update = self._session.world
        return f": {update.world.reason}" if update is not None and update.world.reason else ""

    async def _meet(self, update: WorldUpdate, open_store: OpenStore) -> tuple[Place, Met] | None:
        """Return where the workers stand and meet, once every agent is there; None if the world ended."""
        world, place, settings = update.world, update.place, self._settings
        log.info(
            "world.joining",
            generation=world.generation,
            size=world.size,
            first_rank=place.first_rank,
            reason=world.reason,
        )
        address = settings.local_addr or address_towards(
            settings.endpoints[0].host, settings.endpoints[0].port
        )
        port = await open_store(address) if place.first_rank == 0 else 0
        offer = Offer(role=settings.role, slots=settings.slots, address=address, port=port)
        try:
            payloads = await join_barrier(
                self._session,
                update,
                job=settings.run_id,
                payload=offer.encode(),
                timeout_s=WORLD_JOIN_S,
                superseded=self._superseded(update),
            )
        except BarrierTimeout as error:
            # an agent is there and does not join: this world comes to nothing, and must say so
            log.warning("world.not_joined", generation=world.generation, reason=error.message)
            why = f"the world was not joined: {error.message}"
            self._reports.report(world.generation, place.first_rank, 1, why)
            return None
        if payloads is None:
            return None
        met = meet(payloads, size=world.size, first_rank=place.first_rank, role=settings.role)
        return self._place(update, met), met

    def _place(self, update: WorldUpdate, met: Met) -> Place:
        return Place(
            job=self._settings.run_id,
            worker_id=self._settings.worker_id,
            world=update.world,
            member=update.place,
            master_addr=met.address,
            master_port=met.port,
            socket=str(self._door),
            endpoints=",".join(str(endpoint) for endpoint in self._settings.endpoints),
            detect_s=self._detect_s,
        )

    async def _superseded(self, update: WorldUpdate) -> None:
        while True:
            newest = self._session.world
            if newest is not None and (
                newest.world.generation != update.world.generation or newest.phase != update.phase
            ):
                return
            self._news.clear()
            await self._news.wait()

    def _silent(self, rank: int, generation: int) -> None:
        """End a worker whose process lives but answers no more; the agent then finds it ended."""
        if self._relay is None or (pid := self._relay.pid(rank)) is None:
            return
        log.warning("rank.killed", rank=rank, pid=pid, reason=f"it did not answer for {self._detect_s:g} s")
        orphans.end_child(pid)

    def _tell(self, event: str, reason: str) -> None:
        if reason not in self._told:  # once a reason, not once a try
            self._told.add(reason)
            log.warning(event, reason=reason)
