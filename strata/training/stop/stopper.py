"""`Stopper`: carries out a stop notice: a common last step, its save, then an exit or a wait for the next world.

The notice arrives in the session's thread. A separate thread then runs the agreement (`core.stop.last_step`), while the
trainer's thread continues training:

    trainer    n is complete ────── n+1 is complete ─ waits for answers ── stops: saves with all, leaves or stays
                     │ begun            ▲ GO, WAIT or STOP
    agreement    proposals ─ meeting ─ answers ─ meeting ─ S, or the next round

A rank that must leave exits with 75 when S, the agreed step, is committed, or at its own deadline. A rank that stays
waits at S until its agent ends it, even if the coordinators are unreachable. It must not train on, because other
ranks may already know that they stop at S (PROTOCOLS 6.1). A save that is not committed within the grace is dropped,
which is logged as an error; the job then continues from the previous checkpoint.
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
"""The phase of a rank that waits for the others' answers, or for the end of its world after the last step."""
LEAVE_S: Final = 0.5
"""The minimum time for which a leaving rank waits for its saves in flight."""
WARN_S: Final = 1.0
"""How long before its deadline a leaving rank that has not saved logs the reason."""
HELD_S: Final = 5.0
"""How long after its deadline a process whose trainer's thread hangs ends itself: it may have no agent."""
CLOSING_S: Final = 2.0
"""The maximum time for which a rank that is done waits for the delivery of its closing message."""
_ENDED: Final = frozenset({JOB_PHASE_DONE, JOB_PHASE_FAILED})
_POLL_S: Final = 0.25
"""How often the waiting trainer's thread checks whether its world has ended."""

log: Final = logging.getLogger("strata.training")


