"""What the clients of one rank in this process share: its place, its session, and who watches that."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from strata.client.checkpoints.held_saves import HeldSaves
from strata.client.event_loop import BackgroundLoop
from strata.client.rank.barriers import RoundBook
from strata.core.health.stragglers import StepWindow
from strata.errors import JobDone, JobFailed, StrataError, Unavailable
from strata.session.client_session import Session
from strata.v1.barriers_pb2 import BarrierOutcome
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.members_pb2 import RankProgress
from strata.v1.session_pb2 import Down, Welcome, WorldUpdate
from strata.v1.session_pb2 import RankPlace as PlaceMessage
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, RestorePoint

log: Final = logging.getLogger("strata.client")

REACH_S: Final = 300.0
"""How long a coordinator, or the agent, is tried to reach by a caller that gives no limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """Which rank of which generation this process is."""

    job: str
    worker_id: str
    generation: int
    rank: int
    world_size: int
    restore_point: RestorePoint | None = None


@dataclass(slots=True, kw_only=True)
class SharedSession:
    """One rank's session, and what all its clients in this process share. Changed in the loop only.

    A rank has one session: a second one would take its place. So whoever connects again in the
    same process gets another client of the same seat, and the last to close gives it up.
    """

    session: Session
    watcher: Watcher
    place: RankPlace
    owns_member: bool
    rounds: RoundBook = field(default_factory=RoundBook)
    phase: str = ""
    said: RankProgress | None = None
    """What the rank said last of its step and phase."""
    steps: StepWindow = field(default_factory=StepWindow)
    """What its newest steps cost the rank."""
    save_hold: HeldSaves | None = None
    """Why the rank cannot save for now."""
    supports_graceful_stop: bool = False
    users: int = 0


class Watcher:
    """The observer of a rank's session: remembers, wakes who waits, passes checkpoints on."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.checkpoint_callbacks: list[Callable[[Checkpoint], None]] = []
        self.world_callbacks: list[Callable[[WorldUpdate], None]] = []
        self.place_callbacks: list[Callable[[PlaceMessage], None]] = []
        self.end_callbacks: list[Callable[[StrataError], None]] = []
        self._told: set[type[StrataError]] = set()
        """The kinds of trouble told since it was last connected: once each, not once a try or endpoint."""

    def on_connected(self, welcome: Welcome) -> None:
        if self._told:
            log.warning("connected again: replica %s", welcome.replica)
        self._told.clear()
        self.changed.set()

    def on_disconnected(self, reason: StrataError) -> None:
        if type(reason) not in self._told:
            self._told.add(type(reason))
            log.warning("not connected, trying on: %s", reason.message)
        self.changed.set()

    def on_world(self, update: WorldUpdate) -> None:
        self.changed.set()
        for callback in tuple(self.world_callbacks):
            try:
                callback(update)
            except Exception:
                log.exception("an observer of the world failed")  # as with checkpoints

    def on_ended(self, serving: concurrent.futures.Future[None]) -> None:
        """Hand the error that ended the session for good to observers; an orderly leave has none."""
        error = None if serving.cancelled() else serving.exception()
        if isinstance(error, StrataError):
            for callback in tuple(self.end_callbacks):
                callback(error)

    def on_request(self, down: Down) -> None:
        """Tell observers of a place in a newer generation; a look at this rank its agent answers."""
        for callback in tuple(self.place_callbacks) if down.HasField("place") else ():
            try:
                callback(down.place)
            except Exception:
                log.exception("an observer of places failed")  # as with checkpoints

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        pass  # whoever arrived has its future

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        for callback in tuple(self.checkpoint_callbacks):
            try:
                callback(checkpoint)
            except Exception:
                # a bug in one observer must not end the session that everything else rides on
                log.exception("an observer of checkpoints failed")


async def placed(session: Session, watcher: Watcher, *, job: str, worker_id: str, after: int) -> RankPlace:
    """Return this member's place once a world newer than generation `after` has one for it.

    For a member with one rank. `JobFailed` or `JobDone` when the job ends instead.
    """
    while True:
        watcher.changed.clear()
        if session.error is not None:
            raise session.error
        update = session.world
        if update is not None and update.phase == JOB_PHASE_FAILED:
            raise JobFailed(f"job {job} has failed: {update.phase_reason}")
        if update is not None and update.phase == JOB_PHASE_DONE:
            raise JobDone(f"job {job} is done: {update.phase_reason}")
        if update is not None and update.world.generation > after and update.HasField("place"):
            return RankPlace(
                job=job,
                worker_id=worker_id,
                generation=update.world.generation,
                rank=update.place.first_rank,
                world_size=update.world.size,
                restore_point=update.world.restore if update.world.HasField("restore") else None,
            )
        await watcher.changed.wait()


def running(background: BackgroundLoop, session: Session) -> concurrent.futures.Future[None]:
    """Run the session in the background loop until it ends; its own errors reach the user with every call."""
    future = background.submit(session.run())
    future.add_done_callback(_report_bug)
    return future


def _report_bug(running: concurrent.futures.Future[None]) -> None:
    if running.cancelled():
        return
    error = running.exception()
    if error is not None and not isinstance(error, StrataError):
        log.error("the session failed; please report it", exc_info=error)


async def connected(session: Session, timeout_s: float | None, what: str) -> None:
    """Return once the session is served; `Unavailable` after `timeout_s`, by default `REACH_S`, names `what`."""
    timeout_s = REACH_S if timeout_s is None else timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await session.wait_connected()
    except TimeoutError:
        why = f": {session.last_trouble.message}" if session.last_trouble else ""
        raise Unavailable(f"could not reach {what} within {timeout_s:g} s{why}") from None
