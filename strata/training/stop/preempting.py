"""`Preemption`: turns a signal or a notice into a common stop of all ranks; `strata.init` adds it to a run.

A rank that gets a signal sends a stop request to the coordinators. The coordinators' notice reaches all ranks,
including this rank. So all ranks stop in the same way, however many were signalled. A training without coordinators
stops without a request. If the generation ends first, the agent ends the rank; a standalone process leaves
(`GenerationExit`). A rank whose saves were held for too long sends the same request: the job stops, to be started
again on nodes that can save.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from strata.errors import StaleGeneration, StrataError
from strata.training.generation_exit import GenerationExit
from strata.training.rank_context import Alone
from strata.training.stop.signals import PreemptSignals
from strata.training.stop.stopper import Stopper, request_stop
from strata.v1.worlds_pb2 import STOP_ACTION_PREEMPT, StopNotice

if TYPE_CHECKING:
    from strata.training.loop.run import Run

READY: Final = "ready"
"""The phase of a rank that is ready for its first step."""
PREEMPT_SIGNALS: Final[tuple[int, ...]] = (signal.SIGTERM, signal.SIGUSR1)

log: Final = logging.getLogger("strata.training")


class Preemption:
    """Follows every step (`hooks.StepHook`) of one run, and handles the signals of its process."""

    def __init__(
        self,
        run: Run,
        *,
        signals: Sequence[int],
        member_only: bool,
        grace_s: float,
        clock: Callable[[], float],
        save_cost_s: Callable[[], float],
        ending: GenerationExit | None = None,
    ) -> None:
        """`member_only`: a signal makes only this member leave, and the others continue without it.

        `ending` handles the end of the generation, and receives the reason why this process must leave then.
        """
        self._context = run.context
        self._ending = ending
        self._member_only = member_only
        self._grace_s = grace_s
        self._ended = False
        self._signals: PreemptSignals | None = None
        self._stopper = Stopper(run, clock=clock, save_cost_s=save_cost_s, over=self._world_ended)
        self._signals = PreemptSignals(signals, self._signalled)
        try:
            self._context.support_graceful_stop()
            self._context.progress(run.step, READY)
        except StrataError:
            self.closed()
            raise

    # -- in the trainer's thread

    def begins(self, step: int) -> None:
        """Let the step begin, or stop before it."""
        self._stopper.begins(step)

    def completed(self, step: int) -> None:
        """Let the next step begin, or stop after this one."""
        self._stopper.completed(step)

    def closing(self) -> None:
        """Report that this rank is done, so that no other world need follow."""
        self._stopper.closing()

    def closed(self) -> None:
        """Restore the signals' earlier handlers, unless this process is leaving because of a notice."""
        self._stopper.closed()
        if self._signals is not None and not self._stopper.leaving:
            self._signals.close()

    def out_of_time(self) -> bool:
        """Return whether this process should have left by now because of a notice."""
        return self._stopper.out_of_time()

    # -- in other threads

    def cannot_save(self, why: str) -> None:
        """Request that all ranks stop: saves were held for so long that further training would risk too much."""
        reason = f"rank {self._context.rank} on {self._context.worker_id}: {why}"
        if self._ended:
            return
        if isinstance(self._context, Alone):
            self._stopper.on_notice(self._notice(reason))
            return
        try:
            notice = self._request(reason, member_only=False)
        except StrataError as error:  # the next held save requests it again
            log.error("the stop cannot be requested: %s", error)  # noqa: TRY400  # the reason says it all
            return
        if notice is not None:
            self._stopper.on_notice(notice)

    def _world_ended(self) -> None:
        self._ended = True
        if self._signals is not None and not self._stopper.stopping and not self._leaves_by_itself:
            self._signals.obey_received()

    @property
    def _ends_by_itself(self) -> bool:
        """Whether a signal at the end of the generation can be ignored, because this process ends soon anyway."""
        return self._leaves_by_itself or self._stopper.saving

    @property
    def _leaves_by_itself(self) -> bool:
        """Whether this process exits by itself at the end of a generation in which it had to leave."""
        return self._ending is not None and self._ending.leaves

    def _signalled(self, number: int) -> bool:
        """Request that all ranks stop; return False if nothing will handle the request."""
        name = signal.Signals(number).name
        reason = f"{name} to rank {self._context.rank} on {self._context.worker_id}"
        if self._ending is not None:
            self._ending.leave_then(reason)
        if self._ended:
            return self._ends_by_itself
        if self._stopper.covers(grace_s=self._grace_s):
            return True
        if isinstance(self._context, Alone):
            self._stopper.on_notice(self._notice(reason))
            return True
        try:
            notice = self._request(reason, member_only=self._member_only)
        except StaleGeneration:
            # the end of the generation is about to arrive here too: the agent may have sent the signal because of it
            return self._ends_by_itself
        except StrataError as error:
            log.error("the stop cannot be requested: %s", error)  # noqa: TRY400  # the reason says it all
            return False
        if notice is not None:
            self._stopper.on_notice(notice)
        return notice is not None

    def _request(self, reason: str, *, member_only: bool) -> StopNotice | None:
        return request_stop(self._context, reason, grace_s=self._grace_s, member_only=member_only)

    def _notice(self, reason: str) -> StopNotice:
        return StopNotice(
            generation=self._context.generation,
            action=STOP_ACTION_PREEMPT,
            reason=reason,
            grace_ms=round(1000 * self._grace_s),
        )
