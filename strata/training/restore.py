"""Starts one rank's part in a generation: restores its state, and makes the objects that depend on it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, Final

from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.snapshot.state import join
from strata.client.checkpoints.manager import CheckpointManager
from strata.config import TrainingConfig
from strata.core.health.goodput import GOODPUT_KEY, START, Ledger
from strata.training.group import ensure_group
from strata.training.history import Past, past_of
from strata.training.loop.clock import Clock
from strata.training.loop.cursors import CURSORS_KEY, CursorBook
from strata.training.loop.ddp_buckets import BUCKETS_KEY, Buckets
from strata.training.loop.feeds import Feeding
from strata.training.loop.stateful_feed import KEPT_KEY
from strata.training.rank_context import Alone, RankContext
from strata.training.save.cadence import Rule
from strata.training.save.saves import Saves
from strata.training.save.state import (
    LOADER_KEY,
    OWN_KEY,
    PACE_KEY,
    Position,
    buffers_of,
    plain_of,
    position_of,
)
from strata.training.settings_agreement import Lengths, RankSettings, Sampling
from strata.training.start_retry import at_once

RESTORE: Final = "restore"
BEGIN: Final = "begin"
"""The phase of a rank that waits for the others before the first step. Another rank may wait for its storage meanwhile,
so this phase has a time limit of its own, not that of `join`."""

log: Final = logging.getLogger("strata.training")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRestore:
    """One rank's starting point in one generation."""

    position: Position
    saves: Saves
    ledger: Ledger
    feeding: Feeding
    cursors: CursorBook
    buckets: Buckets
    restored: bool
    """Whether the state comes from a checkpoint."""
    owns_group: bool
    """Whether this module initialised torch's process group, so that the run must end it."""


def begin(
    context: RankContext,
    checkpoints: CheckpointManager,
    state: MutableMapping[str, Any],
    *,
    config: TrainingConfig,
    sampling: Sampling,
    clock: Clock,
    ledger: Ledger,
    arm: Callable[[], None] = lambda: None,
    agree: Callable[[RankSettings], RankSettings] = lambda mine: mine,
    patiently: Callable[[Callable[[], Any]], Any] = at_once,
) -> GenerationRestore:
    """Restore `state` to the starting point of the world of `context`, and return this rank's starting point.

    Initialises torch's process group first, and calls `arm` if that binds this process to its generation. `agree`
    waits for all ranks, and returns the settings that apply to all of them. `patiently` calls the functions that
    read the storage, and may call them again.
    """
    context.check()
    owns_group = ensure_group(context, arm=arm)
    context.progress(0, RESTORE)
    ledger.enter(RESTORE, clock.monotonic_s())
    state[OWN_KEY] = {}
    differs = {join(OWN_KEY, name) for name in (CURSORS_KEY, BUCKETS_KEY, join(LOADER_KEY, KEPT_KEY))}
    plain = {join("", key) for key in plain_of(state)}
    restored: CheckpointMetadata | None = patiently(
        lambda: checkpoints.restore(state, of_rank_0=buffers_of(state) | plain | differs)
    )
    own = state[OWN_KEY]
    position = Position() if restored is None else position_of(own)
    ledger.enter(START, clock.monotonic_s())
    past = Past(began_unix_s=clock.unix_s(), uncommitted_unix_s=clock.unix_s())
    if context.rank == 0:  # rank 0 keeps the account for all ranks
        if not isinstance(context, Alone):
            past = past_of(context, now_unix_s=clock.unix_s())
        ledger.go_on(
            restored.metadata.get(GOODPUT_KEY, "") if restored is not None else "",
            lost_since_unix_s=past.uncommitted_unix_s,
            began_unix_s=past.began_unix_s,
            now_s=clock.monotonic_s(),
            now_unix_s=clock.unix_s(),
        )
        if restored is not None:
            log.info("goodput so far: %s", ledger.goodput(clock.monotonic_s()))

    def cursors_of_ranks() -> Collection[str]:
        if restored is None:
            return ()
        texts: Mapping[int, str] = patiently(
            lambda: checkpoints.texts_of_ranks(restored, OWN_KEY, CURSORS_KEY)
        )
        return texts.values()

    cursors = CursorBook(rank=context.rank, own=str(own.get(CURSORS_KEY, "")), of_ranks=cursors_of_ranks)
    buckets = Buckets(context, state, saved=str(own.get(BUCKETS_KEY, "")), restored=restored is not None)
    rule = Rule(
        every_steps=config.save_every_steps, every_s=config.save_every_s, full_every=config.full_every
    )
    context.progress(position.step, BEGIN)
    settings = agree(RankSettings(rule=rule, sampling=sampling))
    saves = Saves(
        context,
        checkpoints,
        rule=settings.rule,
        wait_s=config.save_wait_s,
        clock=clock,
        ledger=ledger,
        position=position,
        saved=own.get(PACE_KEY, {}),
        failure_s=past.failure_s,
        cursors=cursors.saved,
        buckets=buckets.saved,
    )
    feeding = Feeding(
        rank=context.rank,
        world_size=context.world_size,
        global_batch=settings.sampling.global_batch,
        seed=settings.sampling.seed,
        uneven=settings.sampling.uneven,
        saved=own.get(LOADER_KEY, {}),
        shortest=Lengths(context).shortest,
    )
    return GenerationRestore(
        position=position,
        saves=saves,
        ledger=ledger,
        feeding=feeding,
        cursors=cursors,
        buckets=buckets,
        restored=restored is not None,
        owns_group=owns_group,
    )
