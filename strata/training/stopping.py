"""A notice becomes a common last step, a save of it, and the end of this process: `Stopper`.

The notice is heard in the session's thread. A thread of its own then carries the agreement
(`core.agreement`), while the trainer's thread trains on:

    trainer    n is complete ────── n+1 is complete ─ waits, if it holds ─ stops: save, leave
                     │ begun            ▲ GO, WAIT or STOP
    agreement    proposes ─ round ─ confirms ─ round ─ concludes

Before the save all ranks meet once more, with the time that each has left and what a save has
cost it, so that all of them save or none. What is not committed within the grace is given up, and
that is logged as an error: the job then goes on from the checkpoint before.

A notice may become wider while the ranks stop, or have: who waits for a world without others looks
whether it is asked to leave as well.

Nobody waits for ever. Where nobody is to leave, for another world is to follow, a rank that hears no
word for a while (coordinators are lost, a rank is done) gives that up and trains on: the leader goes
by what has become of the ranks. Others may have been told to stop where it went on. It says so at their
meeting before the save, and all go on from there and agree anew, as they do when somebody comes to that
meeting too late, or hears nothing of it. One that is to leave does so when its time is over, saved or not.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, NoReturn

from strata.client.rank import LOCAL_SLACK_S
from strata.core.agreement import Agreement, Gate, TimeLeft, choose_save
from strata.core.reshaping import CLOSING_BARRIER, SAVED_BARRIER
from strata.errors import BarrierTimeout, Preempted, StrataError, Unavailable
from strata.training.bounded import within
from strata.training.peers import Peers
from strata.training.saves import SLACK_S
from strata.v1.session_pb2 import WorldUpdate
from strata.v1.worlds_pb2 import (
    JOB_PHASE_DONE,
    JOB_PHASE_FAILED,
    STOP_ACTION_DRAIN,
    STOP_ACTION_PREEMPT,
    STOP_ACTION_RESHAPE,
    StopJobRequest,
    StopJobResponse,
    StopNotice,
)

if TYPE_CHECKING:
    from strata.training.run import Run

AGREE_BARRIER: Final = "strata.stop"
SAVE_BARRIER: Final = "strata.stop.save"
"""Where all meet who were told a step. The number of the attempt goes behind it: an old meeting is not a new one."""
STOP: Final = "stop"
"""The phase of a rank that waits for the others' word, or for the world without it."""
MEET_S: Final = 5.0
"""At least so long ranks wait for each other at the common step: they were a moment apart."""
WORD_S: Final = 20.0
"""How long a rank that need not leave waits at the common step for the others' word, or for a world."""
HELD_S: Final = 5.0
"""So long after its grace a rank that is to leave goes, though no step was agreed on."""
LEAVE_S: Final = 0.5
"""At least so long what is in flight is waited for by who leaves."""
SAID_S: Final = 2.0
"""So long at most a rank that is done waits until it is heard that it closes."""
_ENDED: Final = frozenset({JOB_PHASE_DONE, JOB_PHASE_FAILED})
_LOOK_S: Final = 0.25
"""How often a waiting trainer looks whether its world has ended."""

log: Final = logging.getLogger("strata.training")


