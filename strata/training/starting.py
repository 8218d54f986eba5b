"""`strata.init()`: the three lines that make an ordinary script survive."""

from __future__ import annotations

import os
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

<<<<<<< HEAD
from strata.client.checkpoints import CheckpointManager
from strata.config import Credentials, TrainingConfig
from strata.training.cadence import Rule
from strata.training.clock import Clock
from strata.training.feeds import Feeding, Loader
from strata.training.goodput import START, Ledger
from strata.training.group import ensure_group
from strata.training.history import Past, past_of
from strata.training.peers import Alone, Peers
from strata.training.preempting import Preemption
from strata.training.preempting import preempt_signals as usual_signals
from strata.training.run import RESTORE, Run
from strata.training.saves import GOODPUT_KEY, Saves
from strata.training.state import (
    LOADER_KEY,
    OWN_KEY,
    PACE_KEY,
    Position,
    buffers_of,
    position_of,
    state_of,
)

log: Final = logging.getLogger("strata.training")
=======
from strata.config import Credentials
from strata.training.feeds import Loader
from strata.training.orchestrator import TrainingOrchestrator, refuse_in_process
from strata.training.preempting import PREEMPT_SIGNALS
from strata.training.run import Run
>>>>>>> 97e4e31 (TrainingOrchestrator: a lone member runs its program anew, and ranks may go on in their processes)


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
    keep_count: int | None = None,
    global_batch: int | None = None,
    uneven: bool = False,
    seed: int = 0,
    preempt_signals: Sequence[int] | None = None,
    preempt_grace_s: float | None = None,
    credentials: Credentials | None = None,
) -> Run:
    """Join the world, initialise torch's process group if there is none, restore, and return the run.

    `TrainingOrchestrator` says what each argument means, and its `init` those about the objects.
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
        keep_count=keep_count,
        preempt_signals=preempt_signals,
        preempt_grace_s=preempt_grace_s,
        credentials=credentials,
    )
<<<<<<< HEAD
    try:
        run = _begin(peers, saved, config, data, global_batch=global_batch, uneven=uneven, seed=seed)
    except BaseException as error:
        peers.close(code=1, reason=f"{type(error).__name__}: {error}")
        raise
    run.hooks.append(
        Preemption(
            run,
            signals=usual_signals(os.environ) if preempt_signals is None else preempt_signals,
            grace_s=config.preempt_grace_s,
            clock=time.monotonic,
            save_cost_s=run.saves.expected_s,
        )
    )
    _close_at_exit(run)
    return run


def _join(
    endpoints: str | Iterable[str] | None,
    *,
    job: str | None,
    worker_id: str | None,
    min_workers: int,
    max_workers: int | None,
    credentials: Credentials | None,
) -> Peers:
    env = os.environ
    if endpoints is None and "STRATA_SOCKET" not in env and not env.get("STRATA_ENDPOINTS"):
        size = env.get("WORLD_SIZE", "1")
        return Alone(world_size=int(size) if size.isdigit() else 1)
    from strata.client.fork import check_import_order  # noqa: PLC0415  # before grpc is imported
    from strata.client.joining import connect  # noqa: PLC0415  # imports grpc

    check_import_order()
    return connect(
        endpoints,
        job=job,
        worker_id=worker_id,
        min_workers=min_workers,
        max_workers=max_workers,
        credentials=credentials,
    )


def _begin(
    peers: Peers,
    state: dict[str, Any],
    config: TrainingConfig,
    data: Loader | None,
    *,
    global_batch: int | None,
    uneven: bool,
    seed: int,
) -> Run:
    clock = Clock(monotonic_s=time.monotonic, unix_s=time.time)
    ledger = Ledger(since_s=clock.monotonic_s())
    peers.progress(0, "join")
    owns_group = ensure_group(peers)
    checkpoints = CheckpointManager(
        config.storage,
        client=None if isinstance(peers, Alone) else peers,  # type: ignore[arg-type]  # then a RankClient
        keep_count=config.keep_count or None,
        save_wait_s=config.save_wait_s,
    )
    peers.progress(0, RESTORE)
    ledger.enter(RESTORE, clock.monotonic_s())
    state[OWN_KEY] = {}
    restored = checkpoints.restore(state, of_rank_0=buffers_of(state))
    position = Position() if restored is None else position_of(state[OWN_KEY])
    ledger.enter(START, clock.monotonic_s())
    past = Past(began_unix_s=clock.unix_s())
    if peers.rank == 0:  # it speaks for all
        if not isinstance(peers, Alone):
            past = past_of(peers, now_unix_s=clock.unix_s())
        if restored is not None:
            account = restored.metadata.get(GOODPUT_KEY, "")
            ledger.go_on(account, began_unix_s=past.began_unix_s, now_unix_s=clock.unix_s())
            log.info("goodput so far: %s", ledger.goodput(clock.monotonic_s()))
    own = state[OWN_KEY]
    return Run(
        peers,
        checkpoints=checkpoints,
        state=state,
        position=position,
        saves=Saves(
            peers,
            checkpoints,
            rule=Rule(every_steps=config.save_every_steps, every_s=config.save_every_s),
            wait_s=config.save_wait_s,
            clock=clock,
            ledger=ledger,
            position=position,
            saved=own.get(PACE_KEY, {}),
            failure_s=past.failure_s,
        ),
        ledger=ledger,
        clock=clock,
        feeding=Feeding(
            rank=peers.rank,
            world_size=peers.world_size,
            global_batch=global_batch,
            seed=seed,
            uneven=uneven,
            saved=own.get(LOADER_KEY, {}),
        ),
=======
    return orchestrator.init(
        model=model,
        optim=optim,
        sched=sched,
>>>>>>> 97e4e31 (TrainingOrchestrator: a lone member runs its program anew, and ranks may go on in their processes)
        data=data,
        state=state,
        global_batch=global_batch,
        uneven=uneven,
        seed=seed,
    )
