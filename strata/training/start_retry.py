"""`StartRetry`: retries a rank's start while its storage refuses for a transient reason.

    claim the job's folders → restore → read the cursors that other ranks saved
          └─ refused ─▶ wait 1, 2, 4 … 30 s, retry ─▶ continue
                          ├─▶ its generation ends, or a notice tells the rank to leave: the wait ends
                          └─▶ `grace_s` over: the rank requests that all ranks stop, and leaves with 75

The rank waits as a rank with a held save does (`checkpoint.save.retry`), and reports a hold in the same way. If the
rank ended instead, it would be restarted immediately, and three such generations in a row would fail the job. The other
ranks wait for this rank at their next barrier; its phase shows that it waits for storage.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from strata.checkpoint.save.retry import HoldOver, SaveRetry
from strata.core.stop.notices import Meaning, meaning
from strata.errors import Preempted, StrataError
from strata.training.rank_context import Alone, RankContext
from strata.training.stop.stopper import request_stop
from strata.v1.session_pb2 import WorldUpdate
from strata.wire.worlds import notice_record

if TYPE_CHECKING:
    from strata.client.checkpoints.port import SessionPort

WAITS: Final = "restore: waits {:.0f} s for storage"
"""The phase of a rank that waits for its storage."""
REPORT_S: Final = 2.0
"""How often a waiting rank reports its phase."""

T = TypeVar("T")


def at_once(act: Callable[[], T]) -> T:
    """Return the result of `act` without any retry."""
    return act()


class StartRetry:
    """Calls functions that need the storage, and retries them while the storage refuses. For the trainer's thread."""

    def __init__(self, context: RankContext, *, grace_s: float, preempt_grace_s: float) -> None:
        """`grace_s` bounds the wait after the first refusal; with 0 there is no wait."""
        self._context = context
        self._preempt_grace_s = preempt_grace_s
        self._must_leave = threading.Event()
        self._leave_reason = ""
        if isinstance(context, Alone):
            self._retry = SaveRetry(grace_s=grace_s, meanwhile="the start waits")
        else:
            port = cast("SessionPort", context)
            self._retry = SaveRetry(grace_s=grace_s, tell=port.hold_saves, meanwhile="the start waits")
        self._retry.on_over = self._over

    def __call__(self, act: Callable[[], T]) -> T:
        """Return the result of `act`, retried while the storage refuses; raise its other errors.

        `Preempted` if this process must leave meanwhile, `StaleGeneration` if its generation ends meanwhile.
        """
        point: Any = getattr(self._context, "restore_point", None)
        self._retry.committed_step = point.step if point is not None else None
        forget = self._context.observe_world(self._on_world)
        try:
            # `step` is the first step that the refusal delays; with it, the generation counts as unable to save
            done = self._retry.first(
                [act], step=point.step + 1 if point is not None else 1, pause=self._pause
            )
        except HoldOver as over:
            raise Preempted(f"nothing can be restored: {over.message}") from over
        finally:
            forget()
        self._leave_if_requested()  # the notice may have come while `act` ran
        return done

    def _pause(self, seconds: float) -> None:
        self._context.support_graceful_stop()  # a notice ends the wait, and this process exits by itself
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            hold = self._retry.hold
            self._context.progress(0, WAITS.format(hold.held_s if hold is not None else 0.0))
            if self._must_leave.wait(min(left_s, REPORT_S)):
                break
        self._leave_if_requested()

    def _leave_if_requested(self) -> None:
        if self._must_leave.is_set():
            raise Preempted(f"stopped before the first step: {self._leave_reason}")

    def _on_world(self, update: WorldUpdate) -> None:
        """Record a notice, in the session's thread."""
        mine = update.HasField("notice") and update.notice.generation == self._context.generation
        if mine and meaning(notice_record(update.notice), self._context.worker_id) is Meaning.LEAVE:
            self._leave_reason = update.notice.reason
            self._must_leave.set()

    def _over(self, why: str) -> None:
        """Request that all ranks stop: otherwise the other ranks would wait for this rank, or continue without its
        node.
        """
        if isinstance(self._context, Alone):
            return
        reason = f"rank {self._context.rank} on {self._context.worker_id}: {why}"
        try:
            request_stop(self._context, reason, grace_s=self._preempt_grace_s)
        except StrataError:  # this rank leaves anyway, and the others learn of its departure
            return
