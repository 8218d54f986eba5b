"""`Run`: the training loop's other half.

    run.steps(loader)      begins → batches of one optimizer step → complete → save if due → begins …
    run.step_done(n)       the same for a loop of one's own: the step that was under way is complete

A step is complete when the body of the loop has returned from its last batch, because the caller's
`optim.step()` stands in it. All ranks count alike, so they decide alike whether a save is due.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, Final, NoReturn, Self

from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.api.arguments import integer
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.exit_codes import is_success
from strata.core.health.goodput import START, STEP, Goodput
from strata.errors import InvalidArgument, JobDone, Preempted, StaleGeneration, StorageError, StrataError
from strata.training.generation_exit import GenerationExit, nothing_to_do_where_done
from strata.training.group import end_group
from strata.training.loop.clock import Clock
from strata.training.loop.compute_timer import ComputeTimer
from strata.training.loop.cursors import Cursors
from strata.training.loop.feeds import Feed, Loader
from strata.training.loop.hooks import StepHook
from strata.training.loop.loop_body import LoopBody
from strata.training.loop.ordinary_feed import Fed
from strata.training.loop.reporting import TrainingReporter
from strata.training.rank_context import RankContext
from strata.training.restore import GenerationRestore
from strata.training.save.saves import SAVE
from strata.training.save.state import Position, Remembered
from strata.training.stop.bounded import within
from strata.training.world import TrainingWorld, world_of
from strata.v1.recovery_pb2 import RecoveryRequest, RecoveryResponse
from strata.wire.pages import whole

BETWEEN: Final = "between"
"""The phase of a rank that waits for the others before a save, or copies its state."""

log: Final = logging.getLogger("strata.training")


class Run:
    """One rank's part in a training; `strata.init` makes it. For the trainer's thread.

    `hooks` take part in every step. A `with` block, or `close()`, ends the run: the last state is
    saved, and saves in flight are waited for.
    """

    def __init__(
        self,
        context: RankContext,
        *,
        checkpoints: CheckpointManager,
        state: MutableMapping[str, Any],
        beginning: Callable[[], GenerationRestore],
        hooked: Callable[[Run], None],
        ending: GenerationExit,
        clock: Clock,
        data: Loader | None,
        reporter: TrainingReporter,
    ) -> None:
        """`beginning` restores `state`; it is called again if another world is adopted before the first step.

        `hooked` gives the run its hooks, as often. `data` is the loader that `steps` takes by default.
        """
        self.context = context
        self.checkpoints = checkpoints
        self.hooks: list[StepHook] = []
        self._state = state
        self._beginning = beginning
        self._hooked = hooked
        self._ending = ending
        self._clock = clock
        self._timer = ComputeTimer(clock)
        self._data = data
        self._reporter = reporter
        self._owns_group = False
        self._at_end: list[Callable[[], None]] = []
        self._weight, self._last = 1.0, True
        self._body = LoopBody(state)
        self._epochs_called = 0
        self._passed_over = self._closed = self._over = False
        self._pid = os.getpid()  # a fork's end is its own
        self._phase = START
        self._go_to_the_beginning()

    def _go_to_the_beginning(self) -> None:
        """Begin where the world does; where a newer one if this one ends meanwhile, and it may."""
        while True:
            self._take(self._beginning())
            try:
                self._hooked(self)
            except StaleGeneration:
                if self._ending.armed:
                    raise
                self._drop_hooks()
            else:
                return

    def _take(self, beginning: GenerationRestore) -> None:
        self.position = beginning.position
        self.saves = beginning.saves
        self._ledger = beginning.ledger
        self._feeding = beginning.feeding
        self._cursors = beginning.cursors
        self._buckets = beginning.buckets
        self._remembered = Remembered.of(self._state)
        self._as_restored = beginning.restored
        self._feeds: dict[tuple[int, int], tuple[Loader, Feed]] = {}
        saved = dict(beginning.feeding.saved)
        self._facts: Callable[[Position], dict[str, Any]] = lambda position: saved
        self._begun = beginning.position.step
        self._owns_group |= beginning.owns_group

    def _drop_hooks(self) -> None:
        for hook in self.hooks:
            hook.closed()
        self.hooks.clear()

    def _settle(self) -> None:
        """Belong to this generation for good from now on; adopt a newer one first, if there is one."""
        if self._ending.armed:
            return
        try:
            self.context.check()
        except StaleGeneration:
            self._drop_hooks()
            self._go_to_the_beginning()
        self._ending.arm()

    @contextlib.contextmanager
    def _within_generation(self) -> Iterator[None]:
        """Let whatever follows the end of the generation follow it."""
        try:
            yield
        except StaleGeneration as error:
            if not self._over:  # blocks of this kind may lie in each other
                self._over = True
                self._ending.over(error)
            raise

    # -- where this rank is

    @property
    def world(self) -> TrainingWorld:
        """This rank's place, and where the ranks of its generation meet."""
        return world_of(self.context)

    @property
    def step(self) -> int:
        """How many optimizer steps are complete, over all generations."""
        return self.position.step

    @property
    def epoch(self) -> int:
        """The epoch that the last complete step belongs to."""
        return self.position.epoch

    @property
    def begun(self) -> int:
        """The number of the newest step that has begun here: `step`, or one more."""
        return self._begun

    @property
    def weight(self) -> float:
        """What the mean loss of the batch at hand counts in its step: `(loss * run.weight).backward()`.

        1 when a step has one batch and every rank as many samples. It makes up for shares that differ:
        in the mean of the ranks' gradients each sample of the step then counts alike.
        """
        return self._weight

    @property
    def last_of_step(self) -> bool:
        """Whether the optimizer is to step after the batch at hand."""
        return self._last

    def cursors(self, dataset: str = "default") -> Cursors:
        """Return how far the shards of a dataset are: saved and restored with the state, of whichever rank.

        Every rank calls it before its first step. For shards that are read by hand
        (`DatasetRegistry.get_assigned_shards`); the samples of `run.steps` have their own position.
        """
        return self._cursors.of(dataset)

    def recovery(self) -> RecoveryResponse:
        """Return where this member's ranks went on from: checkpoint, each rank's part, and its shards.

        `Refused` for a training without coordinators.
        """
        request = RecoveryRequest(job=self.context.job, worker_id=self.context.worker_id)
        response: RecoveryResponse = whole(self.context.call, request)
        return response

    # -- the loop

    def steps(
        self, loader: Loader | None = None, *, accumulate: int = 1, epoch: int | None = None
    ) -> Iterator[Any]:
        """Yield the batches of one epoch that are left, and count each complete optimizer step.

        Without `loader`: of the one that `strata.init` got as `data`. `accumulate` of its batches make
        one step when the training begins; in a world of another size it may be more or fewer, so that
        a step has the same samples: `run.last_of_step` and `run.weight` say what to do. With 1, a
        step stays one batch, which grows and shrinks.

        Each call is an epoch, counted from 0 unless `epoch` says which: one that was finished before
        this generation began has no batches left.
        """
        self._settle()
        self._count(self._body.left())
        loader = self._data if loader is None else loader
        if loader is None:
            raise InvalidArgument("there is no loader", hint="run.steps(loader), or strata.init(data=loader)")
        with self._within_generation():
            feed = self._feed(loader, accumulate)
        epoch = self._epochs_called if epoch is None else integer("epoch", epoch, below=2**63)
        self._epochs_called = epoch + 1
        return self._steps(feed, epoch)

    def _feed(self, loader: Loader, accumulate: int) -> Feed:
        accumulate = integer("accumulate", accumulate, below=2**31, hint="batches an optimizer step")
        if accumulate == 0:
            raise InvalidArgument("accumulate is 0", hint="an optimizer step has at least one batch")
        known = self._feeds.get((id(loader), accumulate))
        if known is None:
            feed = self._feeding.feed(loader, accumulate)
            # the loader is kept with it, so that its id stays its own
            known = self._feeds[id(loader), accumulate] = (loader, feed)
        return known[1]

    def _steps(self, feed: Feed, epoch: int) -> Iterator[Any]:
        if epoch < self.position.epoch:
            self._passed_over = True
            return
        if self._passed_over:
            self._remembered.apply()
        elif self._as_restored:
            self._remembered.apply_random()
        self._passed_over = self._as_restored = False
        if epoch > self.position.epoch:
            self.position = replace(self.position, epoch=epoch, epoch_samples=0, epoch_batches=0)
        self._facts = feed.facts
        with self._within_generation():
            self._buckets.begin()
        for fed in self._timer.waiting(feed.epoch(self.position)):
            with self._within_generation():
                self._begin()
            self._weight, self._last = fed.weight, fed.last
            self._body.takes(fed)
            try:
                yield fed.batch
            except GeneratorExit:
                self._count(self._body.left())
                raise
            self._count(self._body.returned(fed))
            if fed.last:
                with self._within_generation():
                    self._completed()
        with self._within_generation():
            self._tell(BETWEEN)

    def _count(self, fed: Fed | None) -> None:
        if fed is not None:
            self.position = self.position.next(fed.samples, batches=fed.batches)

    @property
    def at_rest(self) -> bool:
        """Whether a loop of `steps` was begun here, and no step is under way."""
        self._count(self._body.left())
        return self._epochs_called > 0 and self._begun == self.position.step

    def step_done(self, samples: int = 0, *, epoch: int | None = None) -> None:
        """Say that an optimizer step is complete in which all ranks used `samples` samples together.

        For loops of one's own. It belongs behind `optim.step()`, on every rank.
        """
        samples = integer("samples", samples, below=2**63)
        self._ending.arm()
        epoch = self.position.epoch if epoch is None else integer("epoch", epoch, below=2**63)
        if epoch != self.position.epoch:
            self.position = replace(self.position, epoch=epoch, epoch_samples=0, epoch_batches=0)
        with self._within_generation():
            self._begin()
            self.position = self.position.next(samples, batches=1)
            self._completed()
            self._begin()

    def _begin(self) -> None:
        """Begin the step after the last complete one, unless it has."""
        if self._begun > self.position.step:
            return
        number = self.position.step + 1
        for hook in self.hooks:
            hook.begins(number)
        self._begun = number
        self._as_restored = False
        self._timer.begins()
        if self._phase != STEP:
            self._tell(STEP)

    def _completed(self) -> None:
        self._timer.completed()
        self._tell(STEP)
        for hook in self.hooks:
            hook.completed(self.position.step)
        if self.saves.due(self.position.step):
            self.save()

    def report(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Show rank 0's numbers, with the next step: `run.report(loss=loss.item())`, or a dict for "train/loss".

        `InvalidArgument` for more than 64 names in all, or for what is no number.
        """
        self._reporter.report({**(values or {}), **named})

    # -- phases

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report that this rank is in phase `name` ("eval", "compile"…) inside of the block."""
        before = self._phase
        with self._within_generation():
            self._tell(name)
        try:
            yield
        except BaseException:
            self._phase = before  # told with the next step: another error must not hide this one
            raise
        with self._within_generation():
            self._tell(before)

    def _tell(self, phase: str) -> None:
        self._phase = phase
        self._ledger.enter(phase, self._clock.monotonic_s())
        training = self._reporter.message(self.context.rank, self.position, self._ledger.so_far())
        self.context.progress(self.position.step, phase, **self._timer.costs, training=training)

    # -- saving

    def save(self, *, wait: bool = False, patient: bool = True) -> CheckpointInfo | None:
        """Save this step together with all ranks; every rank calls it at the same step.

        Returns once the state is copied, or with `wait` once the save is committed or dropped: after a hold that
        lasted too long, say, when the job is asked to stop. None when this step is saved already, or, without
        `wait`, while a rank holds an earlier save that its storage refuses. It waits for the other ranks; unless
        `patient`, it raises `BarrierTimeout` when some are not here within `save_wait_s`.
        """
        info = self._save(patient=patient, may_skip=not wait)
        if wait and info is not None:
            with self._within_generation(), self.phase(SAVE):
                self.saves.wait_ended(info)
        return info

    def leaves_by_itself(self) -> None:
        """Let nothing else end this process with its generation: it stops as it was asked to, and leaves."""
        if self.context.is_standalone:
            self._ending.close()

    def save_common(self, *, over: Callable[[], bool]) -> CheckpointInfo | None:
        """Save the step that all ranks stop at; return once the state is copied. None: it is saved already.

        Every rank comes, or ends: `Unavailable` only when it is `over` for this one. What failed before is no reason not to.
        """
        if self.position.step == self.saves.saved_step:
            return None
        with contextlib.suppress(StaleGeneration):  # what the end of the world means is the caller's affair
            self._tell(SAVE)
        return self.saves.save_common(self._state, self.position, self._facts(self.position), over=over)

    def _save(self, *, patient: bool, may_skip: bool = False) -> CheckpointInfo | None:
        self._count(self._body.left())
        if self.position.step == self.saves.saved_step:
            return None
        with self._within_generation(), self.phase(SAVE):
            facts = self._facts(self.position)
            if may_skip:
                return self.saves.save_unless_held(self._state, self.position, facts, patient=patient)
            return self.saves.save(self._state, self.position, facts, patient=patient)

    def goodput(self) -> Goodput:
        """Return what the time went to so far, over all generations; rank 0's account goes on."""
        return self._ledger.goodput(self._clock.monotonic_s())

    # -- the end

    def close(self, *, patient: bool = True) -> None:
        """Save the last step unless that was done, wait for the saves in flight, and leave. Idempotent.

        Other ranks are waited for: one may still evaluate, say. Unless `patient`, `BarrierTimeout` is
        raised when some do not come within `save_wait_s`; what is in flight is waited for all the same.
        `SystemExit(0)` where others have finished the job without this standalone process.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with nothing_to_do_where_done(standalone=self.context.is_standalone):
            self._close(patient=patient)

    def _close(self, *, patient: bool) -> None:
        for hook in self.hooks:
            hook.closing()
        try:
            try:
                self._save(patient=patient)
                with self._within_generation():
                    self.saves.finish(self.position.step)
            except BaseException:
                self.checkpoints.holds.drop()
                raise
            finally:
                self.checkpoints.close()
        except BaseException as error:
            if isinstance(error, StorageError) and error.transient:
                self._leave_unsaved(str(error), error)
            self._leave(1, f"{type(error).__name__}: {error}")
            raise
        if lost := self.saves.lost:
            self._leave_unsaved(lost)
        if self.context.rank == 0:
            log.info("goodput: %s", self.goodput())
        self._leave(0, "the training is done")

    def _leave_unsaved(self, why: str, error: BaseException | None = None) -> NoReturn:
        """Leave so that the job is begun again: its last step is not saved, and time may heal why."""
        log.error("THE LAST STEP IS NOT SAVED: %s; begin the job again", why)
        self._leave(Preempted.code, why)
        raise Preempted(f"step {self.position.step} is not saved: {why}") from error

    def abandon(self, reason: str, *, code: int = 1, limit_s: float | None = None) -> None:
        """End the run as it stands: what is in flight may finish, nothing more is saved. Idempotent.

        `code` is that of the process: after a failure, or because it was asked to stop. `limit_s`: how
        long what is in flight is waited for.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        limit_s = self.saves.give_up_held(limit_s)
        try:
            if limit_s is None:
                self.checkpoints.close()
            else:
                within(limit_s, self.checkpoints.close, what="saves in flight")
        except StrataError as error:
            log.error("a save was lost as well: %s", error)  # noqa: TRY400  # the training's own error is told
        except Exception:  # nor does any other take the place of that error, or of the code to leave with
            log.exception("a save was lost as well")
        finally:
            self._leave(code, reason)

    def failed(self, error: BaseException) -> None:
        """Return when `error` is this process's own failure; not when the loss of a peer caused it.

        A standalone process then leaves with 75 once the newer world is there. Where the
        job was done without it, nothing is left to do: `SystemExit(0)`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with nothing_to_do_where_done():
            try:
                self._ending.failed(error)
            except JobDone as done:
                self.abandon(done.message)
                raise

    def at_end(self, act: Callable[[], None]) -> None:
        """Have `act` called when the run has ended, whichever way."""
        self._at_end.append(act)

    def _leave(self, code: int, reason: str) -> None:
        self._ending.close()
        for act in self._at_end:
            act()
        for hook in self.hooks:
            hook.closed()
        if self._owns_group and code == 0:
            end_group()
        self.context.close(code=code, reason=reason)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: object) -> None:
        if is_success(error):
            # by sys.exit(0) it may be that only this rank ends, as at the end of a program
            self.close(patient=error is None)
        else:
            assert error is not None
            self.failed(error)
            self.abandon(f"{type(error).__name__}: {error}")
