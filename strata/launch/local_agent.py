"""The agent of `strata run`: one member of a job, which runs its ranks generation after generation.

Its actions follow from three things only: the newest `WorldUpdate`, the ranks that run here, and whether a signal or
a notice requested a stop. Each generation takes these steps:

    1. A world with a place for this member arrives.
    2. The agent ends the ranks of the previous generation.
    3. The members meet at the join barrier.
    4. The agent starts its ranks, which run until they end or a newer world comes.

With `--restart=in_process` the agent does not end ranks that can continue in their process. It sends these
ranks their place in the new generation, and they have `restart_grace_s` to attach again. A new process replaces
a rank that does not attach in time.

`slots` runs the ranks; `agent.agent` meets the other members and reports rank exits. If the coordinators are lost,
ranks go on, and the agent delivers its reports later.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from strata.agent.agent import Agent
from strata.agent.agent_state import is_outdated, waits_because
from strata.agent.environment import Place
from strata.agent.health.stack_request import process_state
from strata.agent.notices import SAY_S, notice_for_member
from strata.agent.rendezvous import Meeting
from strata.config import RunConfig
from strata.config.run import IN_PROCESS
from strata.core.exit_codes import DO_NOT_REQUEUE, PREEMPTED
from strata.errors import Unavailable
from strata.launch import exit_status
from strata.launch.rank_logs import RankLogs
from strata.launch.rank_output import RankOutputs
from strata.launch.ranks import Program, RankGroup, inherited_environment
from strata.launch.slots import Slots
from strata.launch.stopping import Stopping, StopRequest
from strata.launch.warm.starting import Starter
from strata.observe import get_logger
from strata.session.terms import EXIT_REPORT_S
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, JOB_PHASE_PAUSED, StopNotice

log = get_logger()


class LocalAgent:
    """Has `starter` start the command once per slot, in every generation that has a place for `agent`'s member.

    Gives `agent` each new place of the ranks here. `folder` belongs to this agent alone.
    """

    def __init__(
        self,
        config: RunConfig,
        starter: Starter,
        agent: Agent,
        *,
        folder: Path,
        wait_graceful_stop_support: Callable[[], bool] = lambda: False,
        outputs: RankOutputs | None = None,
    ) -> None:
        """`wait_graceful_stop_support` tells whether the command's ranks will support graceful stop once they run.

        `outputs` is the object given to `starter`, if the ranks' output goes through this process.
        """
        self._config = config
        self._agent = agent
        self._worker_id = agent.config.worker_id
        self._wait_graceful_stop_support = wait_graceful_stop_support
        self._graceful_stop_seen = False
        self._reports = agent.reports
        inherited = inherited_environment()
        self._slots = Slots(
            Program(
                starter=starter,
                inherited=outputs.environment(inherited) if outputs is not None else inherited,
                folder=folder,
                restart=config.restart,
                logs=RankLogs.of_run(config),
                piped=outputs is not None,
            ),
            count=config.slots,
            prepare_after_s=config.warm_after_s,
            on_exit=self._reports.report,
        )
        self.logs = self._slots.logs
        """Returns the files of a rank's output."""
        self._stop = StopRequest()
        self._stopping = Stopping(
            self._slots,
            self._reports,
            stop_grace_s=config.stop_grace_s,
            restart_grace_s=config.restart_grace_s,
            urgent=self._stop.urgent,
        )
        self._update: WorldUpdate | None = None
        self._news = asyncio.Event()
        self._handled = 0
        self._first = True
        """Whether this member has not had a place in any world yet."""
        self._unfit = ""
        self._no_coordinator = False
        """Whether no coordinator could be reached to request a common stop."""

    # -- events from the session, the relay, signals and devices

    def on_world(self, update: WorldUpdate) -> None:
        """Record a newer world or phase; an update older than the known one is ignored."""
        known = self._update
        if known is None or update.token.revision >= known.token.revision:
            self._update = update
            self._news.set()

    def request_stop(self, number: int) -> None:
        """Stop because of a signal; at a second signal, end the ranks without any grace.

        If the signal is one that preempts and the ranks here support graceful stop, all ranks of the job stop together.
        Otherwise the ranks here get SIGTERM and `stop_grace_s`.
        """
        self._stop.on_signal(number)
        self._news.set()

    def become_unfit(self, reason: str) -> None:
        """Leave as soon as no rank runs here: this member must not run ranks again."""
        self._unfit = reason
        self._news.set()

    def rank_attached(self, rank: int, generation: int) -> None:
        """Record that a rank was admitted; if its process continues, the rank has now arrived in its new generation."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            ranks.arrived(rank)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """Kill a rank of this generation; its exit report carries the reason."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            ranks.doom(rank, reason)

    def rank_dumps_core(self, rank: int, generation: int, reason: str) -> None:
        """Report the exit of a rank of this generation now, though its process is still writing a core file."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            ranks.dumps_core(rank, reason)

    def may_request_stop(self) -> bool:
        """Return True: the agent withdraws the place of ranks before it ends them, so they cannot request a stop."""
        return True

    async def stack(self, rank: int) -> str | None:
        """Return the stacks of a rank's threads; None if the rank does not run here or does not answer."""
        ranks = self._slots.ranks
        return await ranks.stack(rank) if ranks is not None else None

    def process(self, rank: int) -> str:
        """Return the state of a rank's process; "" if the process is not here or its state is unreadable."""
        return process_state(self._slots.ranks.pid(rank)) if self._slots.ranks is not None else ""

    def rank_supports_graceful_stop(self, rank: int, generation: int) -> None:
        """Record that a rank stops by itself at a stop request to its generation."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            self._graceful_stop_seen = True
            ranks.note_graceful_stop_support(rank)

    def rank_stepped(self, rank: int, generation: int) -> None:
        """Record that a rank has made a step."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            ranks.note_step(rank)

    def rank_cannot_go_on(self, rank: int, generation: int, reason: str) -> None:
        """Record that a rank is about to end for a reason that a restart would not cure."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            ranks.note_lasting(rank, reason)

    def rank_stopped(self, rank: int, generation: int) -> None:
        """Record that a rank has stopped as requested, whatever the exit code of its process is."""
        ranks = self._slots.ranks
        if ranks is not None and ranks.place.generation == generation:
            ranks.note_stopped(rank)

    # -- the main loop

    async def run(self) -> int:
        """Return the exit status once the job has ended, or a signal or a notice made this member stop."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._stop.requested.is_set():
                    return await self._stop_now()
                update = self._update
                if update is None:
                    continue
                if update.phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED}:
                    return await self._finish(update)
                if self._unfit and not update.HasField("place"):
                    return await self._leave_preempted(self._unfit)
                if update.world.generation > self._handled:
                    self._handled = update.world.generation
                    await self._end_ranks(self._grace_s(update), keep=self._continuing(update))
                    if not self._stop.requested.is_set():
                        await self._begin(update)
                notice, ranks = notice_for_member(update, self._worker_id), self._slots.ranks
                if notice is not None:
                    if await self._stopping.obey(
                        notice, shorten_deadline=partial(self._until_urgent_or_outdated, update)
                    ):
                        self._news.set()  # `obey` looked at newer updates only to shorten its deadline
                    shorten_deadline = self._stop.next_signal
                    if (ended := await self._done_after_all(ranks, shorten_deadline)) is not None:
                        return await self._finish(ended)
                    return await self._leave_preempted(notice.reason, shorten_deadline)
        finally:
            self._slots.kill()
            self._agent.set_place(None)

    async def _begin(self, update: WorldUpdate) -> None:
        """Meet the other members and start this generation's ranks, unless the generation ends earlier."""
        world = update.world
        if (waits := waits_because(update)) is not None:
            log.info("world.waiting", generation=world.generation, reason=waits)
            self._slots.prepare()
            return
        if self._config.new and self._first and world.HasField("restore"):
            job = self._config.job
            log.warning(
                "new.without_effect",
                reason=f"--new has no effect: job {job} is unfinished and goes on from step {world.restore.step}",
                hint=f"to begin from nothing, choose another --job, or delete this one: strata jobs delete {job}",
            )
        self._first = False
        meeting = await self._meet(update)
        if meeting is not None:
            place = self._agent.place(update, master_addr=meeting.address, master_port=meeting.port)
            self._agent.set_place(place)
            self._move(place, self._slots.start(place))

    def _continuing(self, update: WorldUpdate) -> frozenset[int]:
        """Return the local ranks whose processes are kept: they continue in `update`'s world, or wait for a world.

        While the job is paused, no process continues: a pause may be long, and the process would occupy device memory.
        """
        placed = update.HasField("place") or (update.world.forming and update.phase != JOB_PHASE_PAUSED)
        return self._agent.in_process() if placed and self._config.restart == IN_PROCESS else frozenset()

    def _move(self, place: Place, local_ranks: frozenset[int]) -> None:
        """Send kept processes their new place, and replace those that do not attach in time."""
        ranks = self._slots.ranks
        if local_ranks and ranks is not None:
            self._agent.move(place, local_ranks)
            asyncio.get_running_loop().call_later(self._config.restart_grace_s, ranks.give_up)

    async def _meet(self, update: WorldUpdate) -> Meeting | None:
        """Return the rendezvous address once every member has arrived; None if the world has ended."""
        offer = b""
        if update.place.first_rank == 0:
            offer = self._slots.offer(await self._agent.address()).encode()
        try:
            payloads = await self._agent.meet(update, offer, superseded=self._superseded(update))
            return None if payloads is None else Meeting.decode(payloads.get(0, b""))
        finally:
            self._news.set()

    async def _superseded(self, update: WorldUpdate) -> None:
        """Return once a newer world or phase is known, or a stop was requested."""
        while not self._stop.requested.is_set() and not is_outdated(update, self._update):
            self._news.clear()
            await self._news.wait()

    async def _until_urgent_or_outdated(self, update: WorldUpdate) -> None:
        """Return once ranks that stop together get no more time: the stop is urgent, or `update` is outdated."""
        while not self._stop.urgent.is_set() and not is_outdated(update, self._update):
            self._news.clear()
            await self._news.wait()
        self._news.set()

    def _grace_s(self, update: WorldUpdate) -> float:
        """Return how long ranks may take to end: `stop_grace_s` before a departure or pause, else `restart_grace_s`."""
        stops = notice_for_member(update, self._worker_id) is not None or update.phase == JOB_PHASE_PAUSED
        return self._config.stop_grace_s if stops else self._config.restart_grace_s

    async def _end_ranks(self, grace_s: float, *, keep: frozenset[int] = frozenset()) -> None:
        self._agent.set_place(None)
        await self._slots.end(grace_s, urgent=self._stop.urgent, keep=keep)

    # -- the end

    async def _finish(self, update: WorldUpdate) -> int:
        """End the ranks that still run and leave, because the job has ended; return the exit status."""
        done = update.phase == JOB_PHASE_DONE
        code = self._reports.first_code
        facts = {} if done or not code else {"rank_status": exit_status.exit_status(code)}
        log.info("job.ended", phase="done" if done else "failed", reason=update.phase_reason, **facts)
        await self._end_ranks(self._config.restart_grace_s)
        await self._agent.leave("the job has ended")
        return 0 if done else DO_NOT_REQUEUE

    async def _stop_now(self) -> int:
        """Have all ranks of the job stop together, or send SIGTERM to those here; then leave."""
        update, ranks = self._update, self._slots.ranks  # read first: a newer world must shorten the deadline
        notice = await self._request_common_stop()
        if notice is not None and update is not None:
            await self._stopping.obey(
                notice, shorten_deadline=partial(self._until_urgent_or_outdated, update)
            )
        ended = await self._done_after_all(ranks, self._stop.urgent) if self._stop.preempts else None
        if ended is not None:
            return await self._finish(ended)
        if notice is not None and not self._stop.urgent.is_set():
            return await self._leave_preempted(f"{self._stop.signal_name}: {notice.reason}")
        log.info("run.stopping", signal=self._stop.signal_name)
        if not self._stop.preempts:
            self._agent.set_place(None)  # otherwise ranks would answer SIGTERM by stopping the whole job
        await self._slots.end(self._config.stop_grace_s, urgent=self._stop.urgent)
        later_notice = notice_for_member(self._update, self._worker_id)
        if later_notice is not None and not self._stop.urgent.is_set():
            # a rank received the same signal, and has requested the common stop that this agent could not request
            return await self._leave_preempted(f"{self._stop.signal_name}: {later_notice.reason}")
        if self._stop.preempts and not self._stop.urgent.is_set() and self._still_starting():
            if ranks is not None and self._no_coordinator:
                await self._report_preempted_late(ranks.place)
            return await self._leave_preempted(f"stopped by {self._stop.signal_name}")
        await self._agent.leave(f"stopped by {self._stop.signal_name}")
        return exit_status.of_signal(self._stop.number)

    async def _done_after_all(
        self, ranks: RankGroup | None, shorten_deadline: asyncio.Event
    ) -> WorldUpdate | None:
        """Return the update that ends the job, if the ranks here finished before they had to stop; else None.

        Ranks of other nodes may still finish or fail, or may have stopped; then another world may follow. Stop
        waiting for the end of the job once `shorten_deadline` is set, or after the grace.
        """
        if ranks is None or not ranks.finished:
            return None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._config.preempt_grace_s):
                while True:
                    self._news.clear()
                    update = self._update
                    if update is not None and update.phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED}:
                        return update
                    newer = update is not None and update.world.generation > ranks.place.generation
                    if newer or shorten_deadline.is_set():
                        break
                    await self._news.wait()
        self._news.set()  # the loop looked at newer updates only for the end of the job
        return None

    async def _request_common_stop(self) -> StopNotice | None:
        """Request a common stop of all ranks if that is useful; return the notice in force, or None."""
        ranks = self._slots.ranks
        if not self._stop.preempts or ranks is None or not ranks.running or self._stop.urgent.is_set():
            return None
        if not await ranks.wait_graceful_stop_support(SAY_S) and not self._still_starting():
            return None
        return await self._ask(ranks.place.generation) if ranks.running else None

    def _still_starting(self) -> bool:
        """Tell whether the ranks here are still starting, in a training that will support graceful stop.

        No rank begins a step before all are ready, so ending these ranks loses no work.
        """
        return not self._slots.used or self._graceful_stop_seen or self._wait_graceful_stop_support()

    async def _report_preempted_late(self, place: Place) -> None:
        """Report the ranks of `place` as preempted once a coordinator answers: none answered before the ranks ended."""
        log.warning(
            "agent.exit_unreported", reason=f"no coordinator reached; waiting {EXIT_REPORT_S:g} s for one"
        )
        if await self._ask(place.generation, timeout_s=EXIT_REPORT_S) is not None:
            for rank in place.ranks:
                self._reports.report(
                    place.generation, rank, PREEMPTED, "ended while no coordinator was reachable"
                )

    async def _ask(self, generation: int, *, timeout_s: float | None = None) -> StopNotice | None:
        asking = asyncio.ensure_future(
            self._agent.request_common_stop(generation, self._stop.signal_name, timeout_s=timeout_s)
        )
        urgent = asyncio.ensure_future(self._stop.urgent.wait())
        try:
            await asyncio.wait({asking, urgent}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else None
        except Unavailable as error:
            log.warning("run.no_stop_requested", reason=str(error))
            self._no_coordinator = True
            return None
        finally:
            asking.cancel()
            urgent.cancel()

    async def _leave_preempted(self, reason: str, shorten_deadline: asyncio.Event | None = None) -> int:
        """Leave the job for good once the rank exits are durable; return the code that makes a scheduler requeue.

        Setting `shorten_deadline` ends the wait for the rank exits; by default the next signal sets it.
        """
        log.info("run.preempted", reason=reason)
        await self._agent.leave_once_reported(
            reason, shorten_deadline=shorten_deadline or self._stop.next_signal
        )
        return PREEMPTED
