"""The session of a torchrun agent with the coordinators, and the door at which its workers attach.

torchrun keeps the processes; of what `strata run`'s supervisor does for its ranks, this is the
rest. Everything runs in the process's background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from strata.agent.devices import open_devices
from strata.agent.draining import watching_devices
from strata.agent.environment import Place
from strata.agent.health import Health
from strata.agent.relay import Relay
from strata.agent.relay_server import serving
from strata.agent.reports import ExitReports
from strata.agent.run_folder import run_folder
from strata.agent.stack_dump import dump_stacks, process_state
from strata.client import MemberSession
from strata.client.terms import UNTOLD_S
from strata.config import HealthConfig, load
from strata.core.timing import Timing
from strata.errors import StaleGeneration, StrataError
from strata.integrations.torchrun import orphans
from strata.integrations.torchrun.settings import AgentSettings
from strata.observe import get_logger
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.common_pb2 import Token
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import Welcome, WorldUpdate
from strata.v1.worlds_pb2 import JobSpec, StopJobRequest

log = get_logger()

TELL_S: Final = 10.0
"""How long the end of a worker may take to become durable while a coordinator is there."""


class _Workers:
    """The session upward as workers have it.

    torchrun ends the workers of a node by SIGTERM when one of them has failed. To those who heed
    it that looks like a scheduler's, and they would stop the whole training: so nobody here asks
    for that once a worker has ended.
    """

    def __init__(self, upward: MemberSession, whole: Callable[[], bool]) -> None:
        self._upward = upward
        self._whole = whole
        self.arrive = upward.arrive

    @property
    def token(self) -> Token:
        return self._upward.token

    @property
    def world(self) -> WorldUpdate | None:
        return self._upward.world

    @property
    def connected(self) -> bool:
        return self._upward.connected

    async def call(self, request: Message, *, timeout_s: float | None) -> Any:
        if isinstance(request, StopJobRequest) and not self._whole():
            raise StaleGeneration("a worker of this agent has ended, and torchrun ends the others")
        return await self._upward.call(request, timeout_s=timeout_s)


class AgentSession:
    """One agent's membership. Made in any thread; its coroutines run in the loop.

    `on_world` is called in the loop when the world may have changed.
    """

    def __init__(self, settings: AgentSettings, *, on_world: Callable[[], None]) -> None:
        self._settings = settings
        self._world_changed = on_world
        self.upward = MemberSession(
            settings.endpoints,
            _registration(settings),
            self,
            rng=random.Random(),
            credentials=settings.credentials,
        )
        self.reports = ExitReports(self.upward)
        self.detect_s = 0.0
        self.door = Path()
        """The socket at which workers attach; there once `open`."""
        self._news = asyncio.Event()
        self._relay: Relay | None = None
        self._health: Health | None = None
        self._trouble: Exception | None = None
        self._told: set[str] = set()
        self._place: Place | None = None
        self._heeding: set[int] = set()
        self.unfit = ""
        """Why this agent is not to get a place any more; empty while it is."""
        self.stopped: set[int] = set()
        """The workers that have stopped as they were asked to, whatever they end with."""
        self.evicted: dict[int, str] = {}
        """The workers that were killed from here, and why: torchrun knows of a SIGKILL only."""

    @property
    def world(self) -> WorldUpdate | None:
        """The newest world known. Any thread."""
        return self.upward.world

    @property
    def error(self) -> Exception | None:
        """Why the session is over, or cannot begin; None while it goes on. Any thread."""
        return self.upward.error or self._trouble

    @property
    def heeding(self) -> bool:
        """Whether every worker stops by itself when its generation is asked to. Any thread."""
        place = self._place
        return place is not None and self._heeding.issuperset(place.ranks)

    @property
    def open(self) -> bool:
        """Whether a coordinator has welcomed the agent, and workers can attach."""
        return self._relay is not None

    async def run(self) -> None:
        """Hold the session, and the door that workers attach at, until `leave`.

        What ended it, or kept it from beginning, is in `error` then.
        """
        try:
            await self._run()
        except Exception as error:
            self._trouble = error
            raise
        finally:
            self._news.set()

    async def _run(self) -> None:
        session = asyncio.create_task(self.upward.run(), name="session")
        connected = asyncio.create_task(self.upward.wait_connected())
        try:
            await asyncio.wait({session, connected}, return_when=asyncio.FIRST_COMPLETED)
            if self.upward.welcome is None:
                return
            timing = Timing.derive(self.upward.welcome.detect_s)
            self.detect_s = timing.detect_s
            with run_folder() as folder:
                door = folder / "ranks.sock"
                watch = load(HealthConfig, env=os.environ)
                health = Health(watch, self.upward, self, detect_s=timing.detect_s)
                visible = os.environ.get("CUDA_VISIBLE_DEVICES")
                devices = await open_devices(visible) if watch.devices else None
                relay = Relay(
                    _Workers(self.upward, self._whole),
                    worker_id=self._settings.worker_id,
                    detect_s=timing.detect_s,
                    grace_s=timing.reconnect_grace_s,
                    listener=health.stalls,
                    on_attached=lambda _rank, _generation: None,
                    on_silent=self._silent,
                    on_heeding=lambda rank, _generation: self._heeding.add(rank),
                    on_stopped=lambda rank, _generation: self.stopped.add(rank),
                )
                async with (
                    serving(relay, door, timing),
                    health.watching(),
                    watching_devices(
                        devices,
                        watch,
                        self.upward,
                        job=self._settings.run_id,
                        worker_id=self._settings.worker_id,
                        grace_s=self._settings.preempt_grace_s,
                        on_unfit=self._become_unfit,
                    ),
                    orphans.ended_with_us(door),
                ):
                    self._relay, self._health, self.door = relay, health, door
                    self._news.set()
                    await asyncio.wait({session})
        finally:
            for task in (session, connected):
                task.cancel()
            await asyncio.gather(session, connected, return_exceptions=True)

    def set_place(self, place: Place | None) -> None:
        """Let in the workers of `place` from now on, and no others."""
        self._place = place
        self._heeding.clear()
        self.stopped.clear()
        self.evicted.clear()
        self._news.set()
        if self._relay is not None and self._health is not None:
            self._relay.set_place(place)
            self._health.set_place(place)

    async def news(self, limit_s: float | None) -> None:
        """Return when the session has something new to look at, or after `limit_s`.

        Look at it without a pause between this and the call before.
        """
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._news.wait()

    async def comes_true(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once `condition`, looked at with every news of the session, holds; else False."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self.news(None)
        except TimeoutError:
            return False
        return True

    async def leave(self, reason: str) -> None:
        """Go for good, once all ends of workers are told; return when that is known or nobody hears it."""
        await self.reports.told(TELL_S)
        if not self.reports.all_told:
            log.warning("agent.end_untold", reason=f"no coordinator hears it; waiting {UNTOLD_S:g} s for one")
            await self.reports.told(UNTOLD_S - TELL_S)
        await self.upward.leave(reason)

    def tell(self, event: str, reason: str) -> None:
        """Log a reason once, until the session is connected anew."""
        if reason not in self._told:
            self._told.add(reason)
            log.warning(event, reason=reason)

    # -- the observer of its session

    def on_connected(self, welcome: Welcome) -> None:
        self._told.clear()
        log.info("session.connected", replica=welcome.replica, incarnation=welcome.incarnation)
        self._news.set()

    def on_disconnected(self, reason: StrataError) -> None:
        self.tell("session.disconnected", reason.message)
        self._news.set()

    def on_world(self, update: WorldUpdate) -> None:
        if self._relay is not None:
            self._relay.on_world(update)
        self._world_changed()
        self._news.set()

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        if self._relay is not None:
            self._relay.on_outcome(outcome)

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        if self._relay is not None:
            self._relay.on_checkpoint(checkpoint)

    def _become_unfit(self, reason: str) -> None:
        self.unfit = reason
        self._news.set()

    def _whole(self) -> bool:
        """Whether no worker that ever attached in this generation has ended."""
        place, relay = self._place, self._relay
        if place is None or relay is None:
            return False
        pids = [pid for rank in place.ranks if (pid := relay.pid(rank)) is not None]
        return all(orphans.is_alive(pid) for pid in pids)

    def _silent(self, rank: int, generation: int) -> None:
        """End a worker whose process lives but answers no more."""
        self.evict(rank, generation, f"frozen: it did not answer for {self.detect_s:g} s")

    # -- what the watch over stalls needs (`launch.health.Ranks`)

    def evict(self, rank: int, generation: int, reason: str) -> None:
        """End a worker; the agent then finds it ended."""
        if self._relay is None or (pid := self._relay.pid(rank)) is None:
            return
        self.evicted.setdefault(rank, reason)
        log.warning("rank.killed", rank=rank, pid=pid, reason=reason)
        orphans.end_child(pid)

    async def stack(self, rank: int) -> str | None:
        """Return where a worker's threads stand; None when it has not attached or cannot tell."""
        place = self._place
        if self._relay is None or place is None or (pid := self._relay.pid(rank)) is None:
            return None
        return await dump_stacks(_Worker(pid), Path(self.stacks(place.generation, str(rank))))

    def process(self, rank: int) -> str:
        """Return the state of a worker's process; "" when it has not attached or cannot tell."""
        return process_state(self._relay.pid(rank)) if self._relay is not None else ""

    def stacks(self, generation: int, rank: str) -> str:
        """Return the file in which a worker says where its threads stand."""
        return str(self.door.parent / f"stacks-{generation}-{rank}.txt")


@dataclass(frozen=True, slots=True)
class _Worker:
    """A worker that attached, as the process it said it is (`launch.stack_dump.Process`)."""

    pid: int

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)


def _registration(settings: AgentSettings) -> Registration:
    return Registration(
        job=settings.run_id,
        worker_id=settings.worker_id,
        boot=uuid.uuid4().hex,
        host=settings.host,
        slots=settings.slots,
        pid=settings.pid,
        attempt=settings.attempt,
        run_id=settings.scheduled_run,
        spec=JobSpec(
            min_workers=settings.min_nodes,
            max_workers=settings.max_nodes,
            settle_s=settings.settle_s,
            max_fruitless_generations=settings.max_fruitless_generations,
        ),
    )
