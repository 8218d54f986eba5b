"""`TrainingOrchestrator`: turns a process into a `Run`, in each generation that the process is part of.

    join the world → initialise the process group → restore → Run

`strata.init(...)` is `TrainingOrchestrator(...).init(...)`.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping, Sequence
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
    exit_if_done,
    exit_if_refused,
)
from strata.training.group import end_group
from strata.training.loop.clock import Clock
from strata.training.loop.feeds import Loader
from strata.training.loop.reporting import TrainingReporter
from strata.training.loop.run import Run
from strata.training.loop.virtual_ranks import check_virtual
from strata.training.rank_context import Alone, RankContext
from strata.training.restore import begin
from strata.training.save.run_config import checked_config
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

    Under `strata run` no argument is needed: the environment names this process's rank. With `endpoints`,
    STRATA_ENDPOINTS or endpoints in strata.toml, this is a standalone process with one rank. A new `job` is then
    created with `min_workers` and `max_workers`. Without endpoints and without `strata run`, the process trains alone.

    Checkpoints are saved under `storage_path`: a folder that all hosts share, or `s3://bucket/prefix`. The newest
    `keep_count` are kept. One in `full_every` saves is a full checkpoint, the others are incremental (1: all are
    full). Arguments override STRATA_TRAIN_*, and these variables override the table [train] of strata.toml. Each of
    `preempt_signals`, and `strata jobs preempt`, makes all ranks stop after the same step, save it within
    `preempt_grace_s`, and leave with `strata.Preempted`, whose exit code is 75. With `preempt="member"` a signal
    makes only this member leave after that step; the other members continue.
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
        mesh: Any = None,
        exact_samples: bool = True,
        virtual_ranks: int = 0,
        config: Mapping[str, Any] | None = None,
        replicated: Collection[str] | bool | None = None,
        total_steps: int | None = None,
    ) -> Run:
        """Join the world, initialise torch's process group if there is none, restore, return the run.

        `model`, `optim` and `sched` (or lists of them) are saved and restored, and so are the entries of `state`.
        `data` is the loader for `run.steps`; `seed` determines the order of its samples. A step has `global_batch`
        samples in every world (default: the samples of a step in the first world). If the ranks cannot have equal
        shares, the shares differ by one sample, and `run.weight` gives each sample the same weight. With
        `uneven=False` such a world is refused.

        `mesh` names this rank's data-parallel place, if not every rank has samples of its own: the data-parallel part
        of a torch DeviceMesh, a pair (index, count), or a function that returns one of these. Ranks of one place get
        the same batches. With `exact_samples=False` a loader or dataset that cannot continue exactly at the position
        is accepted with a warning, instead of refused with `DatasetMismatch`. With `virtual_ranks=V` a step is V
        micro-batches of the loader's batch size, whose gradients are added up in one order in every world: the
        training has the same bits in a world of any size up to V.

        At each save the ranks compare their tensors. A tensor that is equal on all ranks is saved once, each rank
        writing its share; every other tensor is saved by each rank. Tensors under the paths in `replicated`
        ("model", "optim.state"; True: everything) must be equal, or the save fails. With `replicated=False` nothing is
        compared, and each rank saves all its tensors.

        `config` holds the hyperparameters (numbers, texts, lists, dicts), which are kept with each checkpoint, shown and
        compared by `strata checkpoints show` and `diff`, and carried by a fork. Without it the restored one stays.

        `total_steps` is the last step of the training, if known; the display of progress and of the remaining time
        uses it.

        If the job of a standalone process is done already, the program exits here with code 0, or with 4 if another
        run (STRATA_RUN_ID, SLURM_JOB_ID) finished it. If other members finish the job while this process trains, the
        program exits with 0 too, instead of ending with `JobDone`. `ConfigError` if several processes train together
        without a coordinator. Otherwise raises as `strata.connect` and `CheckpointManager.restore` do.
        """
        saved = state_of(model=model, optim=optim, sched=sched, extra=state)
        check_virtual(virtual_ranks, model=model, mesh=mesh)
        run_config = None if config is None else checked_config(config)
        ledger = Ledger(since_s=self._clock.monotonic_s())
        standalone = self._endpoints is not None or "STRATA_SOCKET" not in os.environ
        with exit_if_done(), exit_if_refused(standalone=standalone):
            context = self._context = self._join()
        ending = self._ending = self._ending_of(context)

        def make_run() -> Run:
            return self._begin(
                context,
                ending,
                saved,
                data=data,
                sampling=Sampling(
                    global_batch=global_batch,
                    uneven=uneven,
                    seed=seed,
                    exact_samples=exact_samples,
                    virtual_ranks=virtual_ranks,
                ),
                mesh=mesh,
                run_config=run_config,
                ledger=ledger,
                replicated=replicated,
                total_steps=total_steps,
            )

        with exit_if_done(standalone=context.is_standalone):
            run = self._run = self._begin_or_raise(make_run, context, ending)
        close_at_exit(run)
        return run

    def _begin_or_raise(
        self, make_run: Callable[[], Run], context: RankContext, ending: GenerationExit
    ) -> Run:
        """Return the run, or raise the error of its start, unless the end of the generation ends this process first."""
        try:
            return make_run()
        except StaleGeneration as error:
            ending.over(error)
            raise
        except BaseException as error:
            if isinstance(error, BarrierBroken | ClusterRestored):  # a newer world will follow
                ending.failed(error)
            if not self._in_process:  # in process, `_goes_on` decides later whether this is a failure
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
        mesh: Any,
        run_config: Mapping[str, Any] | None,
        ledger: Ledger,
        replicated: Collection[str] | bool | None,
        total_steps: int | None,
    ) -> Run:
        patiently = StartRetry(
            context, grace_s=self.config.save_grace_s, preempt_grace_s=self.config.preempt_grace_s
        )

        def adopting(act: Callable[[], T]) -> T:
            """Return the result of `act` in the newest world; rejoin newer ones while the process is not armed."""
            while True:
                try:
                    return act()
                except StaleGeneration as error:
                    if ending.armed:
                        raise
                    log.info("adopting a newer world: %s", error.message)
                    with exit_if_done():
                        context.rejoin()  # type: ignore[attr-defined]  # only a standalone process is unarmed

        opened = partial(
            CheckpointManager,
            self.config.storage,
            client=None if isinstance(context, Alone) else context,  # type: ignore[arg-type]  # else a RankClient
            keep_count=self.config.keep_count,
            replica_path=self.config.replica or None,
            save_wait_s=self.config.save_wait_s,
            save_grace_s=self.config.save_grace_s,
            replicated=replicated,
        )
        checkpoints = adopting(lambda: patiently(opened))
        reporter = TrainingReporter(total_steps=total_steps)
        restore_generation = partial(
            begin,
            context,
            checkpoints,
            state,
            config=self.config,
            sampling=sampling,
            clock=self._clock,
            ledger=ledger,
            arm=ending.arm,
            mesh=mesh,
            run_config=run_config,
            reported=reporter.values,
            agree=lambda mine, place: agree_on_settings(
                context, mine, roots=checkpoints.root_ids, place=place
            ),
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
            beginning=lambda: adopting(restore_generation),
            hooked=hooked,
            ending=ending,
            clock=self._clock,
            data=data,
            reporter=reporter,
        )
        if isinstance(ending, InProcessExit):
            on_optimizer_steps(state, before=lambda _closure: ending.check())
        return run

    # -- one generation after another, in this process

    def train(self, main: Callable[[TrainingOrchestrator], T]) -> T:
        """Return the result of `main(self)`; under `strata run --restart=in_process`, call it in each generation.

        `main` makes its model, calls `init` with it, and trains. When the generation ends, this method catches the
        error that `main` raises, and the next generation begins in the same process. The process keeps its imports
        and all objects outside of `main`. Use this only with backends whose collectives can be aborted (NCCL). If a
        collective hangs, the agent replaces the process after `--restart-grace-s`.
        """
        self._in_process = os.environ.get("STRATA_RESTART") == "in_process"
        if self._in_process:
            os.environ["STRATA_IN_PROCESS"] = "1"  # `strata.connect` reports it to the agent
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
        """Enter the next generation if the end of this one caused `error`; return whether it did."""
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
        # the frames of `error` hold the model, the process group and the loaders of the generation that ended
        error.__traceback__ = error.__context__ = error.__cause__ = None
        place = ending.wait_place()
        ending.close()
        if self._run is not None:
            self._run.saves.cancel()  # or the next generation would wait for a save that cannot be committed
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
    """Return the exit code to report for a rank whose start failed with `error`; its program may exit with another
    code.

    A wrong setting, permission or storage counts as a permanent failure only until the job has a checkpoint: a
    checkpoint shows that it has worked once, so it may work again. A state that does not fit the checkpoint is
    always a permanent failure.
    """
    if isinstance(error, Preempted):
        return PREEMPTED
    if not isinstance(error, StrataError) or not error.lasting:
        return 1
    has_checkpoint = getattr(context, "restore_point", None) is not None
    return 1 if has_checkpoint and not isinstance(error, CheckpointError) else DO_NOT_REQUEUE


def refuse_in_process() -> None:
    """Raise `Refused` inside `TrainingOrchestrator.train`: a run of `strata.init` could not begin the next
    generation.
    """
    if os.environ.get("STRATA_IN_PROCESS") == "1":
        raise Refused(
            "strata.init() was called inside of TrainingOrchestrator.train()",
            hint="call orchestrator.init() there",
        )
