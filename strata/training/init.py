"""`strata.init()`: makes an ordinary training script fault-tolerant."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import Any

from strata.config import Credentials
from strata.training.loop.feeds import Loader
from strata.training.loop.run import Run
from strata.training.orchestrator import TrainingOrchestrator, refuse_in_process
from strata.training.stop.preempting import PREEMPT_SIGNALS


def init(
    *,
    model: object = None,
    optim: object = None,
    sched: object = None,
    data: Loader | None = None,
    state: MutableMapping[str, Any] | None = None,
    storage_path: str | os.PathLike[str] | None = None,
    endpoints: str | Iterable[str] | None = None,
    job: str | None = None,
    worker_id: str | None = None,
    min_workers: int = 1,
    max_workers: int | None = None,
    save_every_steps: int | None = None,
    save_every_s: float | None = None,
    full_every: int | None = None,
    keep_count: int | None = None,
    global_batch: int | None = None,
    uneven: bool = True,
    seed: int = 0,
    mesh: Any = None,
    exact_samples: bool = True,
    virtual_ranks: int = 0,
    config: Mapping[str, Any] | None = None,
    replicated: Collection[str] | bool | None = None,
    total_steps: int | None = None,
    preempt_signals: Sequence[int] = PREEMPT_SIGNALS,
    preempt: str | None = None,
    preempt_grace_s: float | None = None,
    credentials: Credentials | None = None,
) -> Run:
    """Join the world, initialise torch's process group if there is none, restore, and return the run.

    `TrainingOrchestrator` documents the arguments on the job and its saves, `TrainingOrchestrator.init` all others.
    """
    refuse_in_process()
    orchestrator = TrainingOrchestrator(
        endpoints,
        job=job,
        worker_id=worker_id,
        min_workers=min_workers,
        max_workers=max_workers,
        storage_path=storage_path,
        save_every_steps=save_every_steps,
        save_every_s=save_every_s,
        full_every=full_every,
        keep_count=keep_count,
        preempt_signals=preempt_signals,
        preempt=preempt,
        preempt_grace_s=preempt_grace_s,
        credentials=credentials,
    )
    return orchestrator.init(
        model=model,
        optim=optim,
        sched=sched,
        data=data,
        state=state,
        global_batch=global_batch,
        uneven=uneven,
        seed=seed,
        mesh=mesh,
        exact_samples=exact_samples,
        virtual_ranks=virtual_ranks,
        config=config,
        replicated=replicated,
        total_steps=total_steps,
    )
