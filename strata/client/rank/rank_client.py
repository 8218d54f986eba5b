"""`RankClient`: one rank's blocking view of its session. What `strata.connect()` returns.

Inside `strata run` the rank attaches to its agent's socket, and its place is in the environment. Otherwise it is a
standalone process, whose agent is a member with one rank, and whose place the world gives. Both are used alike.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final, Self, TypeVar

from google.protobuf.message import Message

from strata.client.api import arguments
from strata.client.checkpoints.held_saves import HeldSaves
from strata.client.event_loop import BackgroundLoop
from strata.client.rank.barriers import RoundBook, payloads_of
from strata.client.rank.progress_reports import MakeTraining, ProgressReports
from strata.client.rank.shared_session import SharedSession, placed
from strata.core.exit_codes import DO_NOT_REQUEUE, PREEMPTED, is_success
from strata.core.health.stragglers import StepWindow
from strata.core.stop.save_hold import SaveHold
from strata.errors import JobDone, JobFailed, Preempted, Refused, StaleGeneration, StrataError, Unavailable
from strata.session.client_session import LEAVE_S
from strata.session.terms import UNTOLD_S
from strata.v1.barriers_pb2 import Arrival
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.common_pb2 import Author
from strata.v1.session_pb2 import RankPlace as PlaceMessage
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_FAILED, RestorePoint

LOCAL_SLACK_S: Final = 10.0
"""How much later than a barrier's own time its outcome may come: reconnects take a while."""

UNHEARD_S: Final = 2.0
"""After so long it is said that nobody has answered to a rank's end."""

log: Final = logging.getLogger("strata.client")

T = TypeVar("T")


