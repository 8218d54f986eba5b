"""`Run`: counts optimizer steps, saves checkpoints and reports progress for the caller's training loop.

    run.steps(loader)      begins → batches of one optimizer step → complete → save if due → begins …
    run.step_done(n)       the same for a hand-written loop: completes the step under way, begins the next

A step is complete when the loop body of its last batch has ended, after the caller's `optim.step()`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from functools import partial
from typing import Any, Final, NoReturn, Self

from strata.checkpoint.save.handle import CheckpointInfo
from strata.client.api.arguments import integer
from strata.client.checkpoints.manager import CheckpointManager
from strata.core.exit_codes import is_success
from strata.core.health.goodput import START, STEP, Goodput
from strata.data.facts import DEFAULT
from strata.errors import InvalidArgument, JobDone, Preempted, StaleGeneration, StorageError
from strata.training.generation_exit import GenerationExit, exit_if_done
from strata.training.group import end_group
from strata.training.history import recovery_of
from strata.training.loop.clock import Clock
from strata.training.loop.compute_timer import ComputeTimer
from strata.training.loop.cursors import Cursors
from strata.training.loop.feeds import Feed, Loader
from strata.training.loop.framework_loader import FrameworkLoader
from strata.training.loop.hooks import StepHook
from strata.training.loop.loop_body import LoopBody
from strata.training.loop.ordinary_feed import Fed
from strata.training.loop.reporting import TrainingReporter
from strata.training.rank_context import RankContext
from strata.training.restore import GenerationRestore
from strata.training.save.saves import SAVE
from strata.training.save.state import Remembered
from strata.training.world import TrainingWorld, world_of
from strata.v1.recovery_pb2 import RecoveryResponse

BETWEEN: Final = "between"
"""The phase of a rank between the end of an epoch and its next step, while it evaluates, say."""

log: Final = logging.getLogger("strata.training")


class Run:
    """One rank's training run, made by `strata.init`. For the trainer's thread.

    `hooks` are called at every step. The end of a `with` block, or `close()`, ends the run: it saves the last state,
    and waits for the saves in flight.
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
        """`beginning` restores `state`; it is called again if a newer world is adopted before the first step.

        `hooked` installs the hooks after each call of `beginning`. `data` is the default loader of `steps`.
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
        self._at_end: list[Callable[[], None]] = []
        self._weight, self._last = 1.0, True
        self._body = LoopBody(state)
        self._epochs_called = 0
        self._passed_over = self._closed = self._over = self._uncompleted = self._owns_group = False
        self._pid = os.getpid()  # a forked child that ends does not end the run
        self._phase = START
        self._restore_and_hook()

    def _restore_and_hook(self) -> None:
        """Restore the world's position; if its world ends, a process that is not armed yet adopts a newer world."""
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
        self._start = beginning
        self._body.virtual = beginning.virtual
        self._remembered = Remembered.of(self._state)
        self._as_restored = beginning.restored
        self._begun = beginning.position.step
        self._owns_group |= beginning.owns_group

    def _drop_hooks(self) -> None:
        for hook in self.hooks:
            hook.closed()
        self.hooks.clear()

    def _settle(self) -> None:
        """Adopt a newer generation if there is one; then bind this process to its generation for good."""
        if self._ending.armed:
            return
        try:
            self.context.check()
        except StaleGeneration:
            self._drop_hooks()
            self._restore_and_hook()
        self._ending.arm()

    @contextlib.contextmanager
    def _within_generation(self) -> Iterator[None]:
        """Run the generation's exit handling if the block raises `StaleGeneration`, then raise it again."""
        try:
            yield
        except StaleGeneration as error:
            if not self._over:  # these blocks nest
                self._over = True
                self._ending.over(error)
            raise

    # -- where this rank is

    @property
    def world(self) -> TrainingWorld:
        """This rank's place in its world, and the rendezvous address of the generation."""
        return world_of(self.context, self._start.place)

    @property
    def step(self) -> int:
        """The number of complete optimizer steps, over all generations."""
        return self.position.step

    @property
    def epoch(self) -> int:
        """The epoch that the last complete step belongs to."""
        return self.position.epoch

    @property
    def begun(self) -> int:
        """The newest step that has begun on this rank: `step`, or `step + 1`."""
        return self._begun

    @property
    def weight(self) -> float:
        """The weight of the current batch's mean loss within its step: `(loss * run.weight).backward()`.

        1 if a step has one batch and every rank the same number of samples. The weight compensates for unequal
        shares: each sample of the step then has the same weight in the mean of the ranks' gradients.
        """
        return self._weight

    @property
    def last_of_step(self) -> bool:
        """Whether the optimizer has to step after the current batch."""
        return self._last

    def sum_gradients(self) -> None:
        """Add up the gradients of all virtual ranks now, to clip them, say; the optimizer's step does it otherwise."""
        self._body.sum_gradients()

    @property
    def config(self) -> dict[str, Any]:
        """The `config` of `strata.init`, or the one in the checkpoint if none was given."""
        return self._start.config

    def cursors(self, dataset: str = DEFAULT) -> Cursors:
        """Return the read positions of a dataset's shards, which are saved and restored with the state of all ranks.

        Every rank must call this before its first step. For shards that the program reads itself
        (`DatasetRegistry.get_assigned_shards`); `run.steps` tracks the position of its samples separately.
        """
        return self._start.cursors.of(dataset)

    def recovery(self) -> RecoveryResponse:
        """Return what this member's ranks resumed from: the checkpoint, each rank's part of it, and its shards."""
        return recovery_of(self.context)

    def steps(
        self,
        loader: Loader | None = None,
        *,
        accumulate: int = 1,
        epoch: int | None = None,
        dataset: str = DEFAULT,
    ) -> Iterator[Any]:
        """Yield the remaining batches of one epoch, and count each complete optimizer step.

        `loader` defaults to the `data` of `strata.init`. `accumulate` batches make one step in the first world. In a
        world of another size a step may have more or fewer batches, but the same samples: the caller must follow
        `run.last_of_step` and `run.weight`. With `accumulate=1` a step is always one batch, whose size changes.

        Each call is an epoch, counted from 0 unless `epoch` gives its number. An epoch that was finished before this
        generation began yields nothing. `dataset` names the dataset whose position is shown. `DatasetMismatch` if the
        position is in the middle of an epoch whose first samples were others.
        """
        return self._epoch(self._feed(loader, accumulate, dataset, fixed=False), epoch)

    def loader(self, loader: Loader, *, accumulate: int = 1, dataset: str = DEFAULT) -> FrameworkLoader:
        """Return `loader` for the loop of a framework. A step has `accumulate` batches in every world."""
        feed = self._feed(loader, accumulate, dataset, fixed=True)
        return FrameworkLoader(feed, partial(self._epoch, feed), lambda: self._ended(self._body.ended()))

    def _ended(self, fed: Fed | None) -> None:
        """Complete the step of `fed`, or the step that was only counted because its loop was left."""
        self._count(fed)
        if self._uncompleted:
            with self._within_generation():
                self._completed()

    def _epoch(self, feed: Feed, epoch: int | None) -> Iterator[Any]:
        self._count(self._body.left())
        epoch = self._epochs_called if epoch is None else integer("epoch", epoch, below=2**63)
        self._epochs_called = epoch + 1
        return self._steps(feed, epoch)

    def _feed(self, loader: Loader | None, accumulate: int, dataset: str, *, fixed: bool = False) -> Feed:
        self._settle()
        loader = self._data if loader is None else loader
        if loader is None:
            raise InvalidArgument("there is no loader", hint="run.steps(loader), or strata.init(data=loader)")
        with self._within_generation():
            return self._start.data.feed(loader, accumulate, dataset, fixed=fixed)

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
            self._start.data.note(self.position)
            self.position = replace(self.position, epoch=epoch, epoch_samples=0, epoch_batches=0)
        with self._within_generation():
            if not self._start.data.begin(feed, self.position):
                return
            self._start.buckets.begin()
            self._body.virtual.begin()
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
            self._uncompleted = True

    @property
    def at_rest(self) -> bool:
        """Whether this process has called `steps`, and no step is under way."""
        self._count(self._body.left())
        return self._epochs_called > 0 and self._begun == self.position.step

    def step_done(self, samples: int = 0, *, epoch: int | None = None) -> None:
        """Count an optimizer step as complete, in which all ranks together used `samples` samples.

        For hand-written loops: every rank must call this after `optim.step()`.
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
        """Begin the step after the last complete one, unless it has begun already."""
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
        self._uncompleted = False
        self._timer.completed()
        self._tell(STEP)
        for hook in self.hooks:
            hook.completed(self.position.step)
        if self.saves.due(self.position.step):
            self.save()

    def report(self, values: Mapping[str, Any] | None = None, /, **named: Any) -> None:
        """Publish rank 0's metrics with its next step: `run.report(loss=loss.item())`, or a dict for "train/loss".

        `InvalidArgument` for more than 64 names in all, or for a value that is not a number.
        """
        self._reporter.report({**(values or {}), **named})

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Report that this rank is in phase `name` ("eval", "compile"…) while the block runs."""
        before = self._phase
        with self._within_generation():
            self._tell(name)
        try:
            yield
        except BaseException:
            self._phase = (
                before  # reported with the next step, as reporting now could raise and hide this error
            )
            raise
        with self._within_generation():
            self._tell(before)

    def _tell(self, phase: str) -> None:
        self._phase = phase
        self._start.ledger.enter(phase, self._clock.monotonic_s())
        training = self._reporter.message(self.context.rank, self.position, self._start.ledger.so_far())
        self.context.progress(self.position.step, phase, **self._timer.costs, training=training)

    def save(self, *, wait: bool = False, patient: bool = True) -> CheckpointInfo | None:
        """Save this step together with all ranks; every rank must call this at the same step.

        Returns once the state is copied, or with `wait` once the save is committed or dropped. A save is dropped if
        its storage refuses it for too long, for example after a stop request. Returns None if this step is saved
        already. Without `wait`, also returns None while a rank holds an earlier save that its storage refuses. Waits
        for the other ranks; unless `patient`, raises `BarrierTimeout` if some do not arrive within `save_wait_s`.
        """
        info = self._save(patient=patient, may_skip=not wait)
        if wait and info is not None:
            with self._within_generation(), self.phase(SAVE):
                self.saves.wait_ended(info)
        return info

    def leaves_by_itself(self) -> None:
        """Prevent the generation's end from ending this standalone process, which leaves because of a notice."""
        if self.context.is_standalone:
            self._ending.close()

    def save_common(self, *, over: Callable[[], bool]) -> CheckpointInfo | None:
        """Save the step that all ranks stop at; return once the state is copied, or None if it is saved already.

        Every rank takes part or ends, even after failed saves. `Unavailable` once `over()` is true on this rank.
        """
        if self.position.step == self.saves.saved_step:
            return None
        with contextlib.suppress(StaleGeneration):  # the caller handles the end of the world
            self._tell(SAVE)
        entries = self._start.data.entries(self.position)
        return self.saves.save_common(self._state, self.position, entries, over=over)

    def _save(self, *, patient: bool, may_skip: bool = False) -> CheckpointInfo | None:
        self._count(self._body.left())
        if self.position.step == self.saves.saved_step:
            return None
        with self._within_generation(), self.phase(SAVE):
            entries = self._start.data.entries(self.position)
            if may_skip:
                return self.saves.save_unless_held(self._state, self.position, entries, patient=patient)
            return self.saves.save(self._state, self.position, entries, patient=patient)

    def goodput(self) -> Goodput:
        """Return how the time was spent so far, over all generations; only rank 0's account survives a restart."""
        return self._start.ledger.goodput(self._clock.monotonic_s())

    def close(self, *, patient: bool = True) -> None:
        """Save the last step unless it is saved, wait for the saves in flight, and leave. Idempotent.

        Waits for the other ranks, since one may still evaluate. Unless `patient`, raises `BarrierTimeout` if some do
        not arrive within `save_wait_s`, after waiting for the saves in flight. `SystemExit(0)` if other members have
        finished the job without this standalone process.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with exit_if_done(standalone=self.context.is_standalone):
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
        """Leave so that the scheduler starts the job again: its last step is not saved, for a transient reason."""
        log.error("THE LAST STEP IS NOT SAVED: %s; begin the job again", why)
        self._leave(Preempted.code, why)
        raise Preempted(f"step {self.position.step} is not saved: {why}") from error

    def abandon(self, reason: str, *, code: int = 1, limit_s: float | None = None) -> None:
        """End the run without another save; saves in flight may finish. Idempotent.

        `code` is the exit code of the process. `limit_s` bounds the wait for the saves in flight.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        try:
            self.saves.end_early(limit_s)
        finally:
            self._leave(code, reason)

    def failed(self, error: BaseException) -> None:
        """Return if `error` is this process's own failure; do not return if the loss of a peer caused it.

        After the loss of a peer, a standalone process leaves with 75 once the newer world is there. If the other
        members have finished the job, raises `SystemExit(0)`.
        """
        if self._closed or os.getpid() != self._pid:
            return
        with exit_if_done():
            try:
                self._ending.failed(error)
            except JobDone as done:
                self.abandon(done.message)
                raise

    def at_end(self, act: Callable[[], None]) -> None:
        """Register `act` to be called when the run has ended, by any path."""
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
            # sys.exit(0), like the end of the program, may end only this rank: do not wait for the others for ever
            self.close(patient=error is None)
        else:
            assert error is not None
            self.failed(error)
            self.abandon(f"{type(error).__name__}: {error}")
