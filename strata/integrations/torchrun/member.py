"""`AgentMember`: one torchrun agent as a member of its job, generation after generation.

The agent's thread calls `AgentMember.join` and reads `outdated`; all else runs in the process's background loop.

    join: the workers' failure is reported, if they failed → a newer world has a place for this agent
          → the join barrier → the place
    a newer world: `outdated` until `join` is called again
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from typing import Final

from strata.agent import agent_state
from strata.agent.environment import OURS, Place, rank_environment
from strata.agent.notices import LATE_S, LEAVE_S, notice_for_member
from strata.config.run import PROCESS
from strata.core.exit_codes import DO_NOT_REQUEUE, PREEMPTED
from strata.errors import JobFailed, Refused, Unavailable
from strata.integrations.torchrun.launcher import RankFailure
from strata.integrations.torchrun.meeting import Met, Offer, meet
from strata.integrations.torchrun.session import AgentSession
from strata.integrations.torchrun.settings import AgentSettings
from strata.observe import get_logger
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    StopNotice,
)
from strata.wire.worlds import stop_message

log = get_logger()

ASK_S: Final = 10.0
"""Timeout of the request that makes all agents leave."""
REACH_STEP_S: Final = 2.0

OpenStore = Callable[[str], Awaitable[int]]
"""Opens a new store at this node's address and returns its port."""


class Spare(Exception):
    """Raised if the job is done, and had no place for this agent at the end."""


class Preempted(Exception):
    """Raised if a notice made this agent leave, so that the scheduler requeues the job."""


