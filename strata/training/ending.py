"""What a process does once its generation has ended: `Ending`.

    under strata run        wait: the supervisor ends this process and starts another
      --restart=in_process  come back to `TrainingOrchestrator.train`, which begins again in it
    a lone member           leave, and run the program anew in its place (os.execv)
      that is to leave      leave for good, with exit code 75
      whose job is done     nothing is left to do: the program ends with 0 (`Run.failed`)

A lone member's main thread may hang in a collective whose peer has gone, and nothing ends that from
inside: gloo's abort does not reach a frozen peer. So its program is replaced from a background
thread, whatever the main one does. It leaves first, and registers again only when its imports are
done (PROTOCOLS 5.7). Before it has handed out a batch it adopts newer worlds without that.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, NoReturn, Protocol

from strata import STARTED_IN
from strata.core.exit_codes import PREEMPTED, REFUSED
from strata.errors import JobDone, Refused, StaleGeneration, StaleIncarnation, StrataError
from strata.training.group import abort_group
from strata.training.peers import Peers
from strata.v1.session_pb2 import RankPlace, WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    StopJobRequest,
)

PATIENCE_S: Final = 60.0
"""How long a rank of an ended generation waits to be ended."""
OVER_S: Final = 10.0
"""How much longer than `detect_s` the end of a generation may follow what it made fail here."""
REAP_S: Final = 1.0
LOOK_S: Final = 0.25
"""How often who waits for a newer world looks whether the job is done instead."""
ORPHAN_S: Final = 0.5
"""How long a rank whose agent has ended has to raise that."""
ASK_S: Final = 5.0
"""How long coordinators have to take note that this member leaves."""
STDERR: Final = 2
_ENDED: Final = frozenset({JOB_PHASE_DONE, JOB_PHASE_FAILED})

log: Final = logging.getLogger("strata.training")


class Ending(Protocol):
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

        `JobDone` when the others have finished the job without this member of its own.
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


def end_with_agent(peers: Peers, gone: Callable[[], None] = exit_orphaned) -> Callable[[], None]:
    """Have `gone` called once the agent has ended, from a thread of its own; return the way out.

    The main thread may hang in a collective with ranks that nobody restarts.
    """

    def ended(error: StrataError) -> None:
        if isinstance(error, StaleIncarnation):
            threading.Thread(target=gone, name="strata-orphan", daemon=True).start()
            log.error("%s", error)  # after that: another thread may be stuck in the log

    return peers.observe_end(ended)


class SupervisedEnding:
    """An agent ends this process: waiting for it spares the user an error that is none."""

    armed = True
    leaves = False

    def __init__(self, peers: Peers, *, patience_s: float = PATIENCE_S) -> None:
        self._patience_s = patience_s
        self._forget = end_with_agent(peers)

    def leave_then(self, reason: str) -> None:
        pass  # its supervisor was asked as well, or learns of it from the notice

    def arm(self) -> None:
        pass

    def over(self, error: StaleGeneration) -> None:
        log.info("this generation has ended: %s", error.message)
        threading.Event().wait(self._patience_s)

    def failed(self, error: BaseException) -> None:
        pass  # the agent learns of it from the process's end

    def close(self) -> None:
        self._forget()


class InProcessEnding:
    """The next generation begins in this process, once its supervisor has told the place in it.

    Collectives under way are aborted. One of NCCL's may then return as if it had succeeded, so
    `check` is called before each step of the optimizer.
    """

    armed = True
    leaves = False

    def __init__(self, peers: Peers) -> None:
        self._generation = peers.generation
        self._changed = threading.Condition()
        self._newer = False
        self._place: RankPlace | None = None
        self._forget = (
            peers.observe_world(self._on_world),
            peers.observe_place(self._on_place),
            end_with_agent(peers),
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


class LoneEnding:
    """This process leaves, and runs its program anew, once a newer world is there and it is armed.

    Not if it has to leave the job, because of a signal or of a notice that its generation did not live to
    obey: then it asks to be drained, so that nobody takes it for dead, and ends with 75.
    """

    def __init__(
        self,
        peers: Peers,
        *,
        detect_s: float,
        again: Callable[[], None] | None = None,
        gone: Callable[[], None] | None = None,
    ) -> None:
        """`detect_s` is how soon a death is known; `again` replaces the program, `gone` ends the process:
        they do not come back.
        """
        self._peers = peers
        self._detect_s = detect_s
        self._again = again if again is not None else execute_again
        self._gone = gone if gone is not None else exit_preempted
        self._lock = threading.Lock()
        self._update: WorldUpdate | None = None
        self._started = threading.Event()
        self._closed = False
        self._leaves_because = ""
        self.armed = False
        self._forget = peers.observe_world(self._on_world)

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
        if self.armed and not self._closed and self._begins_anew(PATIENCE_S):
            threading.Event().wait(PATIENCE_S)

    def failed(self, error: BaseException) -> None:
        """Wait whether a peer's death was why: then a newer world is on its way; or its end: the job is done."""
        if self._closed or not isinstance(error, Exception):
            return
        if isinstance(error, JobDone):
            self._refuse_done()
        if self._peers.world_size == 1:
            return
        log.warning("waiting whether another rank was lost: %s: %s", type(error).__name__, error)
        self.arm()
        if self._begins_anew(self._detect_s + OVER_S):
            threading.Event().wait(PATIENCE_S)

    def _begins_anew(self, limit_s: float) -> bool:
        """Tell whether the program is run anew, once it is or after `limit_s`; `JobDone` when the job is done."""
        for _ in range(math.ceil(limit_s / LOOK_S)):
            if self._started.wait(LOOK_S):
                return True
            self._refuse_done()
        return False

    def _refuse_done(self) -> None:
        """Raise `JobDone` if the job was done in a world after this member's, or while it was taken for lost."""
        with self._lock:
            update = self._update
        newer = update is not None and update.world.generation > self._peers.generation
        if update is not None and newer and update.phase == JOB_PHASE_DONE:
            raise JobDone(f"job {self._peers.job} is done: {update.phase_reason}")
        try:
            self._peers.check()
        except JobDone:
            raise
        except StrataError:
            pass  # something else has ended; that is told by whoever met it

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._forget()

    def _on_world(self, update: WorldUpdate) -> None:
        with self._lock:
            self._update = update
        self._look()

    def _look(self) -> None:
        with self._lock:
            update = self._update
            if update is None or not self.armed or self._started.is_set() or self._closed:
                return
            if update.world.generation <= self._peers.generation or update.phase in _ENDED:
                return
            self._started.set()
        # not in the session's thread: to leave is to wait for it
        threading.Thread(target=self._replace, args=(update,), name="strata-again", daemon=True).start()

    def _replace(self, update: WorldUpdate) -> None:
        self._leaves_because = self._leaves_because or self._asked(update)
        if self._leaves_because:
            self._leave(update)
            return
        why = f"generation {update.world.generation} began: {update.world.reason}"
        log.warning("running this program anew: %s", why)
        with contextlib.suppress(StrataError):  # nobody is there to hear it
            self._peers.close(code=1, reason=f"restarts, because {why}")
        (self._gone if self._leaves_because else self._again)()  # a signal may have come meanwhile

    def _asked(self, update: WorldUpdate) -> str:
        """Return why a notice that still holds has this member leave, "" when none does."""
        notice = update.notice
        named = notice.action == STOP_ACTION_DRAIN and self._peers.worker_id in notice.worker_ids
        return notice.reason if named or notice.action == STOP_ACTION_PREEMPT else ""

    def _leave(self, update: WorldUpdate) -> None:
        """Leave for good, as somebody who was asked to."""
        log.warning("leaving: %s", self._leaves_because)
        with contextlib.suppress(StrataError):  # then it counts as one that was lost
            if update.HasField("place"):
                request = StopJobRequest(
                    job=self._peers.job,
                    action=STOP_ACTION_DRAIN,
                    worker_ids=[self._peers.worker_id],
                    reason=self._leaves_because,
                )
                self._peers.call(request, timeout_s=ASK_S)
            self._peers.close(code=PREEMPTED, reason=self._leaves_because)
        self._gone()