class Stopper:
    """Takes part in every step (`hooks.StepHook`), and lets it through until a stop is agreed.

    `clock` counts seconds; `save_cost_s` says how long a save has taken until it was committed,
    0 when none has been yet. `over` is called, in the session's thread, when the world has ended.
    """

    def __init__(
        self,
        run: Run,
        *,
        clock: Callable[[], float],
        save_cost_s: Callable[[], float],
        over: Callable[[], None],
        word_s: float = WORD_S,
    ) -> None:
        self._run = run
        self._peers = run.peers
        self._generation = run.peers.generation
        self._clock = clock
        self._save_cost_s = save_cost_s
        self._over = over
        self._word_s = word_s
        self._changed = threading.Condition()
        self._agreement = Agreement(begun=run.begun)
        self._notice: StopNotice | None = None
        self._met = False
        """Whether all ranks have met at the common step."""
        self._saying: threading.Thread | None = None
        """Says that this rank closes, once it does."""
        self._agreeing = False
        """Whether a thread carries the agreement at this moment."""
        self._deadline_s = 0.0
        self.leaving = False
        """Whether this process leaves because of the notice."""
        self._forget = self._peers.observe_world(self._on_world)

    @property
    def notice(self) -> StopNotice | None:
        """What this generation was asked to do; None while it was not."""
        return self._notice

    def covers(self, *, grace_s: float) -> bool:
        """Tell whether this process is asked to stop for good already, and within `grace_s`."""
        with self._changed:
            notice, left_s = self._notice, self._deadline_s - self._clock()
        return notice is not None and self._means_us(notice) and left_s <= grace_s

    def _means_us(self, notice: StopNotice) -> bool:
        return means(notice, self._peers.worker_id)

    # -- in the session's thread

    def _on_world(self, update: WorldUpdate) -> None:
        if update.world.generation > self._generation or update.phase in _ENDED:
            self._over()
        if update.HasField("notice") and update.notice.generation == self._generation:
            self.asked(update.notice)

    def asked(self, notice: StopNotice) -> None:
        """Begin to agree on a step; asked again, more may have to leave, or in less time."""
        deadline_s = self._clock() + notice.grace_ms / 1000
        with self._changed:
            before = self._notice
            first = before is None
            # the time to save in before another world is nobody's time to leave
            anew = before is None or _is_reshape(before) > _is_reshape(notice)
            self._deadline_s = deadline_s if anew else min(self._deadline_s, deadline_s)
            # answers and news may overtake each other
            if before is None or (notice != before and _is_wider(notice, before)):
                self._notice = notice
            begin = not self._agreeing and self._notice is not before and self._agreement.agreed is None
            self._agreeing |= begin
            self._changed.notify_all()
        if first:
            grace = f"{notice.grace_ms / 1000:g} s"
            if notice.action == STOP_ACTION_RESHAPE:
                log.warning(
                    "another world follows; all ranks save first, within %s: %s", grace, notice.reason
                )
            else:
                log.warning("all ranks are asked to stop within %s: %s", grace, notice.reason)
        if begin:
            threading.Thread(target=self._agree, name="strata-stop", daemon=True).start()

    # -- in a thread of its own

    def _agree(self) -> None:
        """Meet the other ranks until a step is agreed, or no step can be any more."""
        while True:
            notice = self._notice
            try:
                while not self._attempt():
                    pass
            except StrataError as error:
                # the world has ended, or a rank has: what follows from that ends the training here
                log.warning("no common step to stop at: %s", error.message)
            else:
                return  # another thread may carry another agreement by now
            with self._changed:
                self._agreement = self._agreement.give_up()
                self._changed.notify_all()
                if self._notice is notice:
                    self._agreeing = False
                    return

    def _attempt(self) -> bool:
        """Tell whether a step is agreed on; nobody carries the agreement any more then."""
        ranks = self._peers.world_size
        with self._changed:
            self._agreement, mine = self._agreement.propose()
        proposals = self._peers.barrier(AGREE_BARRIER, mine)
        with self._changed:
            self._agreement, mine = self._agreement.confirm(proposals, ranks=ranks)
        answers = self._peers.barrier(AGREE_BARRIER, mine)
        with self._changed:
            agreement = self._agreement = self._agreement.conclude(answers, ranks=ranks)
            # in one act: the trainer may stop, hear that not all do, and begin anew before this thread ends
            self._agreeing = agreement.agreed is None
            self._changed.notify_all()
        if agreement.went_on:
            self._say_that_it_went_on(agreement.attempt)
            return False
        if agreement.agreed is None:
            log.info("attempt %d came too late for a common step", agreement.attempt)
            return False
        log.warning("all ranks stop after step %d", agreement.agreed)
        return True

    def _say_that_it_went_on(self, attempt: int) -> None:
        """Let those who stop where this rank does not learn that, instead of waiting for it there."""
        log.warning("all ranks would have stopped before step %d, which has begun here", self._run.begun)
        # they were there and are not any more, or that cannot be learned: all come to the next round either way
        with contextlib.suppress(BarrierTimeout, Unavailable):
            on = TimeLeft(went_on=True).encode()
            self._peers.barrier(f"{SAVE_BARRIER}.{attempt}", on, timeout_s=self._word_s)

    # -- in the trainer's thread

    def begins(self, step: int) -> None:
        """Let the step begin, wait for the others' word, or stop before it."""
        self._pass(step - 1)

    def completed(self, step: int) -> None:
        """The same for the step after this one, which begins here as far as others are concerned.

        Its batch is not drawn yet: what is saved now goes on with the same random numbers.
        """
        self._pass(step)

    def _pass(self, step: int) -> None:
        """Go on from `step`, or do not come back."""
        since_s: float | None = None
        while True:
            with self._changed:
                self._agreement, gate = self._agreement.begin(step)
                if gate is Gate.WAIT and since_s is not None:
                    self._changed.wait(_LOOK_S)
            if gate is not Gate.STOP and self.out_of_time(for_s=HELD_S):
                log.error("THE SAVE OF STEP %d IS SKIPPED: no common step was agreed on in time", step)
                self._leave(step)
            if gate is Gate.GO:
                return
            if gate is Gate.STOP:
                self._stop(step)
                since_s = None
                continue
            since_s = self._clock() if since_s is None else since_s
            if self._heard_nothing(since_s):
                self._hold_no_longer(step)
                since_s = None
                continue
            self._peers.progress(step, STOP)  # raises once the world has ended

    def out_of_time(self, *, for_s: float = 0.0) -> bool:
        """Tell whether this process should have left by now, or so long ago. Any thread."""
        with self._changed:
            notice = self._notice
            left_s = self._deadline_s - self._clock()
        return notice is not None and self._means_us(notice) and left_s <= -for_s

    def _heard_nothing(self, since_s: float) -> bool:
        """Tell whether nobody said anything for long, and nobody is to leave."""
        with self._changed:
            notice = self._notice
        return notice is not None and _is_reshape(notice) and self._clock() - since_s >= self._word_s

    def _hold_no_longer(self, step: int) -> None:
        """Train on without the others' word, unless it came just now: what is agreed on stays so."""
        with self._changed:
            told = self._agreement.agreed is not None
            self._agreement = self._agreement.give_up()
            self._changed.notify_all()
        if not told:
            log.warning("no other world has followed: training goes on from step %d", step)

    def _agree_anew(self, step: int) -> None:
        """Do not stop at this step, since not all do: all learn that where they meet, and agree on another."""
        with self._changed:
            self._agreement = self._agreement.forget()
            begin, self._agreeing = not self._agreeing, True
            self._changed.notify_all()
        log.warning("training goes on from step %d: another common step follows", step)
        if begin:
            threading.Thread(target=self._agree, name="strata-stop", daemon=True).start()

    def closing(self) -> None:
        """Say that no other world need follow, now or later.

        Others, or this process, may evaluate for long.
        """
        saying = threading.Thread(target=self._say_that_it_closes, name="strata-closing", daemon=True)
        # a process that ends has no new threads, and says the same by that
        with contextlib.suppress(RuntimeError):
            saying.start()
            self._saying = saying

    def _say_that_it_closes(self) -> None:
        """Be at a barrier alone, which is in the leader's view then; the first of all ranks is enough."""
        with contextlib.suppress(StrataError):
            self._peers.barrier(CLOSING_BARRIER, ranks=[self._peers.rank])

    def closed(self) -> None:
        """The run has ended by itself; return once it is heard, for with its session nothing is said any more."""
        if self._saying is not None:
            self._saying.join(SAID_S)
        self._forget()

    def left(self) -> None:
        """Nothing is left to do."""

    def given_up(self) -> None:
        """Its generation is not this process's any more, before it has begun a step."""
        self.closed()

    def _stop(self, step: int) -> None:
        """Save the common step and leave, or wait for another world; come back when none follows."""
        if not self._save(step):
            self._agree_anew(step)
            return
        self._say_that_it_is_saved(step)
        if self._has_to_leave(step):
            self._leave(step)
        log.warning("no other world has followed: training goes on from step %d", step)

    def _leave(self, step: int) -> NoReturn:
        notice = self._notice
        assert notice is not None, "nobody leaves before a notice"
        self.leaving = True
        # what is not written by then is given up, and the process ends
        self._run.abandon(notice.reason, code=Preempted.code, limit_s=max(LEAVE_S, self._left_s()))
        raise Preempted(f"stopped after step {step}: {notice.reason}")

    def _say_that_it_is_saved(self, step: int) -> None:
        """Return once all ranks are as far, which is what the leader waits for before another world."""
        notice = self._notice
        if notice is None or not _is_reshape(notice):
            return
        # one that hears of another notice just now does not come: the leader goes by that then
        with contextlib.suppress(StrataError):
            self._peers.progress(step, STOP)
            limit_s = max(self._word_s, self._left_s()) if self._met else self._word_s
            within(
                limit_s + SLACK_S,
                lambda: self._peers.barrier(SAVED_BARRIER, timeout_s=limit_s),
                what="meeting after the save",
                over=self._leaves,
            )

    def _has_to_leave(self, step: int) -> bool:
        """Tell whether this process leaves, once it is asked to; a newer world without the others is raised.

        False when no other world follows, though nobody was to leave: the leader ends this one if it likes.
        What was agreed on is forgotten in one act with that: what is asked from then on is agreed on anew.
        """
        told: StopNotice | None = None
        since_s = self._clock()
        while True:
            with self._changed:
                notice = self._notice
                assert notice is not None, "a step is agreed only after a notice"
                if self._means_us(notice):
                    return True
                if self._heard_nothing(since_s):
                    self._agreement = self._agreement.forget()
                    self._changed.notify_all()
                    return False
            if told is None or told.worker_ids != notice.worker_ids:
                told, others = notice, ", ".join(notice.worker_ids)
                log.warning("waiting for the world %s", f"without {others}" if others else "that follows")
            self._peers.progress(step, STOP)
            with self._changed:
                if self._notice is notice:
                    self._changed.wait(_LOOK_S)

    def _save(self, step: int) -> bool:
        """Save the common step, unless that cannot be done in time; False when not all ranks stop there."""
        self._met, stop = False, True
        try:
            try:
                brought = self._meet()
            except (BarrierTimeout, Unavailable):
                # over for all alike, also for who comes later; who hears nothing of it goes by that
                stop = not self._may_agree_anew()
                raise
            choice = choose_save(brought, ranks=self._peers.world_size)
            self._met, stop = True, choice.stop
            if choice.save:
                self._save_in_time()
                log.warning("step %d is saved: training goes on from there", step)
                return True
            why = choice.reason
        except StrataError as error:
            why = str(error)
        except Exception as error:  # whatever it is, the others stop here, and who is to leave does
            log.exception("the save of step %d failed", step)
            why = f"{type(error).__name__}: {error}"
        log.error("THE SAVE OF STEP %d IS SKIPPED: %s; training goes on from an earlier one", step, why)
        return stop

    def _may_agree_anew(self) -> bool:
        """Tell whether there is another step to agree on: nobody is to leave, or not yet.

        The time decides, not what each was asked when it came: one may have heard of a wider notice since.
        Ranks hear of one a moment apart, and none of them is to go on for another one's last moment.
        """
        with self._changed:
            notice, left_s = self._notice, self._deadline_s - self._clock()
        return notice is not None and (_is_reshape(notice) or left_s > SLACK_S)

    def _save_in_time(self) -> None:
        """Return once the step is committed; what is not in time is given up, and raised."""
        with self._run.phase("save"):
            info = self._run.save_within(max(0.0, self._left_s()))
            if info is None:  # it was due anyhow, and is done
                return
            limit_s = max(0.0, self._left_s())
            try:
                within(
                    limit_s + SLACK_S,
                    lambda: info.wait(limit_s),
                    what="waiting for the save",
                    over=lambda: self._left_s() <= 0,
                )
            except Unavailable:
                info.cancel()
                raise

    def _meet(self) -> dict[int, bytes]:
        left_ms, cost_ms = round(1000 * self._left_s()), round(1000 * self._save_cost_s())
        mine = TimeLeft(left_ms=left_ms, cost_ms=cost_ms).encode()
        limit_s, more_s, since_s = max(MEET_S, left_ms / 1000), SLACK_S, self._clock()
        with self._changed:
            attempt = self._agreement.attempt
            if self._notice is not None and _is_reshape(self._notice):
                limit_s = min(limit_s, self._word_s)
                # the outcome is the same for all, however late a lost coordinator makes it
                more_s += LOCAL_SLACK_S
        return within(
            limit_s + more_s,
            lambda: self._peers.barrier(f"{SAVE_BARRIER}.{attempt}", mine, timeout_s=limit_s),
            what="meeting at the common step",
            over=lambda: self._has_no_time(since_s),
        )

    def _leaves(self) -> bool:
        """Tell whether this process is to leave: another world is nothing to it then."""
        with self._changed:
            return self._notice is not None and self._means_us(self._notice)

    def _has_no_time(self, since_s: float) -> bool:
        """Tell whether who meets the others since then has to leave now, for all it was asked when it came.

        With what is left it would not agree anew either (`_may_agree_anew`).
        """
        met_s = self._clock() - since_s
        return self._leaves() and self._left_s() <= SLACK_S and met_s >= MEET_S

    def _left_s(self) -> float:
        with self._changed:
            return self._deadline_s - self._clock()


