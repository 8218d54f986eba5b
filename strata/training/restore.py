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
from strata.data.place import DataPlace, place_of
from strata.training.group import ensure_group
from strata.training.history import Past, past_of
from strata.training.loop.clock import Clock
from strata.training.loop.cursors import CURSORS_KEY, CursorBook
from strata.training.loop.ddp_buckets import BUCKETS_KEY, Buckets
from strata.training.loop.feeds import Feeding
from strata.training.loop.training_data import TrainingData
from strata.training.loop.virtual_ranks import RealRanks, VirtualRanks
from strata.training.rank_context import Alone, RankContext
from strata.training.save.cadence import Rule
from strata.training.save.run_config import CONFIG_KEY, changes
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
from strata.training.settings_agreement import Loaders, RankSettings, Sampling
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
    data: TrainingData
    place: DataPlace
    virtual: RealRanks
    config: dict[str, Any]
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
    mesh: Any = None,
    run_config: Mapping[str, Any] | None = None,
    reported: Callable[[], Mapping[str, float]] = dict,
    agree: Callable[[RankSettings, DataPlace], RankSettings] = lambda mine, place: mine,
    patiently: Callable[[Callable[[], Any]], Any] = at_once,
) -> GenerationRestore:
    """Restore `state` to the starting point of the world of `context`, and return this rank's starting point.

    Initialises torch's process group first, and calls `arm` if that binds this process to its generation. `agree`
    waits for all ranks, and returns the settings that apply to all of them. `mesh` gives this rank's data-parallel place, `run_config` is the
    program's config (None: as restored), and `reported` returns the numbers that the program reported. `patiently` calls the functions that
    read the storage, and may call them again.
    """
    context.check()
    owns_group = ensure_group(context, arm=arm)
    context.progress(0, RESTORE)
    ledger.enter(RESTORE, clock.monotonic_s())
    state[OWN_KEY] = {}
    plain = {join("", key) for key in plain_of(state)}
    restored: CheckpointMetadata | None = patiently(
        lambda: checkpoints.restore(state, of_rank_0=buffers_of(state) | plain | {OWN_KEY})
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
    before = dict(own.get(CONFIG_KEY, {}))
    kept = before if run_config is None else dict(run_config)
    if context.rank == 0 and restored is not None and (differs_in := changes(kept, before)):
        log.info("the config differs from step %d's: %s", position.step, "; ".join(differs_in))
    rule = Rule(
        every_steps=config.save_every_steps, every_s=config.save_every_s, full_every=config.full_every
    )
    context.progress(position.step, BEGIN)
    place = place_of(mesh, rank=context.rank, world_size=context.world_size)
    settings = agree(RankSettings(rule=rule, sampling=sampling), place)
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
        reported=reported,
        config=kept,
    )
    virtual = settings.sampling.virtual_ranks
    feeding = Feeding(
        rank=place.rank,
        world_size=place.size,
        global_batch=settings.sampling.global_batch,
        seed=settings.sampling.seed,
        uneven=settings.sampling.uneven,
        saved=own.get(LOADER_KEY, {}),
        exact=settings.sampling.exact_samples,
        virtual=virtual,
        has_peers=place.size < context.world_size,
        meet=Loaders(context).meet,
    )
    return GenerationRestore(
        position=position,
        saves=saves,
        ledger=ledger,
        data=TrainingData(feeding, saved=own),
        place=place,
        config=kept,
        virtual=VirtualRanks(state, place, virtual) if virtual else RealRanks(),
        cursors=cursors,
        buckets=buckets,
        restored=restored is not None,
        owns_group=owns_group,
    )
