"""A notice becomes a common last step, a save of it, and the end of this process or a wait for the next world: `Stopper`.

The notice is heard in the session's thread. A thread of its own then carries the agreement
(`core.stop.last_step`), while the trainer's thread trains on:

    trainer    n is complete ────── n+1 is complete ─ waits, if it holds ─ stops: saves with all, leaves or stays
                     │ begun            ▲ GO, WAIT or STOP
    agreement    proposals ─ meeting ─ answers ─ meeting ─ S, or the next round

A rank that is to leave does so at the commit of S, or at its own deadline, with code 75. A rank that stays waits where it
is for its agent, however long coordinators are away: others may have been told to stop at S (PROTOCOLS 6.1). What is not
committed within the grace is given up, and that is logged as an error: the job then goes on from the checkpoint before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

from strata.core.kv.records import StopNotice
from strata.core.stop.last_step import CLOSING_BARRIER, NO_LIMIT, STOP_BARRIER, Agreement, NextStep, Verdict
from strata.core.stop.notices import Meaning, is_wider, meaning
from strata.errors import BarrierBroken, CheckpointAborted, Preempted, StaleGeneration, StrataError
from strata.training.generation_exit import exit_preempted
from strata.training.rank_context import RankContext
from strata.training.stop.bounded import within
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import JOB_PHASE_DONE, JOB_PHASE_FAILED, StopJobResponse
from strata.v1.worlds_pb2 import StopNotice as NoticeMessage
from strata.wire.worlds import notice_record, stop_message

if TYPE_CHECKING:
    from strata.training.loop.run import Run

STOP: Final = "stop"
"""The phase of a rank that waits for the others' answer, or for the world without it."""
LEAVE_S: Final = 0.5
"""At least so long what is in flight is waited for by who leaves."""
WARN_S: Final = 1.0
"""So long before its deadline a rank that is to leave, and has not saved, says why."""
HELD_S: Final = 5.0
"""So long after its deadline a process is ended whose trainer's thread hangs: it may be no agent's."""
CLOSING_S: Final = 2.0
"""So long at most a rank that is done waits until it is heard that it closes."""
_ENDED: Final = frozenset({JOB_PHASE_DONE, JOB_PHASE_FAILED})
_LOOK_S: Final = 0.25
"""How often a waiting trainer looks whether its world has ended."""

log: Final = logging.getLogger("strata.training")


