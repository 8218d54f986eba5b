"""The supervisor: one member of a job, which runs its ranks generation after generation.

What it does follows from three things only: the newest `WorldUpdate`, the ranks that run here,
and whether somebody asked it to stop. A generation goes through

    world with a place here → end the ranks of the one before → meet at the join barrier
    → start the ranks → they end, or a newer world comes

The join barrier has two uses: its payload carries the address where the ranks meet, and nobody
passes it before every member has ended its ranks of the generation before.

Losing the coordinators changes nothing here: ranks go on, and what they did is told later.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from strata.client.barriers import payloads_of
from strata.config import RunConfig
from strata.errors import BarrierBroken, BarrierTimeout, StaleGeneration, StrataError
from strata.launch.environment import Place
from strata.launch.ranks import RankGroup, inherited_environment
from strata.launch.rendezvous import JOIN_BARRIER, Meeting, ReservedPort
from strata.observe import get_logger
from strata.v1.barriers_pb2 import Arrival, BarrierOutcome
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED

log = get_logger()

_SIGNAL_EXIT = 128


class Upstream(Protocol):
    """What the supervisor needs of its session with the coordinators."""

    def arrive(self, arrival: Arrival) -> Awaitable[BarrierOutcome]:
        """Arrive and return the round's outcome; `StaleGeneration` when a newer world came."""
        ...

    async def rank_exit(self, *, generation: int, rank: int, code: int, reason: str) -> None:
        """Return once the end of a rank is durable, or its generation has ended."""
        ...

    async def leave(self, reason: str) -> None:
        """Return once this member is no longer one, or that could not be told in time."""
        ...


@dataclass(slots=True)
class _Stop:
    """Somebody asked to stop: by which signal, and how often."""

    number: int = 0
    asked: asyncio.Event = field(default_factory=asyncio.Event)
    urgent: asyncio.Event = field(default_factory=asyncio.Event)

    def ask(self, number: int) -> None:
        if self.asked.is_set():
            self.urgent.set()
        self.number = self.number or number
        self.asked.set()


