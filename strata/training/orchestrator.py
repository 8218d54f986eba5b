"""`TrainingOrchestrator`: from a process to a run, in each generation that it is part of.

    join the world → initialise the process group → restore → Run

`strata.init(...)` is `TrainingOrchestrator(...).init(...)`.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar

from strata.client.checkpoints.manager import CheckpointManager
from strata.config import Credentials, LibraryConfig, TrainingConfig
from strata.config.training import PREEMPT_MEMBER
from strata.core.exit_codes import DO_NOT_REQUEUE, PREEMPTED
from strata.core.health.goodput import Ledger
from strata.errors import (
    BarrierBroken,
    CheckpointError,
    ClusterRestored,
    Preempted,
    Refused,
    StaleGeneration,
    StrataError,
)
from strata.training.at_exit import close_at_exit
from strata.training.generation_exit import (
    OVER_S,
    AgentExit,
    GenerationExit,
    InProcessExit,
    NeverEnds,
    StandaloneExit,
    nothing_to_do_where_done,
    told_where_refused,
)
from strata.training.group import end_group
from strata.training.loop.clock import Clock
from strata.training.loop.feeds import Loader
from strata.training.loop.reporting import TrainingReporter
from strata.training.loop.run import Run
from strata.training.rank_context import Alone, RankContext
from strata.training.restore import begin
from strata.training.save.state import on_optimizer_steps, state_of
from strata.training.settings_agreement import Sampling, agree_on_settings
from strata.training.shown_errors import show_errors_briefly
from strata.training.start_retry import StartRetry
from strata.training.stop.preempting import PREEMPT_SIGNALS, Preemption
from strata.training.world import enter_place

T = TypeVar("T")

log: Final = logging.getLogger("strata.training")


class TrainingOrchestrator:
    """One process of a training, over the coordinators at `endpoints`.

    Under `strata run` there is nothing to say: this process is the rank of the environment. With
    `endpoints`, STRATA_ENDPOINTS or those of strata.toml, it is a standalone process with one rank, and `job` is created
    with `min_workers` and `max_workers` if it is new. With neither it trains alone.

    The checkpoints lie in `storage_path`, a folder that all hosts share or `s3://bucket/prefix`; `keep_count`
    of them stay. Of `full_every` saves one is whole, and the others are Incrementals (1: all are whole).
    What is given here wins over STRATA_TRAIN_* and the table [train] of strata.toml. Each of
    `preempt_signals`, and `strata jobs preempt`, makes all ranks stop after the same step, save it
    within `preempt_grace_s`, and leave with `strata.Preempted`, whose exit code is 75. With
    `preempt="member"` a signal makes this member alone leave then, and the others go on without it.
    """

    def __init__(
        self,
        endpoints: str | Iterable[str] | None = None,
        *,
        job: str | None = None,
        worker_id: str | None = None,
        min_workers: int = 1,
        max_workers: int | None = None,
        storage_path: str | os.PathLike[str] | None = None,
        save_every_steps: int | None = None,
        save_every_s: float | None = None,
        full_every: int | None = None,
        keep_count: int | None = None,
        preempt_signals: Sequence[int] = PREEMPT_SIGNALS,
        preempt: str | None = None,
        preempt_grace_s: float | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        flags = {
            "storage": None if storage_path is None else os.fspath(storage_path),
            "save_every_steps": save_every_steps,
            "save_every_s": save_every_s,
            "full_every": full_every,
            "keep_count": keep_count,
            "preempt": preempt,
            "preempt_grace_s": preempt_grace_s,
        }
        show_errors_briefly()
        self.config = TrainingConfig.load(flags=flags, env=os.environ)
        self._endpoints = endpoints
        self._job = job
        self._worker_id = worker_id
        self._min_workers = min_workers
        self._max_workers = max_workers
        self._preempt_signals = preempt_signals
        self._credentials = credentials
        self._clock = Clock(monotonic_s=time.monotonic, unix_s=time.time, thread_s=time.thread_time)
        self._in_process = False
        self._ending: GenerationExit | None = None
        self._context: RankContext | None = None
        self._run: Run | None = None

    # -- one run

    def init(
        self,
        *,
        model: object = None,
        optim: object = None,
        sched: object = None,
        data: Loader | None = None,
        state: MutableMapping[str, Any] | None = None,
        global_batch: int | None = None,
        uneven: bool = True,
        seed: int = 0,
        replicated: Collection[str] | bool | None = None,
        total_steps: int | None = None,
    ) -> Run:
        """Join the world, initialise torch's process group if there is none, restore, return the run.

        `model`, `optim` and `sched` (or lists of them) are saved and restored, as is what `state`
        holds under names of its own. `data` is the loader for `run.steps`; its samples are ordered by
        `seed`. A step has `global_batch` samples (by default those that it has in the first world),
        whichever world trains. Where the ranks cannot have as many each, shares differ by one, and
        `run.weight` has each sample count alike; without `uneven` such a world is refused.

        At each save the ranks compare what they hold: a tensor that is equal on all of them is saved once,
        each rank its share; any other each rank saves for itself. What stands under the paths in `replicated`
        ("model", "optim.state"; True: everything) must be equal, else the save fails. With False nothing is
        compared, and each rank saves all it has.

        `total_steps` is the step that the training ends with, if that is known: it is shown how far it is, and how
        long the rest takes.

        A standalone process whose job was done before ends its program here, with exit code 0, or with 4 where
        that was another run's (STRATA_RUN_ID, SLURM_JOB_ID). With 0 does one
        whose job the others finish while it trains, where `JobDone` would end the program. `ConfigError`
        when several processes train together without a coordinator; else what `strata.connect` and
        `CheckpointManager.restore` raise.
        """
        saved = state_of(model=model, optim=optim, sched=sched, extra=state)
        ledger = Ledger(since_s=self._clock.monotonic_s())
        standalone = self._endpoints is not None or "STRATA_SOCKET" not in os.environ
        with nothing_to_do_where_done(), told_where_refused(standalone=standalone):
            context = self._context = self._join()
        ending = self._ending = self._ending_of(context)

        def begun() -> Run:
            return self._begin(
                context,
                ending,
                saved,
                data=data,
                sampling=Sampling(global_batch=global_batch, uneven=uneven, seed=seed),
                ledger=ledger,
                replicated=replicated,
                total_steps=total_steps,
            )

        with nothing_to_do_where_done(standalone=context.is_standalone):
            run = self._run = self._begun(begun, context, ending)
        close_at_exit(run)
        return run

    def _begun(self, begun: Callable[[], Run], context: RankContext, ending: GenerationExit) -> Run:
        """Return the run; what fails instead is raised when nothing else follows from it."""
        try:
            return begun()
        except StaleGeneration as error:
            ending.over(error)
            raise
        except BaseException as error:
            if isinstance(error, BarrierBroken | ClusterRestored):  # a newer world is on its way
                ending.failed(error)
            if not self._in_process:  # there, whether it is a failure is not known yet
                code = _code_of(error, context)
                context.close(code=code, reason=f"{type(error).__name__}: {error}")
            raise

    def _join(self) -> RankContext:
        env = os.environ
        if (
            self._endpoints is None
            and "STRATA_SOCKET" not in env
            and not LibraryConfig.load(env=env).endpoints
        ):
            size = env.get("WORLD_SIZE", "1")
            return Alone(world_size=int(size) if size.isdigit() else 1)
        from strata.client.rank.connect import connect  # noqa: PLC0415  # a process that trains alone needs no session

        return connect(
            self._endpoints,
            job=self._job,
            worker_id=self._worker_id,
            min_workers=self._min_workers,
            max_workers=self._max_workers,
            credentials=self._credentials,
            cannot_restart=True,
        )

    def _ending_of(self, context: RankContext) -> GenerationExit:
        if isinstance(context, Alone):
            return NeverEnds()
        if context.is_standalone:
            return StandaloneExit(context, detect_s=context.detect_s)
        return InProcessExit(context) if self._in_process else AgentExit(context)

    def _begin(
        self,
        context: RankContext,
        ending: GenerationExit,
        state: MutableMapping[str, Any],
        *,
        data: Loader | None,
        sampling: Sampling,
        ledger: Ledger,
        replicated: Collection[str] | bool | None,
        total_steps: int | None,
    ) -> Run:
        patiently = StartRetry(
            context, grace_s=self.config.save_grace_s, preempt_grace_s=self.config.preempt_grace_s
        )

        def adopting(act: Callable[[], T]) -> T:
            """Return what `act` does in the newest world that this process may still become part of."""
            while True:
                try:
                    return act()
                except StaleGeneration as error:
                    if ending.armed:
                        raise
                    log.info("adopting a newer world: %s", error.message)
                    with nothing_to_do_where_done():
                        context.rejoin()  # type: ignore[attr-defined]  # only a standalone process is unarmed

        opened = partial(
            CheckpointManager,
            self.config.storage,
            client=None if isinstance(context, Alone) else context,  # type: ignore[arg-type]  # then a RankClient
            keep_count=self.config.keep_count,
            replica_path=self.config.replica or None,
            save_wait_s=self.config.save_wait_s,
            save_grace_s=self.config.save_grace_s,
            replicated=replicated,
        )
        checkpoints = adopting(lambda: patiently(opened))
        begun = partial(
            begin,
            context,
            checkpoints,
            state,
            config=self.config,
            sampling=sampling,
            clock=self._clock,
            ledger=ledger,
            arm=ending.arm,
            agree=partial(agree_on_settings, context, roots=checkpoints.root_ids),
            patiently=patiently,
        )

        def hooked(run: Run) -> None:
            preemption = Preemption(
                run,
                signals=self._preempt_signals,
                member_only=self.config.preempt == PREEMPT_MEMBER,
                grace_s=self.config.preempt_grace_s,
                clock=self._clock.monotonic_s,
                save_cost_s=run.saves.expected_s,
                ending=ending,
            )
            run.hooks.append(preemption)
            checkpoints.holds.on_over(preemption.cannot_save)
            run.saves.out_of_time = preemption.out_of_time

        run = Run(
            context,
            checkpoints=checkpoints,
            state=state,
            beginning=lambda: adopting(begun),
            hooked=hooked,
            ending=ending,
            clock=self._clock,
            data=data,
            reporter=TrainingReporter(total_steps=total_steps),
        )
        if isinstance(ending, InProcessExit):
            on_optimizer_steps(state, before=ending.check)
        return run

    # -- one generation after another, in this process

    def train(self, main: Callable[[TrainingOrchestrator], T]) -> T:
        """Return what `main(self)` does; under `strata run --restart=in_process`, call it in each generation.

        `main` makes its model, calls `init` with it, and trains. When the generation ends, whatever
        that raises in `main` is met here, and the next one begins in the same process, which keeps
        its imports and what lies outside of `main`. For backends whose collectives can be aborted
        (NCCL); where one hangs, the supervisor replaces the process after `--restart-grace-s`.
        """
        self._in_process = os.environ.get("STRATA_RESTART") == "in_process"
        if self._in_process:
            os.environ["STRATA_IN_PROCESS"] = "1"  # `strata.connect` tells the supervisor
        while True:
            try:
                done = main(self)
            except Exception as error:
                if not self._goes_on(error):
                    raise
            else:
                if self._run is not None:
                    self._run.close()
                return done

    def _goes_on(self, error: Exception) -> bool:
        """Take the place in the next generation if `error` came of the end of this one."""
        ending, context = self._ending, self._context
        if not isinstance(ending, InProcessExit) or context is None:
            return False
        if self._run is None and _code_of(error, context) == DO_NOT_REQUEUE:
            self._abandon(f"{type(error).__name__}: {error}", code=DO_NOT_REQUEUE)
            return False
        if not ending.wait_over(context.detect_s + OVER_S):
            self._abandon(f"{type(error).__name__}: {error}", code=1)
            return False
        log.warning("generation %d has ended (%s); waiting for the next", context.generation, error)
        # its frames hold the model, the process group and the loaders of the generation that ended
        error.__traceback__ = error.__context__ = error.__cause__ = None
        place = ending.wait_place()
        ending.close()
        if self._run is not None:
            self._run.saves.cancel()  # or the way to the next generation waits for it
        self._abandon("restarts in its process", code=0)
        end_group()
        gc.collect()
        enter_place(place)
        return True

    def _abandon(self, reason: str, *, code: int) -> None:
        if self._run is not None:
            self._run.abandon(reason, code=code)
        elif self._context is not None:
            self._context.close(code=code, reason=reason)
        self._run = self._context = self._ending = None


def _code_of(error: BaseException, context: RankContext) -> int:
    """Return what is told of a rank that `error` kept from beginning; its program may end with another code.

    A setting, a right or a storage that is wrong counts as lasting only until the job has a checkpoint: it was right once, and
    may be again. A state that does not fit the checkpoint never will.
    """
    if isinstance(error, Preempted):
        return PREEMPTED
    if not isinstance(error, StrataError) or not error.lasting:
        return 1
    has_checkpoint = getattr(context, "restore_point", None) is not None
    return 1 if has_checkpoint and not isinstance(error, CheckpointError) else DO_NOT_REQUEUE


def refuse_in_process() -> None:
    """Raise `Refused` where `strata.init` alone could not begin the next generation."""
    if os.environ.get("STRATA_IN_PROCESS") == "1":
        raise Refused(
            "strata.init() was called inside of TrainingOrchestrator.train()",
            hint="call orchestrator.init() there",
        )