class AgentMember:
    """A member with `settings.slots` workers. Made in any thread; its coroutines run in the loop."""

    def __init__(self, settings: AgentSettings) -> None:
        self._settings = settings
        self._session = AgentSession(settings, on_change=self._leave_if_over)
        self._handled = 0
        self._finishing = False
        self.stopped = False
        """Whether this agent's workers ended in response to a stop notice, so that the job continues later."""
        self._leaving: asyncio.Task[None] | None = None
        self._over_s = math.inf
        """When this agent first learnt that the generation joined last has ended."""
        self._address = ""
        self.place: Place | None = None
        """The place of this agent's workers in the generation joined last."""

    # -- what the agent's thread reads

    @property
    def outdated(self) -> bool:
        """Whether the workers of the generation joined last must end. Any thread; never blocks."""
        if self._session.error is not None:
            return True
        return agent_state.is_over(self._session.world, self.place)

    @property
    def must_restart(self) -> bool:
        """Whether the agent must end the workers now; leaving workers get `LEAVE_S` first. Any thread; never blocks."""
        leaves = (
            self.notice_for_member is not None and self.supports_graceful_stop and self._session.error is None
        )
        return self.outdated and not (leaves and time.monotonic() < self._over_s + LEAVE_S)

    @property
    def closed(self) -> bool:
        """Whether the job has ended, or this agent must leave it. Any thread; never blocks."""
        if isinstance(self._session.error, JobFailed | Refused) or self.notice_for_member is not None:
            return True
        update = self._session.world
        return update is not None and update.phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED}

    @property
    def standing_by(self) -> bool:
        """Whether there is a world without a place for this agent. Any thread; never blocks."""
        update = self._session.world
        return update is not None and not update.world.forming and not update.HasField("place")

    @property
    def notice_for_member(self) -> StopNotice | None:
        """The notice that makes this agent leave, or None. Any thread; never blocks."""
        return notice_for_member(self._session.world, self._settings.worker_id)

    @property
    def supports_graceful_stop(self) -> bool:
        """Whether every worker of this agent supports graceful stop. Any thread; never blocks."""
        return self._session.workers.supports_graceful_stop

    # -- its life

    async def run(self) -> None:
        """Hold the session, and the socket for the workers, until `leave`.

        If the session ends earlier, `join` raises its error.
        """
        await self._session.run()

    async def join(self, failure: RankFailure | None, open_store: OpenStore) -> tuple[Place, Met]:
        """Return the place of this agent's workers once all agents of a newer world have joined.

        The workers of the generation joined last must have ended. If that generation is still the newest, this
        call ends the generation, with `failure` as the reason. Raises the session's error, `Spare`,
        `Preempted`, or `Unavailable` if too few agents join within `join_timeout_s`.
        """
        self._end_generation(failure)
        self._check_must_leave()
        while True:
            update = await self._newer()
            self._handled = update.world.generation
            found = await self._meet(update, open_store)
            if found is not None:
                self.place, self._over_s = found[0], math.inf
                self._session.set_place(self.place)
                return found

    async def ended_within(self, limit_s: float) -> bool:
        """Return True once the generation joined last has ended, or False after `limit_s`."""
        return await self.comes_true(lambda: self.outdated, limit_s)

    async def comes_true(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once `condition` holds, checked at every update of the session; False after `limit_s`."""
        return await self._session.comes_true(condition, limit_s)

    async def reach(self, met: Met, limit_s: float) -> None:
        """Return once a connection to the workers' store succeeds.

        `OSError` after `limit_s`, or as soon as the generation has ended.
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
        """Report that all workers of this agent ended with success. Called in the loop, once the last worker
        has ended.
        """
        if self.place is None or self._finishing:
            return
        self._finishing = True
        stopped = self._session.workers.stopped
        self.stopped = stopped.issuperset(self.place.ranks)
        for rank in self.place.ranks:
            code = PREEMPTED if rank in stopped else 0
            self._session.agent.reports.report(self.place.generation, rank, code, "")
        self._leave_if_over()

    async def leave(self, failure: RankFailure | None = None) -> None:
        """Leave the job for good; return once the departure is delivered, or cannot be delivered.

        `failure` is the reason if torchrun gives up. If a notice made the workers stop, this sets `stopped`.
        """
        if failure is not None and self.place is not None:
            self.stopped = self._has_stopped(failure) or self.notice_for_member is not None
            if not self.outdated:
                self._report_end(self.place, failure)
        self.release()
        await self._session.agent.leave_once_reported(
            "its workers are done" if self._finishing else "the agent ends"
        )

    def release(self) -> None:
        """Let `run` end with the session, since the workers have ended. In the loop."""
        self._session.release()

    async def close(self) -> None:
        """Make every agent of the job leave without a save; return once the notice is recorded."""
        reason = f"closed by {self._settings.worker_id}"
        await self._session.upward.call(
            stop_message(self._settings.run_id, reason, grace_s=0.0), timeout_s=ASK_S
        )

    def environment(self) -> dict[str, str]:
        """Return Strata's environment variables for the workers, the same for all of them."""
        assert self.place is not None
        whole = rank_environment(
            self.place,
            local_rank=0,
            inherited={},
            restarts=0,
            stacks=self._session.workers.stacks(self.place.generation, "%r"),
            restart=PROCESS,
        )
        return {name: value for name, value in whole.items() if name.startswith(OURS)}

    async def preempt(self, why: str, give_up: Callable[[str], None]) -> None:
        """Make all ranks of the job stop together because of a signal; then all members leave, or only this one.

        `give_up` is called with a reason if the coordinators could not record the request, or the workers of this agent
        do not stop in time. Once they have stopped, torchrun calls `join`.
        """
        place = self.place
        if place is None:
            return
        try:
            notice = await self._session.agent.request_common_stop(place.generation, why)
        except Unavailable as error:
            give_up(f"the stop of the other ranks could not be requested: {error}")
            return
        if notice is None:
            give_up("the stop of the other ranks could not be requested")
        elif not await self.comes_true(lambda: self.place is not place, notice.grace_ms / 1000 + LATE_S):
            give_up("the workers did not stop within their time")

    # -- the end of a generation

    def _leave_if_over(self) -> None:
        """Leave a newer world if this agent's workers are done: torchrun cannot start them again."""
        update, place = self._session.world, self.place
        over = agent_state.is_over(update, place)
        self._over_s = min(self._over_s, time.monotonic()) if over else math.inf
        if not self._finishing or update is None or place is None or self._leaving is not None:
            return
        if update.world.generation != place.generation:
            self._leaving = asyncio.create_task(self._session.upward.leave("its workers are done"))

    def _end_generation(self, failure: RankFailure | None) -> None:
        place = self.place
        if place is None:
            return
        self._handled = max(self._handled, place.generation)
        if not self.outdated:
            first = place.member.first_rank
            self._report_end(
                place, failure or RankFailure(rank=first, code=1, reason="torchrun ended the workers")
            )
        self.place = None
        self._session.set_place(None)

    def _has_stopped(self, failure: RankFailure) -> bool:
        """Return whether a worker ended because of a stop notice, whatever its exit code."""
        update = self._session.world
        if update is None or not update.HasField("notice"):
            return False
        return failure.code == PREEMPTED or failure.rank in self._session.workers.stopped

    def _report_end(self, place: Place, failure: RankFailure) -> None:
        """Report how the workers of `place` ended; `failure` is the first failure among them."""
        if not self._has_stopped(failure):
            self._report(place.generation, failure)
            return
        # a worker that stops has saved; torchrun ends the other workers as soon as the first has ended
        for rank in place.ranks:
            self._report(place.generation, RankFailure(rank=rank, code=PREEMPTED, reason=failure.reason))

    def note_stopped(self, rank: int) -> None:
        """Record that a worker's session has reported a stop in response to a notice."""
        self._session.workers.stopped.add(rank)

    def _report(self, generation: int, failure: RankFailure) -> None:
        workers = self._session.workers
        if failure.code > 0 and (lasting := workers.lasting.get(failure.rank)) is not None:
            failure = RankFailure(rank=failure.rank, code=DO_NOT_REQUEUE, reason=lasting)
        reason = workers.evicted.get(failure.rank, failure.reason)
        self._session.agent.reports.report(generation, failure.rank, failure.code, reason)

    def _check_must_leave(self) -> None:
        if (notice := self.notice_for_member) is not None:
            raise Preempted(
                f"{self._settings.worker_id} is requested to leave job {self._settings.run_id}: {notice.reason}"
            )

    # -- the beginning of the next generation

    async def _newer(self) -> WorldUpdate:
        """Wait for a world newer than all handled ones, with a place for this agent."""
        loop, session = asyncio.get_running_loop(), self._session
        waited_s, before = 0.0, loop.time()
        while True:
            if session.error is not None:
                raise session.error
            update = session.world
            if update is not None and session.open:
                self._check_phase(update)
                self._check_must_leave()
                if session.workers.unfit and not update.HasField("place"):
                    raise Preempted(f"{self._settings.worker_id} leaves: {session.workers.unfit}")
                if update.world.generation > self._handled:
                    if (why := agent_state.waits_because(update)) is None:
                        return update
                    session.observer.warn_once("world.waiting", why)
            limit_s = self._settings.join_timeout_s
            if waited_s >= limit_s:
                raise Unavailable(
                    f"no world with a place for this agent within {limit_s:g} s{self._why()}",
                    hint="start more agents, or lower --nnodes; join_timeout of --rdzv-conf is that time",
                )
            await session.news(min(1.0, limit_s - waited_s))
            now = loop.time()
            if self._lacks_members():
                waited_s += now - before
            before = now

    def _check_phase(self, update: WorldUpdate) -> None:
        """Raise if the job has ended: no newer world can follow."""
        if update.phase == JOB_PHASE_FAILED:
            raise JobFailed(f"job {self._settings.run_id} has failed: {update.phase_reason}")
        if update.phase == JOB_PHASE_DONE:
            raise Spare(f"job {self._settings.run_id} is done: {update.phase_reason}")

    def _lacks_members(self) -> bool:
        """Return whether this agent waits for other agents, not for coordinators or as a standby."""
        upward = self._session.upward
        if upward.welcome is None:
            return True
        return upward.connected and agent_state.lacks_members(upward.world, handled=self._handled)

    def _why(self) -> str:
        upward = self._session.upward
        if upward.welcome is None:
            failure = upward.last_error
            return f": {failure.message}" if failure is not None else ": no coordinator answered"
        reason = upward.world.world.reason if upward.world is not None else ""
        return f": {reason}" if reason else ""

    async def _meet(self, update: WorldUpdate, open_store: OpenStore) -> tuple[Place, Met] | None:
        """Return the workers' place and store once every agent has joined; None if the world has ended."""
        first_rank, settings, agent = update.place.first_rank, self._settings, self._session.agent
        address = await agent.address()
        port = await open_store(address) if first_rank == 0 else 0
        offer = Offer(role=settings.role, slots=settings.slots, address=address, port=port)
        payloads = await agent.meet(update, offer.encode(), superseded=self._superseded(update))
        if payloads is None:
            return None
        met = meet(payloads, size=update.world.size, first_rank=first_rank, role=settings.role)
        return agent.place(update, master_addr=met.address, master_port=met.port), met

    async def _superseded(self, update: WorldUpdate) -> None:
        """Return once `update` is no longer the newest world, or this agent must no longer wait for its members."""
        while not agent_state.is_outdated(update, self._session.world):
            await self._session.news(None)
