"""A rank's start on a storage that refuses for a reason that time may heal: `StartRetry`.

    claim the job's folders → restore → what other ranks had saved
          └─ refused ─▶ waits 1, 2, 4 … 30 s, tries again ─▶ goes on
                          ├─▶ its generation ends, or it is asked to leave: so does the wait
                          └─▶ `grace_s` over: all ranks are asked to stop, and it leaves with 75

It waits as a save is held (`checkpoint.save.retry`), and the same is said of it: a rank that ended instead would be
started again at once, and three such generations in a row would fail the job. Others wait for it where they
meet: its phase says for what it waits.
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
from strata.training.stop.stopper import ask_to_stop
from strata.v1.session_pb2 import WorldUpdate
from strata.wire.worlds import notice_record

if TYPE_CHECKING:
    from strata.client.checkpoints.port import SessionPort

WAITS: Final = "restore: waits {:.0f} s for storage"
"""The phase of a rank that waits."""
TELL_S: Final = 2.0
"""How often it says so."""

T = TypeVar("T")


def at_once(act: Callable[[], T]) -> T:
    """Return what `act` does, and wait for nothing."""
    return act()


class StartRetry:
    """Calls what needs the storage until that takes it. For the trainer's thread."""

    def __init__(self, context: RankContext, *, grace_s: float, preempt_grace_s: float) -> None:
        """`grace_s` after the first refusal it waits no longer; 0: it never does."""
        self._context = context
        self._preempt_grace_s = preempt_grace_s
        self._asked = threading.Event()
        self._asked_because = ""
        if isinstance(context, Alone):
            self._retry = SaveRetry(grace_s=grace_s, meanwhile="the start waits")
        else:
            port = cast("SessionPort", context)
            self._retry = SaveRetry(grace_s=grace_s, tell=port.hold_saves, meanwhile="the start waits")
        self._retry.on_over = self._over

    def __call__(self, act: Callable[[], T]) -> T:
        """Return what `act` returns once the storage takes it; else raise what it raises.

        `Preempted` where this process is to leave instead, `StaleGeneration` when its generation ends meanwhile.
        """
        point: Any = getattr(self._context, "restore_point", None)
        self._retry.committed_step = point.step if point is not None else None
        forget = self._context.observe_world(self._on_world)
        try:
            # the first step that it keeps from being trained: with that the generation counts as one that could not save
            return self._retry.first(
                [act], step=point.step + 1 if point is not None else 1, pause=self._pause
            )
        except HoldOver as over:
            raise Preempted(f"nothing can be restored: {over.message}") from over
        finally:
            forget()

    def _pause(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            hold = self._retry.hold
            self._context.progress(0, WAITS.format(hold.held_s if hold is not None else 0.0))
            if self._asked.wait(min(left_s, TELL_S)):
                raise Preempted(f"stopped before the first step: {self._asked_because}")

    def _on_world(self, update: WorldUpdate) -> None:
        """Take note of a notice, in the session's thread."""
        mine = update.HasField("notice") and update.notice.generation == self._context.generation
        if mine and meaning(notice_record(update.notice), self._context.worker_id) is Meaning.LEAVE:
            self._asked_because = update.notice.reason
            self._asked.set()

    def _over(self, why: str) -> None:
        """Ask all ranks to stop: the others would wait for this one, or go on without its node."""
        if isinstance(self._context, Alone):
            return
        reason = f"rank {self._context.rank} on {self._context.worker_id}: {why}"
        try:
            ask_to_stop(self._context, reason, grace_s=self._preempt_grace_s)
        except StrataError:  # it leaves, and they learn of that
            return
