"""`RankClient`: one rank's blocking interface to its session, returned by `strata.connect()`.

Under `strata run` the rank attaches to its agent's socket, and its place (generation, rank, world size) is in
the environment. Otherwise the rank is a standalone process: its own agent is a member with one rank, and the rank's
place comes from the world. The interface is the same.
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
from strata.session.terms import EXIT_REPORT_S
from strata.v1.barriers_pb2 import Arrival
from strata.v1.checkpoints_pb2 import Checkpoint
from strata.v1.common_pb2 import Author
from strata.v1.session_pb2 import RankPlace as PlaceMessage
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_FAILED, RestorePoint

LOCAL_SLACK_S: Final = 10.0
"""Seconds a call waits for the outcome after the barrier's own timeout: the session may have to reconnect."""

UNREPORTED_S: Final = 2.0
"""Seconds after which a warning says that no coordinator has confirmed this rank's exit report."""

log: Final = logging.getLogger("strata.client")

T = TypeVar("T")


class RankClient:
    """One rank: barriers, progress and requests, from any thread.

    If coordinators are unreachable, a call waits for them until its timeout. Once a newer world exists, every call
    of this rank raises `StaleGeneration`. Once the session has ended for good, every call raises the reason
    (`StaleIncarnation`, `ClusterReplaced`, `JobFailed`…).
    """

    def __init__(self, shared_session: SharedSession, background: BackgroundLoop) -> None:
        """Register as a user of the shared session; must be called in the loop."""
        shared_session.users += 1
        self._shared_session = shared_session
        self._session = shared_session.session
        self._loop = background
        self._closed = False
        self._reports = ProgressReports(shared_session, background)
        self._reporting: concurrent.futures.Future[bool] | None = None
        """The sending of this rank's exit report, once `close` has begun it."""
        self._loop.at_stop(self._detach)

    # -- identity

    @property
    def job(self) -> str:
        return self._shared_session.place.job

    @property
    def worker_id(self) -> str:
        """The member that this rank belongs to."""
        return self._shared_session.place.worker_id

    @property
    def incarnation(self) -> int:
        """The number that distinguishes this member from its replacement under the same id."""
        return self._session.incarnation

    @property
    def generation(self) -> int:
        """The generation this rank belongs to, even if a newer one exists."""
        return self._shared_session.place.generation

    @property
    def rank(self) -> int:
        return self._shared_session.place.rank

    @property
    def world_size(self) -> int:
        return self._shared_session.place.world_size

    @property
    def restore_point(self) -> RestorePoint | None:
        """The checkpoint that this generation starts from; None if it starts without a checkpoint."""
        return self._shared_session.place.restore_point

    @property
    def uid(self) -> str:
        """The cluster's uid."""
        return self._session.token.uid

    @property
    def detect_s(self) -> float:
        """Seconds within which a frozen process is detected."""
        welcome = self._session.welcome
        return welcome.detect_s if welcome is not None else 0.0

    @property
    def connected(self) -> bool:
        """Whether a coordinator serves the session now."""
        return self._session.connected

    # -- calls of a rank

    def barrier(
        self,
        name: str,
        payload: bytes | None = None,
        *,
        ranks: Sequence[int] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, bytes]:
        """Return the payloads by rank once every rank of the world (or of `ranks`) has arrived.

        Ranks without a payload are absent from the result. A name must always be used with the same set of ranks. Each
        call with a name is a separate round, and only one call per name may be open.

        `BarrierTimeout` names the ranks still missing `timeout_s` after the first arrival, `BarrierBroken` the ranks
        that died. All ranks get the same error, and the round is over. `Unavailable` is local: this rank did not
        receive the outcome, and another call joins the same round. `InvalidArgument`: an argument is invalid.
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
                # If the caller times out, the round stays open. `wait` and not `shield`: from Python 3.14 on,
                # `shield` would log a later failure of `pending`.
                await asyncio.wait((pending,))
            outcome = pending.result()
        except TimeoutError:
            last_error = self._session.last_error
            raise Unavailable(
                f"barrier {name!r}: no outcome within {timeout_s:g} s and {LOCAL_SLACK_S:g} s more"
                + (f": {last_error.message}" if last_error is not None else "")
            ) from None
        except StrataError:
            self._shared_session.rounds.delivered(name, None)
            raise
        self._shared_session.rounds.delivered(name, outcome)
        return payloads_of(outcome)

    def has_met(self, name: str) -> bool:
        """Return whether this rank has completed a barrier of that name in its generation."""
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
        """Report this rank's step and phase; return without waiting, and send the report soon.

        Users see both, also in the error of a barrier at which other ranks wait for this rank. `phase` is cut to
        200 characters, and control characters become "?". `own_s`, if known, is the compute time plus data wait of
        this rank's last step, without the wait for other ranks. Without `own_s`, a slow rank cannot be
        distinguished from the ranks that wait for it in every step. `data_wait_s` is the share of `own_s` spent
        waiting for batches. `training` returns the state of the training as a whole; only rank 0's is shown.
        `training` is called in the background thread, and only for a report that is sent.
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
        """Report that this rank trains on but cannot save for now, or (None) that it can save again.

        Any thread may call this; it returns without waiting and never raises. The hold is shown with the rank's
        progress. For a rank that has trained, the hold is also recorded once (`core.stop.save_hold`).
        """
        with contextlib.suppress(Unavailable):  # the session has ended, so no coordinator can receive it
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

    def support_graceful_stop(self) -> None:
        """Report, from the next progress on, that this rank stops by itself when its world is requested to stop."""
        self._shared_session.supports_graceful_stop = True

    def call(self, request: Message, *, timeout_s: float = 30.0) -> Any:
        """Return the response to one of the requests that a session carries.

        `Unavailable` after `timeout_s`: the request may have taken effect, and may be repeated.
        """
        return self._loop.call(self._session.call(request, timeout_s=arguments.seconds(timeout_s)))

    def observe_checkpoints(self, callback: Callable[[Checkpoint], None]) -> Callable[[], None]:
        """Call `callback` with every change of a checkpoint, in the background thread.

        The callback must not block. Return a function that removes it.
        """
        return _observe(self._shared_session.watcher.checkpoint_callbacks, callback)

    def observe_world(self, callback: Callable[[WorldUpdate], None]) -> Callable[[], None]:
        """Call `callback` with the known world and every later update of the world, in the background thread.

        The callback must not block. Return a function that removes it.
        """
        stop = _observe(self._shared_session.watcher.world_callbacks, callback)
        if self._session.world is not None:
            known = self._session.world
            self._loop.soon(lambda: callback(known))
        return stop

    def observe_place(self, callback: Callable[[PlaceMessage], None]) -> Callable[[], None]:
        """Call `callback` with this rank's place in a newer generation, in the background thread.

        Only an agent that restarts ranks inside their processes sends such a place. The callback must not block.
        """
        return _observe(self._shared_session.watcher.place_callbacks, callback)

    def observe_end(self, callback: Callable[[StrataError], None]) -> Callable[[], None]:
        """Call `callback` with the error that ends this rank's session for good, in the background thread.

        If the session has ended already, call it in this thread. The callback must neither block nor raise.
        """
        stop = _observe(self._shared_session.watcher.end_callbacks, callback)
        if (error := self._session.error) is not None:
            callback(error)  # the session ended before this call
        return stop

    @property
    def is_standalone(self) -> bool:
        """Whether this is a standalone process rather than an agent's rank."""
        return self._shared_session.owns_member

    def check(self) -> None:
        """Raise if this rank's generation or session has ended; otherwise return immediately."""
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
        """Join the newest world once a newer one has a place for this member.

        Only a standalone process may call this, and must have released everything of the old generation (process
        groups, state of other ranks). Afterwards `rank`, `world_size`, `generation` and `restore_point` are new.

        Call this after `StaleGeneration`. If the newer world is not formed yet, log a warning and wait for it. Raise
        `Unavailable` if it is not formed within `timeout_s`; the rank is then unchanged.
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
        self._shared_session.last_report = (
            None  # like the save hold, it belongs to a generation that has ended
        )
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
        """Close this client; the rank's last client in this process ends the session. Idempotent.

        Under `strata run` the agent takes a rank's result from the process's exit code, since the program may exit
        with a code other than `code`. So `close` reports only two codes: 75, the rank stopped as requested; 78, a
        restart would fail in the same way.

        A standalone process reports its result here: code 0, its rank is done; 75, it stopped as requested. `close`
        waits one minute for coordinators that are unreachable. With any other code, or if the process exits without
        `close`, the member leaves its world, which ends the generation for the others.

        Raise `Preempted` if the rank is done but no coordinator received the report in time, or if the rank's agent
        has ended: the program must be started again to report the result. If this thread is interrupted, the call
        returns immediately, and the report goes on in the background until shortly after the process begins to
        exit.
        """
        if self._closed or self._loop.is_inherited:
            return
        self._loop.refuse_inside()  # in a callback of `observe_world`, say
        self._closed = True
        try:
            self._reporting = self._loop.submit(self._close(code, reason or "closed"))
            reported = self._reporting.result()
        except (Unavailable, concurrent.futures.CancelledError):
            reported = True  # no session to report to, and nothing left to do
        self._loop.forget_at_stop(self._detach)
        if not reported and not code:
            log.error("NO COORDINATOR RECEIVED THAT RANK %d IS DONE; start it again to report it", self.rank)
            raise Preempted(f"rank {self.rank} is done, and no coordinator received that")

    async def _close(self, code: int, reason: str) -> bool:
        """Report this rank's result, if `close` reports it, and leave; return False if no coordinator received the
        report in time.
        """
        self._reports.send()
        self._shared_session.users -= 1
        last, member = not self._shared_session.users, self._shared_session.owns_member
        reports_exit = last and code in {0, PREEMPTED} if member else code in {PREEMPTED, DO_NOT_REQUEUE}
        reported = True
        if reports_exit:
            unreported = (
                asyncio.get_running_loop().call_later(UNREPORTED_S, _warn_unreported) if member else None
            )
            try:
                async with asyncio.timeout(EXIT_REPORT_S if member else LOCAL_SLACK_S):
                    await self._session.rank_exit(
                        generation=self.generation,
                        rank=self.rank,
                        code=code,
                        reason=reason if code == DO_NOT_REQUEUE else "",
                    )
            except (StaleGeneration, JobDone):
                pass  # leaving reports the rest
            except (StrataError, TimeoutError):
                reported = False
            finally:
                if unreported is not None:
                    unreported.cancel()
        if last:
            await self._session.leave(reason, limit_s=LEAVE_S)
        return reported

    async def _detach(self) -> None:
        """Leave when the process exits without `close`, so that the rank is not taken for frozen."""
        if self._reporting is not None:  # the thread that called `close` was interrupted
            await asyncio.wait({asyncio.wrap_future(self._reporting)})
        elif not self._closed:
            self._closed = True
            await self._close(1, "the process ends")


def _warn_unreported() -> None:
    log.warning("no coordinator receives how this rank ended; waiting up to %g s for one", EXIT_REPORT_S)


def _observe(callbacks: list[Callable[[T], None]], callback: Callable[[T], None]) -> Callable[[], None]:
    """Add `callback` to `callbacks`; return the function that removes it."""
    callbacks.append(callback)

    def stop() -> None:
        with contextlib.suppress(ValueError):
            callbacks.remove(callback)

    return stop