class Stopper:
    """Follows every step (`hooks.StepHook`), and lets steps begin until a stop is agreed.

    `clock` counts seconds. `save_cost_s` returns the time that a save took until its commit, 0 before the first. `over`
    is called in the session's thread when the world has ended. `leave_now` ends the process, from a thread of its own,
    if the trainer's thread hangs in a step or a save.
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
        """When the save must be done; None while no notice has a deadline."""
        self._closing: threading.Thread | None = None
        """The thread that reports that this rank closes."""
        self._ended = False
        self.stopping = False
        """Whether this rank has stopped at the common step, or leaves: a newer world no longer changes that."""
        self.saving = False
        """Whether this rank saves the common step: signals that would end this rank wait until the marker is in
        storage.
        """
        self.leaving = False
        """Whether this process leaves because of the notice."""
        self._forget = self._context.observe_world(self._on_world)

    def covers(self, *, grace_s: float) -> bool:
        """Return whether a notice already makes this process leave, within `grace_s`."""
        left_s = self._left_s()
        return self._leaves() and left_s is not None and left_s <= grace_s

    def _leaves(self) -> bool:
        """Return whether this process must leave; a notice to more members may change this at any time. Any thread."""
        with self._changed:
            return meaning(self._notice, self._context.worker_id) is Meaning.LEAVE

    def _left_s(self) -> float | None:
        with self._changed:
            return None if self._deadline_s is None else self._deadline_s - self._clock()

    def out_of_time(self, *, before_s: float = 0.0) -> bool:
        """Return whether this process should have left by now, or must leave within `before_s`. Any thread."""
        left_s = self._left_s()
        return left_s is not None and left_s <= before_s and self._leaves()

    # -- in the session's thread

    def _on_world(self, update: WorldUpdate) -> None:
        if update.world.generation > self._generation or update.phase in _ENDED:
            self._over()
        if update.HasField("notice") and update.notice.generation == self._generation:
            self.on_notice(update.notice)

    def on_notice(self, message: NoticeMessage) -> None:
        """Take in a notice: the first starts the agreement; later ones may make more members leave, or leave sooner."""
        notice = notice_record(message)
        with self._changed:
            first = self._notice is None
            if notice.has_deadline:
                deadline_s = self._clock() + notice.grace_ms / 1000
                self._deadline_s = min(self._deadline_s or deadline_s, deadline_s)
            # responses to this rank's requests and world updates may arrive out of order
            if self._notice is None or not is_wider(self._notice, notice):
                self._notice = notice
            self._changed.notify_all()
        if first:
            grace = f"within {notice.grace_ms / 1000:g} s" if notice.has_deadline else "before another world"
            log.warning("all ranks are requested to stop %s: %s", grace, notice.reason)
            threading.Thread(target=self._agree, name="strata-stop", daemon=True).start()
            threading.Thread(target=self._keep_deadline, name="strata-stop-deadline", daemon=True).start()

    # -- in threads of their own

    def _agree(self) -> None:
        """Run rounds with the other ranks until a step is agreed, or the barrier breaks."""
        try:
            while not self._round():
                pass
        except StrataError as error:
            # a rank or the world has ended: the barrier breaks for all ranks, which releases the waiting ranks
            log.warning("no common step to stop at: %s", error.message)
            with self._changed:
                self._agreement = self._agreement.released()
                self._changed.notify_all()

    def _round(self) -> bool:
        """Run one round; return whether a step is agreed."""
        ranks, left_s = self._context.world_size, self._left_s()
        with self._changed:
            mine = self._agreement.propose(
                cost_ms=round(1000 * self._save_cost_s()),
                left_ms=NO_LIMIT if left_s is None else max(0, round(1000 * left_s)),
                can_save=self._run.checkpoints.rewound is None,
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
        """Log what delays this process shortly before its deadline; end the process soon after the deadline."""
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
        """Wait until the deadline is `before_s` away and return True, or return False once the process is leaving."""
        with self._changed:
            while not (self._ended or self.out_of_time(before_s=before_s)):
                self._changed.wait(_POLL_S)
            return not self._ended

    # -- in the trainer's thread

    def begins(self, step: int) -> None:
        """Let the step begin, wait for the others' answer, or stop before it."""
        self._pass(step - 1)

    def completed(self, step: int) -> None:
        """Do the same as `begins` for the step after `step`, which now counts as begun for the other ranks.

        The batch of that step is not drawn yet, so a save at this point continues with the same random numbers.
        """
        self._pass(step)

    def _pass(self, step: int) -> None:
        """Return once the step after `step` may begin, else stop here. The wait for other ranks has no time limit."""
        while True:
            with self._changed:
                self._agreement, next_step = self._agreement.begin(step)
            if next_step is NextStep.STOP:
                self._stop(step)
            if self.out_of_time():
                self._skip(step, "no common step was agreed on in time")
                self._leave(step)
            if next_step is NextStep.GO:
                return
            self._context.progress(step, STOP)  # raises once the world has ended
            with self._changed:
                if self._agreement.hold is not None:
                    self._changed.wait(_POLL_S)

    def _stop(self, step: int) -> NoReturn:
        """Save the common step with all ranks, unless it is skipped; then leave, or wait until the agent ends it."""
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
        ) as error:  # the leader sees the failed save too, and ends the generation
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
                self._changed.wait(_POLL_S)
        self._leave(step)

    def _save(self) -> None:
        """Return once the common step is committed; `Unavailable` if this process must leave before that.

        A rank that stays waits through an outage of the coordinators of any length: its exit would count as a failure.
        """
        info, self.saving = None, True
        report = self._run.saves.teller(self._run.step)

        def over() -> bool:
            with contextlib.suppress(
                StaleGeneration
            ):  # a newer world may follow the commit immediately: only this rank's marker is left to write
                report()
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
        # saves not written by then are dropped, and the process ends
        self._run.abandon(notice.reason, code=Preempted.code, limit_s=max(LEAVE_S, left_s or 0.0))
        raise Preempted(f"stopped after step {step}: {notice.reason}")

    # -- the end of the run

    def closing(self) -> None:
        """Report that no other world need follow; other ranks, or this one, may still evaluate for a long time."""
        closing = threading.Thread(target=self._close, name="strata-closing", daemon=True)
        # a process that is shutting down cannot start threads; its end reports the same
        with contextlib.suppress(RuntimeError):
            closing.start()
            self._closing = closing

    def _close(self) -> None:
        """Report the closing to the leader by arriving alone at a barrier; the report of one rank is enough."""
        with contextlib.suppress(StrataError):
            self._context.barrier(CLOSING_BARRIER, ranks=[self._context.rank])

    def closed(self) -> None:
        """Return once the closing message is delivered: after the end of the session nothing more can be sent."""
        self._ended = True
        if self._closing is not None:
            self._closing.join(CLOSING_S)
        self._forget()


def request_stop(
    context: RankContext, reason: str, *, grace_s: float, member_only: bool = False
) -> NoticeMessage | None:
    """Request that all ranks of the generation, or only this member's ranks, stop; return the notice in effect, if
    any.
    """
    leaving = [context.worker_id] if member_only else []
    request = stop_message(
        context.job, reason, grace_s=grace_s, generation=context.generation, leaving=leaving
    )
    response: StopJobResponse = context.call(request, timeout_s=max(1.0, grace_s))
    mine = response.HasField("notice") and response.notice.generation == context.generation
    return response.notice if mine else None