class Stopper:
    """Takes part in every step (`hooks.StepHook`), and lets it through until a stop is agreed.

    `clock` counts seconds; `save_cost_s` says how long a save has taken until it was committed,
    0 when none has been yet. `over` is called, in the session's thread, when the world has ended; `leave_now` ends
    the process, in a thread of its own, when the trainer's thread does not come out of a step or a save.
    """

    def __init__(
        self,
        run: Run,
        *,
        clock: Callable[[], float],
        save_cost_s: Callable[[], float],
        over: Callable[[], None],
        leave_now: Callable[[], None] | None = None,
    ) -> None:
        self._run = run
        self._leave_now = leave_now or exit_preempted
        self._context = run.context
        self._generation = run.context.generation
        self._clock = clock
        self._save_cost_s = save_cost_s
        self._over = over
        self._changed = threading.Condition()
        self._agreement = Agreement(start=run.step, begun=run.begun)
        self._notice: StopNotice | None = None
        self._deadline_s: float | None = None
        """When the save has to be done; None while nobody is to leave."""
        self._closing: threading.Thread | None = None
        """Says that this rank closes, once it does."""
        self._ended = False
        self.stopping = False
        """Whether this rank is at the common step, or leaves: what follows is known, whichever world comes."""
        self.saving = False
        """Whether this rank saves the common step: until its mark is on the storage a signal that ends it can wait."""
        self.leaving = False
        """Whether this process leaves because of the notice."""
        self._forget = self._context.observe_world(self._on_world)

    def covers(self, *, grace_s: float) -> bool:
        """Tell whether this process is asked to stop for good already, and within `grace_s`."""
        left_s = self._left_s()
        return self._leaves() and left_s is not None and left_s <= grace_s

    def _leaves(self) -> bool:
        """Tell whether this process is to leave; a wider notice may say so at any moment. Any thread."""
        with self._changed:
            return meaning(self._notice, self._context.worker_id) is Meaning.LEAVE

    def _left_s(self) -> float | None:
        with self._changed:
            return None if self._deadline_s is None else self._deadline_s - self._clock()

    def out_of_time(self, *, before_s: float = 0.0) -> bool:
        """Tell whether this process should have left by now, or is to within `before_s`. Any thread."""
        left_s = self._left_s()
        return left_s is not None and left_s <= before_s and self._leaves()

    # -- in the session's thread

    def _on_world(self, update: WorldUpdate) -> None:
        if update.world.generation > self._generation or update.phase in _ENDED:
            self._over()
        if update.HasField("notice") and update.notice.generation == self._generation:
            self.asked(update.notice)

    def asked(self, message: NoticeMessage) -> None:
        """Begin to agree on a step; asked again, more may have to leave, or in less time."""
        notice = notice_record(message)
        with self._changed:
            first = self._notice is None
            if notice.has_deadline:
                deadline_s = self._clock() + notice.grace_ms / 1000
                self._deadline_s = min(self._deadline_s or deadline_s, deadline_s)
            # answers and news may overtake each other
            if self._notice is None or not is_wider(self._notice, notice):
                self._notice = notice
            self._changed.notify_all()
        if first:
            grace = f"within {notice.grace_ms / 1000:g} s" if notice.has_deadline else "before another world"
            log.warning("all ranks are asked to stop %s: %s", grace, notice.reason)
            threading.Thread(target=self._agree, name="strata-stop", daemon=True).start()
            threading.Thread(target=self._keep_deadline, name="strata-stop-deadline", daemon=True).start()

    # -- in threads of their own

    def _agree(self) -> None:
        """Meet the other ranks until a step is agreed, or none can be any more."""
        try:
            while not self._round():
                pass
        except StrataError as error:
            # a rank has ended, or the world has: an outcome, alike for all, which releases whoever holds
            log.warning("no common step to stop at: %s", error.message)
            with self._changed:
                self._agreement = self._agreement.released()
                self._changed.notify_all()

    def _round(self) -> bool:
        """Tell whether a step is agreed on."""
        ranks, left_s = self._context.world_size, self._left_s()
        with self._changed:
            mine = self._agreement.propose(
                cost_ms=round(1000 * self._save_cost_s()),
                left_ms=NO_LIMIT if left_s is None else max(0, round(1000 * left_s)),
                can_save=self._run.checkpoints.gone_back is None,
            )
        proposals = self._context.barrier(STOP_BARRIER, mine)
        with self._changed:
            self._agreement, mine = self._agreement.answer(proposals, ranks=ranks)
            self._changed.notify_all()
        answers = self._context.barrier(STOP_BARRIER, mine)
        with self._changed:
            agreement = self._agreement = self._agreement.conclude(answers, ranks=ranks)
            self._changed.notify_all()
        if agreement.decision is None:
            log.info("round %d came too late for a common step", agreement.round - 1)
            return False
        log.warning(
            "all ranks stop after step %d: %s", agreement.decision.step, agreement.decision.verdict.sentence
        )
        return True

    def _keep_deadline(self) -> None:
        """Say what keeps this process from its end, shortly before its deadline; end it soon after that."""
        if self._await_deadline(WARN_S):
            with self._changed:
                decision, begun = self._agreement.decision, self._agreement.begun
            what = (
                "no common step was agreed on" if decision is None else f"step {decision.step} is not saved"
            )
            log.error("%s, the grace is nearly over, and step %d is under way here", what, begun)
        if self._await_deadline(-HELD_S):
            self._leave_now()

    def _await_deadline(self, before_s: float) -> bool:
        """Tell, once it is so, that this process is to leave within that time; False when it does by itself."""
        with self._changed:
            while not (self._ended or self.out_of_time(before_s=before_s)):
                self._changed.wait(_LOOK_S)
            return not self._ended

    # -- in the trainer's thread

    def begins(self, step: int) -> None:
        """Let the step begin, wait for the others' answer, or stop before it."""
        self._pass(step - 1)

    def completed(self, step: int) -> None:
        """The same for the step after this one, which begins here as far as others are concerned.

        Its batch is not drawn yet: what is saved now goes on with the same random numbers.
        """
        self._pass(step)

    def _pass(self, step: int) -> None:
        """Go on from `step`, or do not come back. Only what others decide ends a hold, never a clock."""
        while True:
            with self._changed:
                self._agreement, gate = self._agreement.begin(step)
            if gate is NextStep.STOP:
                self._stop(step)
            if self.out_of_time():
                self._skip(step, "no common step was agreed on in time")
                self._leave(step)
            if gate is NextStep.GO:
                return
            self._context.progress(step, STOP)  # raises once the world has ended
            with self._changed:
                if self._agreement.hold is not None:
                    self._changed.wait(_LOOK_S)

    def _stop(self, step: int) -> NoReturn:
        """Save the common step with all ranks, unless none does; then leave, or stay until the agent ends this process."""
        decision = self._agreement.decision
        assert decision is not None, "nobody stops before a decision"
        self.stopping = True
        if self._leaves():
            self._run.leaves_by_itself()
        try:
            if decision.save:
                self._save()
                log.warning("step %d is saved: training goes on from there", step)
            elif decision.verdict is Verdict.NOTHING_NEW:
                log.warning("step %d is not saved again: %s", step, decision.verdict.sentence)
            else:
                self._skip(step, decision.verdict.sentence)
        except StaleGeneration:
            if not self._leaves():
                raise
        except (
            CheckpointAborted,
            BarrierBroken,
        ) as error:  # the leader sees it, too, and ends the generation
            self._skip(step, str(error))
        except Exception as error:
            self._skip(step, f"{type(error).__name__}: {error}")
            if not self._leaves():
                raise
            if not isinstance(error, StrataError):
                log.exception("the save of step %d failed", step)
        log.info("step %d was the last of this world here", step)
        while not self._leaves():
            self._context.progress(step, STOP)  # raises once the world has ended
            with self._changed:
                self._changed.wait(_LOOK_S)
        self._leave(step)

    def _save(self) -> None:
        """Return once the common step is committed; `Unavailable` when this process is to leave before that.

        Who stays stands for an outage, however long: its end would be a failure.
        """
        info, self.saving = None, True
        tell = self._run.saves.teller(self._run.step)

        def over() -> bool:
            with contextlib.suppress(
                StaleGeneration
            ):  # the head follows the commit at once: what is left is the mark
                tell()
            return self.out_of_time()

        self._run.checkpoints.stand(lambda: not self._leaves())
        try:
            info = self._run.save_common(over=over)
            if info is not None:
                within(None, info.wait, what="waiting for the save", over=over)
        finally:
            if info is not None and not info.done:
                info.cancel()
            self._run.checkpoints.stand(lambda: False)
            self.saving = False

    def _skip(self, step: int, why: str) -> None:
        log.error("THE SAVE OF STEP %d IS SKIPPED: %s; training goes on from an earlier one", step, why)

    def _leave(self, step: int) -> NoReturn:
        notice, left_s = self._notice, self._left_s()
        assert notice is not None, "nobody leaves before a notice"
        self.leaving = self.stopping = self._ended = True
        # what is not written by then is given up, and the process ends
        self._run.abandon(notice.reason, code=Preempted.code, limit_s=max(LEAVE_S, left_s or 0.0))
        raise Preempted(f"stopped after step {step}: {notice.reason}")

    # -- the end of the run

    def closing(self) -> None:
        """Say that no other world need follow, now or later.

        Others, or this process, may evaluate for long.
        """
        closing = threading.Thread(target=self._close, name="strata-closing", daemon=True)
        # a process that ends has no new threads, and says the same by that
        with contextlib.suppress(RuntimeError):
            closing.start()
            self._closing = closing

    def _close(self) -> None:
        """Be at a barrier alone, which is in the leader's view then; the first of all ranks is enough."""
        with contextlib.suppress(StrataError):
            self._context.barrier(CLOSING_BARRIER, ranks=[self._context.rank])

    def closed(self) -> None:
        """The run has ended by itself; return once it is heard, for with its session nothing is said any more."""
        self._ended = True
        if self._closing is not None:
            self._closing.join(CLOSING_S)
        self._forget()


def ask_to_stop(
    context: RankContext, reason: str, *, grace_s: float, member_only: bool = False
) -> NoticeMessage | None:
    """Have all ranks of the generation asked to stop, or this member's; return the notice that holds, if any does."""
    leaving = [context.worker_id] if member_only else []
    request = stop_message(
        context.job, reason, grace_s=grace_s, generation=context.generation, leaving=leaving
    )
    response: StopJobResponse = context.call(request, timeout_s=max(1.0, grace_s))
    mine = response.HasField("notice") and response.notice.generation == context.generation
    return response.notice if mine else None