@contextlib.contextmanager
def nothing_to_do_where_done(*, lone: bool = True) -> Iterator[None]:
    """End the program with 0, and a warning, where the job was done without it, as `strata run` does.

    Only of a `lone` member: what is said of another one is its supervisor's.
    """
    try:
        yield
    except JobDone as error:
        if not lone:
            raise
        log.warning("nothing is left to do: %s; another one needs another name (`job`)", error.message)
        raise SystemExit(0) from error


@contextlib.contextmanager
def told_where_refused(*, lone: bool = True) -> Iterator[None]:
    """End the program with 4, and one sentence, where its job does not take it, as `strata run` does.

    A job that another run finished does not. Only of a `lone` member: another one is let in by its supervisor.
    """
    try:
        yield
    except Refused as error:
        if not lone or type(error) is not Refused:  # a narrower one tells a program what to do
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


def execute_again() -> None:
    """Replace this process's program by the same, with the arguments and in the folder that it was started with.

    DataLoader workers would outlive that: they look whether their parent's process id is still the
    same, and it is. The connections of the old program's collectives would outlive it too: gloo
    leaves its sockets to whatever is executed, and torch's store the pipe that wakes its thread.
    """
    for child in multiprocessing.active_children():
        child.kill()
        child.join(REAP_S)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    _keep_nothing_open()
    # what is blocked here stays blocked in the new program
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    try:
        os.chdir(STARTED_IN)  # the program may have gone elsewhere, and its arguments be relative
    except OSError as error:
        log.warning("this program was started in %r, which is not there: %s", STARTED_IN, error)
    os.execv(sys.executable, sys.orig_argv)


def _keep_nothing_open() -> None:
    """Have every socket, what waits for them, and every pipe to oneself closed as the program is replaced.

    A pipe of which one end is elsewhere may have been given to this program for a purpose.
    """
    opened: dict[str, list[int]] = {}
    for number in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208  # the names are all that is wanted
        with contextlib.suppress(OSError):  # closed meanwhile, as that of the listing is
            opened.setdefault(os.readlink(f"/proc/self/fd/{number}"), []).append(number)  # noqa: PTH115  # no path of a file
    for where, numbers in opened.items():
        own_pipe = where.startswith("pipe:") and len(numbers) > 1 and min(numbers) > STDERR
        if own_pipe or where.startswith(("socket:", "anon_inode:")):
            for number in numbers:
                if number > STDERR:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        os.set_inheritable(number, False)