class Supervisor:
    """Runs `command` once a slot in every generation that has a place for this member.

    `place_changed` is told of the ranks that run here whenever they change (None: none), so that
    the relay knows whom to let in.
    """

    def __init__(
        self,
        config: RunConfig,
        command: Sequence[str],
        *,
        upstream: Upstream,
        worker_id: str,
        address: str,
        socket: str,
        detect_s: float,
        place_changed: Callable[[Place | None], None],
    ) -> None:
        self._config = config
        self._command = tuple(command)
        self._upstream = upstream
        self._worker_id = worker_id
        self._address = address
        self._socket = socket
        self._detect_s = detect_s
        self._place_changed = place_changed
        self._update: WorldUpdate | None = None
        self._news = asyncio.Event()
        self._stop = _Stop()
        self._ranks: RankGroup | None = None
        self._port: ReservedPort | None = None
        self._handled = 0
        self._starts = 0
        self._failed = 0
        self._last_code = 0
        self._reports: set[asyncio.Task[None]] = set()

    # -- what others tell it

    def on_world(self, update: WorldUpdate) -> None:
        """Take note of a newer world or phase; an older one than known is ignored."""
        known = self._update
        if known is None or update.token.revision >= known.token.revision:
            self._update = update
            self._news.set()

    def ask_to_stop(self, number: int) -> None:
        """Stop because of a signal: ranks get SIGTERM and `stop_grace_s`; asked twice, SIGKILL."""
        self._stop.ask(number)
        self._news.set()

    def rank_is_silent(self, rank: int, generation: int) -> None:
        """Kill a rank whose process lives but whose transport answers no more."""
        if self._ranks is not None and self._ranks.place.generation == generation:
            self._ranks.doom(rank, f"frozen: it did not answer for {self._detect_s:g} s")

    # -- its life

    async def run(self) -> int:
        """Return the exit status once the job has ended, or this member was asked to stop."""
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                if self._stop.asked.is_set():
                    return await self._stop_now()
                update = self._update
                if update is None:
                    continue
                if update.phase in {JOB_PHASE_DONE, JOB_PHASE_FAILED}:
                    return await self._finish(update)
                if update.world.generation > self._handled:
                    self._handled = update.world.generation
                    await self._end_ranks()
                    if not self._stop.asked.is_set():
                        await self._begin(update)
        finally:
            if self._ranks is not None:
                self._ranks.kill()
            self._place_changed(None)

    async def _begin(self, update: WorldUpdate) -> None:
        """Meet the other members and start this generation's ranks, unless it ends before."""
        world = update.world
        if world.forming or not update.HasField("place"):
            full = f"the job has the {world.members} members it takes; this one stands by"
            reason = world.reason if world.forming else full
            log.info("world.waiting", generation=world.generation, reason=reason)
            return
        log.info(
            "world.joining",
            generation=world.generation,
            size=world.size,
            first_rank=update.place.first_rank,
            reason=world.reason,
        )
        self._port = ReservedPort() if update.place.first_rank == 0 else None
        meeting = await self._meet(update)
        if meeting is not None:
            place = Place(
                job=self._config.job,
                worker_id=self._worker_id,
                world=world,
                member=update.place,
                master_addr=meeting.address,
                master_port=meeting.port,
                socket=self._socket,
                endpoints=",".join(self._config.endpoints),
                detect_s=self._detect_s,
            )
            self._place_changed(place)
            self._ranks = RankGroup(place, on_exit=self._rank_ended)
            self._ranks.start(self._command, inherited=inherited_environment(), restarts=self._starts)
            self._starts += 1

    async def _meet(self, update: WorldUpdate) -> Meeting | None:
        """Return where ranks meet, once every member is there; None when the world has ended."""
        first, slots = update.place.first_rank, update.place.slots
        offer = Meeting(self._address, self._port.port).encode() if self._port else b""
        arrival = Arrival(
            job=self._config.job,
            name=JOIN_BARRIER,
            generation=update.world.generation,
            round=1,
            ranks=range(first, first + slots),
            payloads=[offer] + [b""] * (slots - 1),
            phases=["join"] * slots,
            timeout_ms=round(1000 * self._config.join_timeout_s),
        )
        met = asyncio.ensure_future(self._upstream.arrive(arrival))
        try:
            while not met.done():
                news = asyncio.create_task(self._news.wait())
                await asyncio.wait({met, news}, return_when=asyncio.FIRST_COMPLETED)
                news.cancel()
                if self._outdated(update):
                    return None
                if not met.done():
                    self._news.clear()
            return Meeting.decode(payloads_of(met.result()).get(0, b""))
        except BarrierTimeout as error:
            # a member is there and does not join: this world comes to nothing, and must say so
            log.warning("world.not_joined", generation=update.world.generation, reason=error.message)
            self._rank_ended(update.world.generation, first, 1, f"the world was not joined: {error.message}")
            return None
        except (StaleGeneration, BarrierBroken) as error:
            log.info("world.ended_early", generation=update.world.generation, reason=error.message)
            return None
        finally:
            met.cancel()
            with contextlib.suppress(asyncio.CancelledError, StrataError):
                await met
            self._news.set()

    def _outdated(self, update: WorldUpdate) -> bool:
        newest = self._update
        return self._stop.asked.is_set() or (
            newest is not None
            and (newest.world.generation != update.world.generation or newest.phase != update.phase)
        )

    def _rank_ended(self, generation: int, rank: int, code: int, reason: str) -> None:
        if code != 0 and generation != self._failed:
            # the first that fails is the cause; others fail because their collectives broke
            self._failed, self._last_code = generation, code
        task = asyncio.create_task(
            self._upstream.rank_exit(generation=generation, rank=rank, code=code, reason=reason),
            name=f"report the end of rank {rank}",
        )
        self._reports.add(task)
        task.add_done_callback(self._reported)

    def _reported(self, task: asyncio.Task[None]) -> None:
        self._reports.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # a newer world has ended the generation, or the session's own end is raised elsewhere
            log.info("rank.report_dropped", task=task.get_name(), reason=str(error))

    async def _end_ranks(self) -> None:
        ranks, self._ranks = self._ranks, None
        self._place_changed(None)
        if ranks is not None:
            await self._stop_ranks(ranks, self._config.restart_grace_s)
        if self._port is not None:
            self._port.close()
            self._port = None

    async def _stop_ranks(self, ranks: RankGroup, grace_s: float) -> None:
        """End ranks within the grace, or at once when a second signal says so."""
        stopping = asyncio.create_task(ranks.stop(grace_s))
        urgent = asyncio.create_task(self._stop.urgent.wait())
        await asyncio.wait({stopping, urgent}, return_when=asyncio.FIRST_COMPLETED)
        urgent.cancel()
        if not stopping.done():
            ranks.kill()
        await stopping

    # -- the end

    async def _finish(self, update: WorldUpdate) -> int:
        """The job has ended: end what still runs, and leave."""
        done = update.phase == JOB_PHASE_DONE
        log.info("job.ended", phase="done" if done else "failed", reason=update.phase_reason)
        await self._end_ranks()
        await self._upstream.leave("the job has ended")
        return 0 if done else exit_status(self._last_code) or 1

    async def _stop_now(self) -> int:
        """Hand the signal on, give the ranks their time, and leave."""
        number = self._stop.number
        log.info("run.stopping", signal=signal.Signals(number).name)
        ranks, self._ranks = self._ranks, None
        if ranks is not None:
            await self._stop_ranks(ranks, self._config.stop_grace_s)
        await self._upstream.leave(f"stopped by {signal.Signals(number).name}")
        return _SIGNAL_EXIT + number


def exit_status(code: int) -> int:
    """Return what a shell would: an exit code as it is, a signal as 128 and its number."""
    return _SIGNAL_EXIT - code if code < 0 else code