def means(notice: StopNotice, worker_id: str) -> bool:
    """Tell whether a notice asks this member to leave."""
    if notice.action == STOP_ACTION_DRAIN:
        return worker_id in notice.worker_ids
    return notice.action != STOP_ACTION_RESHAPE


def ask_to_stop(peers: Peers, reason: str, *, grace_s: float, member_only: bool = False) -> StopNotice | None:
    """Have all ranks of the generation asked to stop, or this member's; return the notice that holds, if any does."""
    request = StopJobRequest(
        job=peers.job,
        action=STOP_ACTION_DRAIN if member_only else STOP_ACTION_PREEMPT,
        worker_ids=[peers.worker_id] if member_only else [],
        reason=reason,
        grace_ms=round(1000 * grace_s),
        generation=peers.generation,
    )
    response: StopJobResponse = peers.call(request, timeout_s=max(1.0, grace_s))
    mine = response.HasField("notice") and response.notice.generation == peers.generation
    return response.notice if mine else None


def _is_reshape(notice: StopNotice) -> bool:
    return notice.action == STOP_ACTION_RESHAPE


def _is_wider(notice: StopNotice, held: StopNotice) -> bool:
    """Tell whether `notice` means at least those whom `held` does; nobody leaves by a RESHAPE."""
    if held.action == STOP_ACTION_RESHAPE:
        return True
    if notice.action != STOP_ACTION_DRAIN:
        return notice.action != STOP_ACTION_RESHAPE
    return held.action == STOP_ACTION_DRAIN and {*notice.worker_ids} >= {*held.worker_ids}
