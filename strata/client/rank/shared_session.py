"""The state that all clients of one rank in this process share: the rank's place, its session, and the observers."""

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
"""Seconds for which a call without a timeout tries to reach a coordinator or the agent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlace:
    """The rank and generation of this process."""

    job: str
    worker_id: str
    generation: int
    rank: int
    world_size: int
    restore_point: RestorePoint | None = None


@dataclass(slots=True, kw_only=True)
class SharedSession:
    """One rank's session and the state that its clients in this process share. Only the loop changes it.

    A rank can have only one session: a second would replace the first. So connecting again in the same process
    returns another client of the same shared session, and the last client to close ends the session.
    """

    session: Session
    watcher: RankObserver
    place: RankPlace
    owns_member: bool
    rounds: RoundBook = field(default_factory=RoundBook)
    phase: str = ""
    last_report: RankProgress | None = None
    """The rank's last report of its step and phase."""
    steps: StepWindow = field(default_factory=StepWindow)
    """The times of the rank's newest steps."""
    save_hold: HeldSaves | None = None
    """The reason why the rank cannot save for now."""
    supports_graceful_stop: bool = False
    users: int = 0


class RankObserver:
    """The observer of a rank's session: wakes waiting callers and calls the clients' callbacks."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.checkpoint_callbacks: list[Callable[[Checkpoint], None]] = []
        self.world_callbacks: list[Callable[[WorldUpdate], None]] = []
        self.place_callbacks: list[Callable[[PlaceMessage], None]] = []
        self.end_callbacks: list[Callable[[StrataError], None]] = []
        self._logged: set[type[StrataError]] = set()
        """The error types logged since the last connection: each type is logged once, not once per try or endpoint."""

    def on_connected(self, welcome: Welcome) -> None:
        if self._logged:
            log.warning("connected again: replica %s", welcome.replica)
        self._logged.clear()
        self.changed.set()

    def on_disconnected(self, reason: StrataError) -> None:
        if type(reason) not in self._logged:
            self._logged.add(type(reason))
            log.warning("not connected, retrying: %s", reason.message)
        self.changed.set()

    def on_world(self, update: WorldUpdate) -> None:
        self.changed.set()
        for callback in tuple(self.world_callbacks):
            try:
                callback(update)
            except Exception:
                log.exception(
                    "an observer of the world failed"
                )  # a failing observer must not end the session, as in `on_checkpoint`

    def on_ended(self, serving: concurrent.futures.Future[None]) -> None:
        """Pass the error that ended the session for good to the observers; an orderly leave has no error."""
        error = None if serving.cancelled() else serving.exception()
        if isinstance(error, StrataError):
            for callback in tuple(self.end_callbacks):
                callback(error)

    def on_request(self, down: Down) -> None:
        """Pass on a place in a newer generation. The agent answers inspection requests, not this process."""
        for callback in tuple(self.place_callbacks) if down.HasField("place") else ():
            try:
                callback(down.place)
            except Exception:
                log.exception("an observer of places failed")  # as in `on_checkpoint`

    def on_outcome(self, outcome: BarrierOutcome) -> None:
        pass  # the caller that arrived waits for the round's future

    def on_checkpoint(self, checkpoint: Checkpoint) -> None:
        for callback in tuple(self.checkpoint_callbacks):
            try:
                callback(checkpoint)
            except Exception:
                # a bug in one observer must not end the session that everything else depends on
                log.exception("an observer of checkpoints failed")


async def placed(
    session: Session, watcher: RankObserver, *, job: str, worker_id: str, after: int
) -> RankPlace:
    """Return this member's place once a world newer than generation `after` includes the member.

    The member must have one rank. Raise `JobFailed` or `JobDone` if the job ends instead.
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
    """Run the session in the background loop until it ends; the user's calls raise the session's errors."""
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
    """Return once the session is served; after `timeout_s` (default `REACH_S`) raise `Unavailable`, which names
    `what`.
    """
    timeout_s = REACH_S if timeout_s is None else timeout_s
    try:
        async with asyncio.timeout(timeout_s):
            await session.wait_connected()
    except TimeoutError:
        why = f": {session.last_error.message}" if session.last_error else ""
        raise Unavailable(f"could not reach {what} within {timeout_s:g} s{why}") from None