class RankClient:
    """One rank: barriers, progress and requests, from any thread.

    Coordinators may come and go; calls wait for them as long as their time allows. Once a newer
    world exists every call of this rank raises `StaleGeneration`, and once the session is over
    for good every call raises why (`StaleIncarnation`, `ClusterReplaced`, `JobFailed`…).
    """

    def __init__(self, shared_session: SharedSession, background: BackgroundLoop) -> None:
        """Become one more user of `seat`; made in the loop."""
        shared_session.users += 1
        self._shared_session = shared_session
        self._session = shared_session.session
        self._loop = background
        self._closed = False
        self._reports = ProgressReports(shared_session, background)
        self._telling: concurrent.futures.Future[bool] | None = None
        """Says how this rank ended, from `close` on."""
        """Until when, while it does."""
        self._loop.at_stop(self._detach)

    # -- who this is

    @property
    def job(self) -> str:
        return self._shared_session.place.job

    @property
    def worker_id(self) -> str:
        """The member that this rank belongs to."""
        return self._shared_session.place.worker_id

    @property
    def incarnation(self) -> int:
        """What tells the member from its replacement."""
        return self._session.incarnation

    @property
    def generation(self) -> int:
        """The generation this rank belongs to; not a newer one that may exist."""
        return self._shared_session.place.generation

    @property
    def rank(self) -> int:
        return self._shared_session.place.rank

    @property
    def world_size(self) -> int:
        return self._shared_session.place.world_size

    @property
    def restore_point(self) -> RestorePoint | None:
        """The checkpoint that this generation begins from; None when from nothing."""
        return self._shared_session.place.restore_point

    @property
    def uid(self) -> str:
        """The cluster's uid."""
        return self._session.token.uid

    @property
    def detect_s(self) -> float:
        """Within how many seconds a frozen process is noticed."""
        welcome = self._session.welcome
        return welcome.detect_s if welcome is not None else 0.0

    @property
    def connected(self) -> bool:
        """Whether the session is served at this moment."""
        return self._session.connected

    # -- what a rank does

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Return once every rank of the world (or of `ranks`) is here, with what each brought.

        Ranks without a payload are absent from the result. A name belongs to one set of ranks,
        and each call with it is a round of its own; one call a name at a time.

        `BarrierTimeout` names who was missing `timeout_s` after the first arrival, and
        `BarrierBroken` who died: for all ranks alike, and the round is over. `Unavailable` is
        local: no outcome could be learned. Call again, and it is the same round. `InvalidArgument`
        for what could never be carried.
        """
        checked = (
            arguments.barrier_name(name),
            arguments.payload(payload),
            arguments.ranks(ranks, self.world_size),
            arguments.timeout(timeout_s),
        )
        return self._loop.call(self._barrier(*checked))

    async def _barrier(
        self, name: str, payload: bytes, ranks: tuple[int, ...], timeout_s: float | None
    ) -> dict[int, bytes]:
        self._check_current()
        pending = self._shared_session.rounds.pending(name)
        if pending is None:
            update = self._session.world
            if update is not None and update.world.generation == self.generation:
                self._shared_session.rounds.floors(update.barrier_floors)
            pending = self._session.arrive(
                Arrival(
                    job=self.job,
                    name=name,
                    generation=self.generation,
                    round=self._shared_session.rounds.next_round(name),
                    ranks=[self.rank],
                    payloads=[payload] if payload else (),
                    participants=ranks,
                    timeout_ms=0 if timeout_s is None else max(1, round(1000 * timeout_s)),
                    phases=[self._shared_session.phase] if self._shared_session.phase else (),
                )
            )
            self._shared_session.rounds.arrived(name, pending)
        try:
            async with asyncio.timeout(None if timeout_s is None else timeout_s + LOCAL_SLACK_S):
                # Who gives up leaves the round open. From Python 3.14 on, `shield` would log its later failure.
                await asyncio.wait((pending,))
            outcome = pending.result()
        except TimeoutError:
            trouble = self._session.last_trouble
            raise Unavailable(
                f"barrier {name!r}: no outcome within {timeout_s:g} s and {LOCAL_SLACK_S:g} s more"
                + (f": {trouble.message}" if trouble is not None else "")
            ) from None
        except StrataError:
            self._shared_session.rounds.delivered(name, None)
            raise
        self._shared_session.rounds.delivered(name, outcome)
        return payloads_of(outcome)

    def has_met(self, name: str) -> bool:
        """Tell whether this rank has been at a barrier of that name in its generation."""
        return self._shared_session.rounds.next_round(name) > 1

    def progress(
        self,
        step: int,
        phase: str = "",
        *,
        own_s: float | None = None,
        data_wait_s: float | None = None,
        training: MakeTraining | None = None,
    ) -> None:
        """Say which step this rank is at, and what it does; sent soon, without waiting.

        Shown to people, and named when others wait for this rank. Of `phase` 200 characters count,
        and control characters become "?". `own_s` is how long this rank's own part of its last step
        took, if it knows that: it tells a slow rank from those that wait for it in every step.
        `data_wait_s` is how much of that was the wait for its batches. `training` returns how the training goes as
        a whole, and that of rank 0 is shown: it is called in the background thread, only for a report that is sent.
        """
        step = arguments.integer("step", step, below=2**63)
        phase = arguments.phase(phase)
        own_s = 0.0 if own_s is None else arguments.seconds(own_s, what="own_s", zero=True)
        data_wait_s = (
            0.0 if data_wait_s is None else arguments.seconds(data_wait_s, what="data_wait_s", zero=True)
        )
        self._check_current()
        self._shared_session.phase = phase
        self._reports.add(step, phase, own_s, min(data_wait_s, own_s), training)

    def hold_saves(self, hold: SaveHold | None) -> None:
        """Say that this rank trains on and cannot save for now, or (None) that it can again.

        Sent soon, without waiting, from any thread; never raises. Everybody is shown it with the rank's
        progress, and of a rank that has trained it is put on record once (`core.stop.save_hold`).
        """
        with contextlib.suppress(Unavailable):  # the session is over: nobody is left to tell
            self._loop.soon(lambda: self._hold(hold))

    def _hold(self, hold: SaveHold | None) -> None:
        before, self._shared_session.save_hold = self._shared_session.save_hold, None
        if before is not None:
            before.recording.cancel()
        if hold is not None:
            author = Author(
                worker_id=self.worker_id,
                incarnation=self.incarnation,
                generation=self.generation,
                rank=self.rank,
            )
            self._shared_session.save_hold = HeldSaves(self._session, self.job, author, hold)
        self._reports.send_again()

    def heed_notices(self) -> None:
        """Say, from the next progress on, that this rank stops by itself when its world is asked to."""
        self._shared_session.supports_graceful_stop = True

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        """Return the response to one of the requests that a session carries.

        `Unavailable` after `timeout_s`: it may have taken effect, and may be repeated.
        """
        return self._loop.call(self._session.call(request, timeout_s=arguments.seconds(timeout_s)))

    def observe_checkpoints(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        """Hand every change of a checkpoint to `callback`, in the background thread.

        It must not block. Returns the function that ends this.
        """
        return _observe(self._shared_session.watcher.checkpoint_callbacks, callback)

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        """Hand the world as it is known, and every update of it, to `callback`, in the background thread.

        It must not block. Returns the function that ends this.
        """
        stop = _observe(self._shared_session.watcher.world_callbacks, callback)
        if self._session.world is not None:
            known = self._session.world
            self._loop.soon(lambda: callback(known))
        return stop

    def observe_place(self, callback: Callable[[PlaceMessage], None]) -> Callable[[], None]:
        """Hand this rank's place in a newer generation to `callback`, in the background thread.

        Only a supervisor that restarts ranks in their processes tells one. It must not block.
        """
        return _observe(self._shared_session.watcher.place_callbacks, callback)

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        """Hand the error that ends this rank's session for good to `callback`, in the background thread, or at once.

        It must not block nor raise.
        """
        stop = _observe(self._shared_session.watcher.end_callbacks, callback)
        if (error := self._session.error) is not None:
            callback(error)  # it ended before
        return stop

    @property
    def is_standalone(self) -> bool:
        """Whether this is a standalone process, and no agent's rank."""
        return self._shared_session.owns_member

    def check(self) -> None:
        """Raise if this rank's generation or session has ended; return at once otherwise."""
        self._check_current()

    def _check_current(self) -> None:
        if self._session.error is not None:
            raise self._session.error
        if self._closed:
            raise Unavailable("this client was closed", hint="strata.connect() again")
        update = self._session.world
        if update is None:
            return
        if update.phase == JOB_PHASE_FAILED:
            raise JobFailed(f"job {self.job} has failed: {update.phase_reason}")
        if update.world.generation > self.generation:
            raise StaleGeneration(
                f"rank {self.rank} is of generation {self.generation}, the world is at generation"
                f" {update.world.generation}: {update.world.reason}"
            )

    def rejoin(self, *, timeout_s: float | None = None) -> None:
        """Become part of the newest world, once there is a newer one with a place for this member.

        For a standalone process that holds nothing of the old generation (no process group, no state of
        other ranks). Afterwards `rank`, `world_size`, `generation` and `restore_point` are new.

        It waits for that world, and logs a warning when it has to: call it after `StaleGeneration`.
        `Unavailable` when there is none after `timeout_s`, if that is given; the rank is then what it was.
        """
        if not self._shared_session.owns_member:
            raise Refused(
                "under `strata run` a process belongs to one generation",
                hint="the agent starts new ranks in a new one",
            )
        self._loop.call(self._rejoin(None if timeout_s is None else arguments.seconds(timeout_s)))

    async def _rejoin(self, timeout_s: float | None) -> None:
        update = self._session.world
        newest = update.world.generation if update is not None else 0
        if update is None or newest <= self.generation or not update.HasField("place"):
            log.warning(
                "no place in a world newer than generation %d yet (the world is at %d); waiting %s",
                self.generation,
                newest,
                "for one" if timeout_s is None else f"up to {timeout_s:g} s",
            )
        try:
            async with asyncio.timeout(timeout_s):
                self._shared_session.place = await placed(
                    self._session,
                    self._shared_session.watcher,
                    job=self.job,
                    worker_id=self.worker_id,
                    after=self.generation,
                )
        except TimeoutError:
            raise Unavailable(
                f"no world newer than generation {self.generation} has a place here within {timeout_s:g} s",
                hint="rejoin only after StaleGeneration; the job may wait for members: see `strata members`",
            ) from None
        self._shared_session.rounds = RoundBook()
        self._shared_session.said = None  # of a generation that has ended, as is a save that it held
        self._shared_session.steps = StepWindow()
        if self._shared_session.save_hold is not None:
            self._shared_session.save_hold.recording.cancel()
            self._shared_session.save_hold = None

    # -- the end

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if is_success(error):
            self.close()
        else:
            code = PREEMPTED if isinstance(error, Preempted) else 1
            self.close(code=code, reason=f"{type(error).__name__}: {error}")

    def close(self, *, code: int = 0, reason: str = "") -> None:
        """End this client; the last one of its rank in this process ends the session. Idempotent.

        Under `strata run` the supervisor learns from the process's own end how the rank fared; only that it
        stopped as it was asked to (75), or that another try would meet the same (78), is said here: the program may end
        with another code after that.
        A standalone process says it here: with code 0 its rank is done, with 75 it stopped as it was asked
        to; it waits a minute for coordinators that are away. Otherwise, and when the process ends without this,
        the member leaves its world, which ends the generation for the others.

        `Preempted` when it was done and nobody heard that, in time or because its agent has ended: the program is
        to be begun again, to say so. A thread that is interrupted here goes at once; the end is told behind its
        back for as long as the process lives, and a moment longer.
        """
        if self._closed or self._loop.is_inherited:
            return
        self._loop.refuse_inside()  # in a callback of `observe_world`, say
        self._closed = True
        try:
            self._telling = self._loop.submit(self._close(code, reason or "closed"))
            told = self._telling.result()
        except (Unavailable, concurrent.futures.CancelledError):
            told = True  # nobody to tell, and nothing left to do
        self._loop.forget_at_stop(self._detach)
        if not told and not code:
            log.error("NOBODY HEARD THAT RANK %d IS DONE; begin it again, to say so", self.rank)
            raise Preempted(f"rank {self.rank} is done, and no coordinator heard that")

    async def _close(self, code: int, reason: str) -> bool:
        """Say how this rank ended, if it is to be said here, and leave; False when nobody heard it in time."""
        self._reports.send()
        self._shared_session.users -= 1
        last, member = not self._shared_session.users, self._shared_session.owns_member
        tells = last and code in {0, PREEMPTED} if member else code in {PREEMPTED, DO_NOT_REQUEUE}
        told = True
        if tells:
            unheard = asyncio.get_running_loop().call_later(UNHEARD_S, _say_unheard) if member else None
            try:
                async with asyncio.timeout(UNTOLD_S if member else LOCAL_SLACK_S):
                    await self._session.rank_exit(
                        generation=self.generation,
                        rank=self.rank,
                        code=code,
                        reason=reason if code == DO_NOT_REQUEUE else "",
                    )
            except (StaleGeneration, JobDone):
                pass  # leaving says the rest
            except (StrataError, TimeoutError):
                told = False
            finally:
                if unheard is not None:
                    unheard.cancel()
        if last:
            await self._session.leave(reason, limit_s=LEAVE_S)
        return told

    async def _detach(self) -> None:
        """Leave when the process ends without `close`, so that it is not taken for frozen."""
        if self._telling is not None:  # the thread that closed was interrupted
            await asyncio.wait({asyncio.wrap_future(self._telling)})
        elif not self._closed:
            self._closed = True
            await self._close(1, "the process ends")


def _say_unheard() -> None:
    log.warning("no coordinator hears how this rank ended; waiting up to %g s for one", UNTOLD_S)


def _observe(callbacks: list[Callable[[T], None]], callback: Callable[[T], None]) -> Callable[[], None]:
    """Have `callback` called as well; return the function that ends this."""
    callbacks.append(callback)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            callbacks.remove(callback)

    return stop
