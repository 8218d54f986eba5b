"""A torchrun agent's session with the coordinators, and the socket to which its workers attach.

The agent works like the agent of `strata run`, except that torch starts the ranks. Everything runs in the process's
background loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import uuid
from collections.abc import Callable
from typing import Final

from strata.agent.agent import Agent, AgentConfig
from strata.agent.environment import Place
from strata.agent.health.devices import open_devices
from strata.agent.run_folder import run_folder
from strata.agent.serving import AgentObserver, serving_ranks_of
from strata.client import MemberSession
from strata.config import HealthConfig, load
from strata.errors import ClusterRestored
from strata.integrations.torchrun import orphans
from strata.integrations.torchrun.settings import AgentSettings
from strata.integrations.torchrun.workers import Workers
from strata.v1.members_pb2 import Registration
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JobSpec

WORLD_JOIN_S: Final = 300.0
"""The time limit of a world's join barrier. It includes the time in which agents end their old workers."""


class AgentSession:
    """One agent's membership. Made in any thread; its coroutines run in the loop.

    `on_change` is called in the loop when the world may have changed.
    """

    def __init__(self, settings: AgentSettings, *, on_change: Callable[[], None]) -> None:
        self._settings = settings
        self._on_change = on_change
        self.observer = AgentObserver(on_change=self._changed)
        self.upward = MemberSession(
            settings.endpoints,
            _registration(settings),
            self.observer,
            rng=random.Random(),
            credentials=settings.credentials,
        )
        self.agent = Agent(
            AgentConfig(
                job=settings.run_id,
                worker_id=settings.worker_id,
                endpoints=settings.endpoints,
                shown_endpoints=",".join(str(endpoint) for endpoint in settings.endpoints),
                address=settings.local_addr,
                join_timeout_s=WORLD_JOIN_S,
                preempt=settings.preempt,
                preempt_grace_s=settings.preempt_grace_s,
            ),
            self.upward,
        )
        self.workers = Workers()
        self._news = asyncio.Event()
        self._failure: Exception | None = None
        self._released = asyncio.Event()

    @property
    def world(self) -> WorldUpdate | None:
        """The newest world known. Any thread."""
        return self.upward.world

    @property
    def error(self) -> Exception | None:
        """The error that ended the session or prevented it; None while it runs. Any thread."""
        return self.upward.error or self._failure

    @property
    def open(self) -> bool:
        """Whether a coordinator has welcomed the agent, and workers can attach."""
        return self.workers.relay is not None

    async def run(self) -> None:
        """Hold the session, and the socket for the workers, until the agent leaves.

        The error that ended or prevented the session is then in `error`. After `ClusterRestored` the socket stays until
        `release`.
        """
        session = asyncio.create_task(self.upward.run(), name="session")
        connected = asyncio.create_task(self.upward.wait_connected())
        try:
            await asyncio.wait({session, connected}, return_when=asyncio.FIRST_COMPLETED)
            if self.upward.welcome is not None:
                await self._serve(self.upward.welcome.detect_s, session)
            elif session.done():
                await session  # raises; even an error other than a StrataError ends the agent
        except Exception as error:
            self._failure = error
            raise
        finally:
            for task in (session, connected):
                task.cancel()
            await asyncio.gather(session, connected, return_exceptions=True)
            self._news.set()

    async def _serve(self, detect_s: float, session: asyncio.Task[None]) -> None:
        """Let workers attach until the session ends."""
        health = load(HealthConfig, env=os.environ)
        devices = await open_devices(os.environ.get("CUDA_VISIBLE_DEVICES")) if health.devices else None
        with run_folder() as folder:
            self.workers.folder = folder
            self.agent.socket, self.agent.detect_s = folder / "ranks.sock", detect_s
            async with (
                serving_ranks_of(
                    self.agent,
                    self.upward,
                    self.observer,
                    self.workers,
                    health,
                    devices=devices,
                    on_place=self.workers.begin,
                ) as relay,
                orphans.kill_workers_if_killed(self.agent.socket),
            ):
                self.workers.relay = relay
                self._news.set()
                try:
                    await session
                except ClusterRestored:
                    # the workers run until torch's agent ends them; without the socket they would fail earlier
                    self._news.set()
                    await self._released.wait()
                    raise

    def release(self) -> None:
        """Close the socket of an ended session, once no worker needs it. In the loop."""
        self._released.set()

    def set_place(self, place: Place | None) -> None:
        """Admit only the workers of `place` from now on."""
        self.agent.set_place(place)
        self._news.set()

    async def news(self, limit_s: float | None) -> None:
        """Return at the next change of the session, or after `limit_s`.

        Do not await between reading the session and this call, or a change in between is lost.
        """
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._news.wait()

    async def comes_true(self, condition: Callable[[], bool], limit_s: float) -> bool:
        """Return True once `condition` holds, checked at every change of the session; False after `limit_s`."""
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await self.news(None)
        except TimeoutError:
            return False
        return True

    def _changed(self) -> None:
        self._on_change()
        self._news.set()


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
            max_no_progress_generations=settings.max_no_progress_generations,
        ),
    )
