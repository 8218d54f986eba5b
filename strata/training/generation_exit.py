"""What a process does once its generation has ended: `GenerationExit`.

    under strata run        wait: the agent ends this process and starts another
      --restart=in_process  come back to `TrainingOrchestrator.train`, which begins again in it
    a standalone process    leave the job, and end with 75: nobody starts it again
      whose job is done     nothing is left to do: the program ends with 0 (`Run.failed`)
      whose control plane was restored    end with 75: no newer world is told to it

Before a standalone process has handed out a batch it adopts newer worlds instead.
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
"""How long a rank of an ended generation waits to be ended."""
OVER_S: Final = 10.0
"""How much longer than `detect_s` the end of a generation may follow what it made fail here."""
LOOK_S: Final = 0.25
"""How often who waits for a newer world looks whether the job is done instead."""
ORPHAN_S: Final = 0.5
"""How long a rank whose agent has ended has to raise that."""
ASK_S: Final = 5.0
"""How long coordinators have to take note that this member leaves."""
RESTORED: Final = "ended with code 75: the control plane was restored; start the program again, it goes on from the newest checkpoint (%s)"
_ENDED: Final = frozenset({JOB_PHASE_DONE, JOB_PHASE_FAILED})

log: Final = logging.getLogger("strata.training")


class GenerationExit(Protocol):
    """What follows the end of a generation."""

    @property
    def armed(self) -> bool:
        """Whether this process belongs to its generation for good."""
        ...

    @property
    def leaves(self) -> bool:
        """Whether this process ends itself, with 75, at the end of a generation in which it was to leave."""
        ...

    def leave_then(self, reason: str) -> None:
        """Take note of why this process is to leave, at the latest when its generation ends. Any thread."""
        ...

    def arm(self) -> None:
        """From now on this process holds what it cannot leave: a process group, a step under way."""
        ...

    def over(self, error: StaleGeneration) -> None:
        """In the trainer's thread, which met `error`; returns when that is to be raised.

        `JobDone` when the others have finished the job without this standalone process.
        """
        ...

    def failed(self, error: BaseException) -> None:
        """In the trainer's thread, which `error` ends; returns when that is this process's own failure.

        `JobDone` as above.
        """
        ...

    def close(self) -> None:
        """The training is done; nothing follows any more."""
        ...


class NeverEnds:
    """Of a process without any coordinator."""

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
    """End this process with 1, after a moment in which its main thread may raise the error instead."""
    time.sleep(ORPHAN_S)
    exit_with(1)


def end_with_agent(context: RankContext, gone: Callable[[], None] = exit_orphaned) -> Callable[[], None]:
    """Have `gone` called once the agent has ended, from a thread of its own; return the way out.

    The main thread may hang in a collective with ranks that nobody restarts.
    """

    def ended(error: StrataError) -> None:
        if isinstance(error, StaleIncarnation) and not is_interactive():
            threading.Thread(target=gone, name="strata-orphan", daemon=True).start()
            log.error("%s", error)  # after that: another thread may be stuck in the log

    return context.observe_end(ended)


class AgentExit:
    """An agent ends this process: waiting for it spares the user an error that is none."""

    armed = True
    leaves = False

    def __init__(self, context: RankContext, *, grace_s: float = GRACE_S) -> None:
        self._grace_s = grace_s
        self._forget = end_with_agent(context)

    def leave_then(self, reason: str) -> None:
        pass  # its supervisor was asked as well, or learns of it from the notice

    def arm(self) -> None:
        pass

    def over(self, error: StaleGeneration) -> None:
        log.info("this generation has ended: %s", error.message)
        threading.Event().wait(self._grace_s)

    def failed(self, error: BaseException) -> None:
        pass  # the agent learns of it from the process's end

    def close(self) -> None:
        self._forget()


class InProcessExit:
    """The next generation begins in this process, once its supervisor has told the place in it.

    Collectives under way are aborted. One of NCCL's may then return as if it had succeeded, so
    `check` is called before each step of the optimizer.
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
        pass  # as with any supervisor

    def arm(self) -> None:
        pass

    def over(self, error: StaleGeneration) -> None:
        pass  # raised, and met by `TrainingOrchestrator.train`

    def failed(self, error: BaseException) -> None:
        pass  # as above

    def close(self) -> None:
        for forget in self._forget:
            forget()

    def check(self) -> None:
        """Raise `StaleGeneration` once the generation has ended."""
        if self._newer:
            raise StaleGeneration(f"generation {self._generation} has ended: this step is not to be taken")

    def wait_over(self, timeout_s: float) -> bool:
        """Return whether the generation has ended, or does within `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newer, timeout_s)

    def wait_place(self) -> RankPlace:
        """Return this rank's place in a newer generation, however long the job waits for members.

        The supervisor ends this process when there will be none.
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
        if first:  # in a thread of its own: an abort may wait, and this is the session's
            threading.Thread(target=abort_group, name="strata-abort", daemon=True).start()


