"""`GenerationExit`: how a rank's process leaves a generation that has ended.

    under strata run        wait: the agent ends this process and starts another
      --restart=in_process  return to `TrainingOrchestrator.train`, which begins the next generation in this process
    a standalone process    leave the job, and exit with 75: nothing restarts this process
      whose job is done     exit with 0 (`Run.failed`)
      whose control plane was restored    exit with 75: it receives no newer world

A standalone process that has not handed out a batch yet adopts newer worlds instead.
"""

from __future__ import annotations

import builtins
import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, Protocol

from strata.core.exit_codes import PREEMPTED, REFUSED
from strata.errors import ClusterRestored, JobDone, Refused, StaleGeneration, StaleIncarnation, StrataError
from strata.training.group import abort_group
from strata.training.rank_context import RankContext
from strata.v1.session_pb2 import RankPlace, WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    StopJobRequest,
)

GRACE_S: Final = 60.0
"""How long a rank of an ended generation waits for its agent to end the rank's process."""
OVER_S: Final = 10.0
"""The news of a generation's end may arrive up to `detect_s` plus this time after the error that the end caused."""
POLL_S: Final = 0.25
"""How often a process that waits for a newer world checks whether the job is done instead."""
ORPHAN_S: Final = 0.5
"""How long the main thread has to raise the error after the rank's agent has ended."""
ASK_S: Final = 5.0
"""Timeout of the request that records this member's departure."""
RESTORED: Final = "ended with code 75: the control plane was restored; start the program again, it goes on from the newest checkpoint (%s)"
_ENDED: Final = frozenset({JOB_PHASE_DONE, JOB_PHASE_FAILED})

log: Final = logging.getLogger("strata.training")


class GenerationExit(Protocol):
    """How a process reacts to the end of its generation."""

    @property
    def armed(self) -> bool:
        """Whether this process is bound to its generation, and can adopt no newer one."""
        ...

    @property
    def leaves(self) -> bool:
        """Whether this process exits by itself, with 75, at the end of a generation in which it had to leave."""
        ...

    def leave_then(self, reason: str) -> None:
        """Record why this process must leave, at the latest when its generation ends. Any thread."""
        ...

    def arm(self) -> None:
        """Bind this process to its generation: from now on it has a process group or a step under way."""
        ...

    def over(self, error: StaleGeneration) -> None:
        """Handle the end of the generation in the trainer's thread; return if the caller has to raise `error`.

        `JobDone` if the other members have finished the job without this standalone process.
        """
        ...

    def failed(self, error: BaseException) -> None:
        """Handle an `error` that ends the trainer's thread; return if it is this process's own failure.

        Raise `JobDone` in the same case as `over`.
        """
        ...

    def close(self) -> None:
        """Stop reacting: the training is done."""
        ...


class NeverEnds:
    """For a process without coordinators, whose generation never ends."""

    armed = True
    leaves = False

    def leave_then(self, reason: str) -> None:
        pass

    def arm(self) -> None:
        pass

    def over(self, error: StaleGeneration) -> None:
        pass

    def failed(self, error: BaseException) -> None:
        pass

    def close(self) -> None:
        pass


def exit_orphaned() -> None:
    """Exit with 1 after `ORPHAN_S`, in which the main thread may raise the error instead."""
    time.sleep(ORPHAN_S)
    exit_with(1)


def end_with_agent(
    context: RankContext, exit_process: Callable[[], None] = exit_orphaned
) -> Callable[[], None]:
    """Call `exit_process` in a thread of its own once the agent has ended; return a function that cancels this.

    The main thread cannot watch the agent: the main thread may hang in a collective with ranks that nothing
    restarts.
    """

    def ended(error: StrataError) -> None:
        if isinstance(error, StaleIncarnation) and not is_interactive():
            threading.Thread(target=exit_process, name="strata-orphan", daemon=True).start()
            log.error(
                "%s", error
            )  # log only after that thread has started: another thread may hold the log's lock for ever

    return context.observe_end(ended)