class StandaloneExit:
    """This process leaves the job and ends with 75, once a newer world is there and it is armed: nobody starts it again.

    Its main thread may hang in a collective whose peer has gone, and nothing ends that from inside: gloo's abort does not
    reach a frozen peer. So another thread ends it. In an interactive session, a notebook say, the error is raised only.
    """

    def __init__(
        self, context: RankContext, *, detect_s: float, gone: Callable[[], None] | None = None
    ) -> None:
        """`detect_s` is how soon a death is known; `gone` ends the process, and does not come back."""
        self._context = context
        self._detect_s = detect_s
        self._gone = gone if gone is not None else exit_preempted
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
        """Wait whether a peer's death was why: then a newer world is on its way; or its end: the job is done."""
        if self._closed or not isinstance(error, Exception):
            return
        if isinstance(error, JobDone):
            self._refuse_done()
        if isinstance(error, ClusterRestored) and not is_interactive():
            self._wait_over(GRACE_S)
        if self._context.world_size == 1:
            return
        log.warning("waiting whether another rank was lost: %s: %s", type(error).__name__, error)
        self.arm()
        self._wait_over(self._detect_s + OVER_S)

    def _wait_over(self, limit_s: float) -> None:
        """Return if no newer world comes within `limit_s`, or in an interactive session; `JobDone` when the job is done."""
        for _ in range(math.ceil(limit_s / LOOK_S)):
            if self._over.wait(LOOK_S):
                if not is_interactive():
                    threading.Event().wait(GRACE_S)
                elif self._update is not None:
                    self._leave(self._update)
                return
            self._refuse_done()

    def _refuse_done(self) -> None:
        """Raise `JobDone` if the job was done in a world after this member's, or while it was taken for lost."""
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
            pass  # something else has ended; that is told by whoever met it

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
            # not in the session's thread: to leave is to wait for it
            threading.Thread(target=self._end, args=(update,), name="strata-over", daemon=True).start()

    def _end(self, update: WorldUpdate) -> None:
        self._leave(update)
        self._gone()

    def _on_end(self, error: StrataError) -> None:
        """End this process with its generation if the session ended because the control plane was restored, armed or not."""
        with self._lock:
            if not isinstance(error, ClusterRestored) or self._closed or self._over.is_set():
                return
            if is_interactive():
                return  # the error is raised there
            self._over.set()
        threading.Thread(target=self._end_restored, args=(error,), name="strata-over", daemon=True).start()

    def _end_restored(self, error: ClusterRestored) -> None:
        log.error(RESTORED, error.message)
        self._gone()

    def _asked(self, update: WorldUpdate) -> str:
        """Return why a notice that still holds has this member leave, "" when none does."""
        notice = update.notice
        named = notice.action == STOP_ACTION_DRAIN and self._context.worker_id in notice.worker_ids
        return notice.reason if named or notice.action == STOP_ACTION_PREEMPT else ""

    def _leave(self, update: WorldUpdate) -> None:
        """Leave for good; where the newer world has a place for this member, as one that was asked to."""
        why = self._leaves_because or self._asked(update)
        if not why:
            why = f"generation {update.world.generation} began: {update.world.reason}"
            log.error("ended with code 75, for %s; start it under `strata run` to have it restarted", why)
        log.warning("leaving: %s", why)
        with contextlib.suppress(StrataError):  # then it counts as one that was lost
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
    """Tell whether somebody types into this process: an interpreter's prompt, IPython, or a notebook."""
    return hasattr(sys, "ps1") or hasattr(builtins, "__IPYTHON__")


@contextlib.contextmanager
def nothing_to_do_where_done(*, standalone: bool = True) -> Iterator[None]:
    """End the program with 0, and a warning, where the job was done without it, as `strata run` does.

    Only of a `standalone` process: a rank's agent says it.
    """
    try:
        yield
    except JobDone as error:
        if not standalone:
            raise
        log.warning("nothing is left to do: %s; another one needs another name (`job`)", error.message)
        raise SystemExit(0) from error


@contextlib.contextmanager
def told_where_refused(*, standalone: bool = True) -> Iterator[None]:
    """End the program with 4, and one sentence, where its job does not take it, as `strata run` does.

    A job that another run finished does not. End it with 75 if the control plane was restored before the job had a place for it.
    Only of a `standalone` process: a rank is let in by its agent.
    """
    try:
        yield
    except ClusterRestored as error:
        if not standalone or is_interactive():
            raise
        log.error(RESTORED, error.message)  # noqa: TRY400  # as below
        raise SystemExit(PREEMPTED) from error
    except Refused as error:
        if not standalone or type(error) is not Refused:  # a narrower one tells a program what to do
            raise
        log.error("%s", error)  # noqa: TRY400  # it says what to do: no traceback
        raise SystemExit(REFUSED) from error


def exit_preempted() -> None:
    """End this process with 75, whatever its main thread does: it may hang in a collective."""
    exit_with(PREEMPTED)


def exit_with(code: int) -> NoReturn:
    """End this process at once, with what it has written; nothing else that is to be done at its end is."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)