class AgentExit:
    """This process waits until the agent ends it: an ordinary restart must not show the user an error."""

    armed = True
    leaves = False

    def __init__(self, context: RankContext, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._forget = end_with_agent(context)

    def leave_then(self, reason: str) -> None:
        pass  # the agent received the signal too, or reads the notice

    def arm(self) -> None:
        pass

    def over(self, error: StaleGeneration) -> None:
        log.info("this generation has ended: %s", error.message)
        threading.Event().wait(self._grace_s)

    def failed(self, error: BaseException) -> None:
        pass  # the agent learns of it from the process's exit

    def close(self) -> None:
        self._forget()


class InProcessExit:
    """The next generation begins in this process, once the agent has sent this process's place in that generation.

    The end of a generation aborts collectives under way. An aborted NCCL collective may return as if it had
    succeeded, so `check` is called before each step of the optimizer.
    """

    armed = True
    leaves = False

    def __init__(self, context: RankContext) -> None:
        self._generation = context.generation
        self._changed = threading.Condition()
        self._newer = False
        self._place: RankPlace | None = None
        self._forget = (
            context.observe_world(self._on_world),
            context.observe_place(self._on_place),
            end_with_agent(context),
        )

    def leave_then(self, reason: str) -> None:
        pass  # as in `AgentExit`

    def arm(self) -> None:
        pass

    def over(self, error: StaleGeneration) -> None:
        pass  # the caller raises it, and `TrainingOrchestrator.train` catches it

    def failed(self, error: BaseException) -> None:
        pass  # as above

    def close(self) -> None:
        for forget in self._forget:
            forget()

    def check(self) -> None:
        """Raise `StaleGeneration` once the generation has ended."""
        if self._newer:
            raise StaleGeneration(f"generation {self._generation} has ended: do not take this step")

    def wait_over(self, timeout_s: float) -> bool:
        """Return whether the generation has ended, or ends within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newer, timeout_s)

    def wait_place(self) -> RankPlace:
        """Return this rank's place in a newer generation, however long the job waits for members.

        If there will be no place for this rank, the agent ends this process.
        """
        with self._changed:
            while self._place is None:
                self._changed.wait()
            return self._place

    def _on_world(self, update: WorldUpdate) -> None:
        if update.world.generation > self._generation:
            self._end()

    def _on_place(self, place: RankPlace) -> None:
        if place.world.generation > self._generation:
            with self._changed:
                self._place = place
            self._end()

    def _end(self) -> None:
        with self._changed:
            first, self._newer = not self._newer, True
            self._changed.notify_all()
        if first:  # in a thread of its own: an abort may block, and this is the session's thread
            threading.Thread(target=abort_group, name="strata-abort", daemon=True).start()


class StandaloneExit:
    """An armed standalone process leaves the job and exits with 75 once a newer world exists; nothing restarts it.

    A separate thread ends the process: the main thread may hang in a collective with a lost peer. Nothing inside
    the process ends such a collective (gloo's abort does not reach a frozen peer). In an interactive session, such
    as a notebook, the error is only raised.
    """

    def __init__(
        self, context: RankContext, *, detect_s: float, exit_process: Callable[[], None] | None = None
    ) -> None:
        """`detect_s` is the time to detect a death; `exit_process` ends the process and does not return."""
        self._context = context
        self._detect_s = detect_s
        self._exit_process = exit_process if exit_process is not None else exit_preempted
        self._lock = threading.Lock()
        self._update: WorldUpdate | None = None
        self._over = threading.Event()
        self._closed = False
        self._leaves_because = ""
        self.armed = False
        self._forget = (
            context.observe_world(self._on_world),
            end_with_agent(context),
            context.observe_end(self._on_end),
        )

    @property
    def leaves(self) -> bool:
        return self.armed and not self._closed

    def leave_then(self, reason: str) -> None:
        self._leaves_because = self._leaves_because or reason

    def arm(self) -> None:
        with self._lock:
            self.armed = True
        self._look()

    def over(self, error: StaleGeneration) -> None:
        if self.armed and not self._closed:
            self._wait_over(GRACE_S)

    def failed(self, error: BaseException) -> None:
        """Wait for a sign that the loss of a peer caused `error`: a newer world, or the job is done."""
        if self._closed or not isinstance(error, Exception):
            return
        if isinstance(error, JobDone):
            self._refuse_done()
        if isinstance(error, ClusterRestored) and not is_interactive():
            self._wait_over(GRACE_S)
        if self._context.world_size == 1:
            return
        log.warning("waiting to learn if another rank was lost: %s: %s", type(error).__name__, error)
        self.arm()
        self._wait_over(self._detect_s + OVER_S)

    def _wait_over(self, limit_s: float) -> None:
        """Return after `limit_s` without a newer world, or in an interactive session; `JobDone` if the job is done."""
        for _ in range(math.ceil(limit_s / POLL_S)):
            if self._over.wait(POLL_S):
                if not is_interactive():
                    threading.Event().wait(GRACE_S)
                elif self._update is not None:
                    self._leave(self._update)
                return
            self._refuse_done()

    def _refuse_done(self) -> None:
        """Raise `JobDone` if the job was done in a world after this member's, or while this member counted as lost."""
        with self._lock:
            update = self._update
        newer = update is not None and update.world.generation > self._context.generation
        if update is not None and newer and update.phase == JOB_PHASE_DONE:
            raise JobDone(f"job {self._context.job} is done: {update.phase_reason}")
        try:
            self._context.check()
        except JobDone:
            raise
        except StrataError:
            pass  # the session or the generation has ended; the caller's next call reports this error

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for forget in self._forget:
            forget()

    def _on_world(self, update: WorldUpdate) -> None:
        with self._lock:
            self._update = update
        self._look()

    def _look(self) -> None:
        with self._lock:
            update = self._update
            if update is None or not self.armed or self._over.is_set() or self._closed:
                return
            if update.world.generation <= self._context.generation or update.phase in _ENDED:
                return
            self._over.set()
        if not is_interactive():
            # not in the session's thread: leaving waits for that thread
            threading.Thread(target=self._end, args=(update,), name="strata-over", daemon=True).start()

    def _end(self, update: WorldUpdate) -> None:
        self._leave(update)
        self._exit_process()

    def _on_end(self, error: StrataError) -> None:
        """End this process, armed or not, if its session ended because the control plane was restored."""
        with self._lock:
            if not isinstance(error, ClusterRestored) or self._closed or self._over.is_set():
                return
            if is_interactive():
                return  # in an interactive session the next call raises the error
            self._over.set()
        threading.Thread(target=self._end_restored, args=(error,), name="strata-over", daemon=True).start()

    def _end_restored(self, error: ClusterRestored) -> None:
        log.error(RESTORED, error.message)
        self._exit_process()

    def _notice_reason(self, update: WorldUpdate) -> str:
        """Return the reason of a notice in effect that makes this member leave, or ""."""
        notice = update.notice
        named = notice.action == STOP_ACTION_DRAIN and self._context.worker_id in notice.worker_ids
        return notice.reason if named or notice.action == STOP_ACTION_PREEMPT else ""

    def _leave(self, update: WorldUpdate) -> None:
        """Leave the job for good; if the newer world has a place for this member, drain the member first."""
        why = self._leaves_because or self._notice_reason(update)
        if not why:
            why = f"generation {update.world.generation} began: {update.world.reason}"
            log.error("ended with code 75, for %s; start it under `strata run` to have it restarted", why)
        log.warning("leaving: %s", why)
        with contextlib.suppress(StrataError):  # if this fails, the member counts as lost
            if update.HasField("place"):
                request = StopJobRequest(
                    job=self._context.job,
                    action=STOP_ACTION_DRAIN,
                    worker_ids=[self._context.worker_id],
                    reason=why,
                )
                self._context.call(request, timeout_s=ASK_S)
            self._context.close(code=PREEMPTED, reason=why)


def is_interactive() -> bool:
    """Return whether this process is interactive: an interpreter's prompt, IPython, or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


@contextlib.contextmanager
def exit_if_done(*, standalone: bool = True) -> Iterator[None]:
    """Exit with 0 and a warning if the block finds the job done without this process, as `strata run` does.

    Only for a `standalone` process: otherwise the rank's agent reports that the job is done.
    """
    try:
        yield
    except JobDone as error:
        if not standalone:
            raise
        log.warning("nothing is left to do: %s; to train again, choose another name (`job`)", error.message)
        raise SystemExit(0) from error


@contextlib.contextmanager
def exit_if_refused(*, standalone: bool = True) -> Iterator[None]:
    """Exit with 4 and one sentence if the job refuses this process, as `strata run` does.

    For example, a job that another run has finished refuses this process. Exit with 75 if the control plane was
    restored before the job had a place for this process. Only for a `standalone` process: a rank is admitted by its
    agent.
    """
    try:
        yield
    except ClusterRestored as error:
        if not standalone or is_interactive():
            raise
        log.error(RESTORED, error.message)  # noqa: TRY400  # as below
        raise SystemExit(PREEMPTED) from error
    except Refused as error:
        if not standalone or type(error) is not Refused:  # the program handles subclasses
            raise
        log.error("%s", error)  # noqa: TRY400  # the message says what to do: no traceback
        raise SystemExit(REFUSED) from error


def exit_preempted() -> None:
    """Exit with 75, even if the main thread hangs in a collective."""
    exit_with(PREEMPTED)


def exit_with(code: int) -> NoReturn:
    """Flush stdout and stderr, then end this process immediately, without exit handlers."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
