"""`CheckpointManager`: save and restore the state of a training.

There are two modes. Under `strata run`, or with `client=`, the coordinators keep the catalog: a checkpoint is
committed when every rank's part is durable, and a restore reads the world's restore point. Without
coordinators, one process uses a storage root alone. A root must be used in one mode only.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.save.handle import CheckpointInfo, Progress
from strata.checkpoint.save.replicated_tensors import Replication
from strata.checkpoint.save.retry import SaveRetry
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.save.sharing import Exchange
from strata.checkpoint.save.writer import AsyncCheckpointWriter, WhenFull
from strata.client.api import arguments
from strata.client.api.arguments import integer
from strata.client.checkpoints.config import CheckpointManagerConfig, merged, paths_of, type_named
from strata.client.checkpoints.restore import MAX_STEP, Loading, put_into, steps_of
from strata.client.checkpoints.retention import best_step, delete_step
from strata.client.checkpoints.root import OpenRoot
from strata.client.checkpoints.writing import Holds
from strata.client.rank.preemption import PreemptionPoint
from strata.client.rank.process_environment import session_of_rank, world_size_elsewhere
from strata.core.checkpoints.lifecycle import RESTORABLE_TYPES
from strata.core.kv.records import CheckpointType
from strata.errors import (
    CheckpointError,
    CheckpointNotFound,
    ConfigError,
    InvalidArgument,
    StrataError,
)

if TYPE_CHECKING:
    from strata.client.checkpoints.catalog import CoordinatedCatalog
    from strata.client.checkpoints.port import SessionPort

__all__ = ["CheckpointInfo", "CheckpointManager", "CheckpointManagerConfig", "CheckpointMetadata"]

FAILING_GRACE_S: Final = 5.0
"""Seconds a failing program waits for a save without progress: other ranks may never join that save."""

log: Final = logging.getLogger("strata.checkpoint")


class CheckpointManager:
    """Saves in the background; restores only checkpoints that are committed, complete and verified.

    For one thread of one process. At most two saves are in flight; a third `save` blocks until one of them has
    ended (see `when_full`). `info.wait()` raises the error of a save. If `info.wait()` is not called, the next
    `save`, `check_for_errors`, `wait_until_finished` or `close` raises the error.
    """

    def __init__(
        self,
        storage_path: str | Path | CheckpointManagerConfig | None = None,
        *,
        client: SessionPort | None = None,
        config: CheckpointManagerConfig | None = None,
        **settings: Any,
    ) -> None:
        """Open a storage root. `settings` are the fields of `CheckpointManagerConfig`.

        A `CheckpointManagerConfig` may replace the path. `client` is the result of `strata.connect()`. Without
        `client`, under `strata run`, the manager connects by itself. Raise `ConfigError` if the root belongs to the
        other mode.
        """
        if isinstance(storage_path, CheckpointManagerConfig):
            if config is not None:
                raise ConfigError("two configurations are given", hint="pass one of them")
            config = storage_path
            storage_path = None
        self.config = merged(storage_path, config, settings)
        self._closing = ExitStack()
        """Closes parts in reverse order, even if some of them fail."""
        if client is None and os.environ.get("STRATA_SOCKET"):
            owned = client = session_of_rank()
            self._closing.callback(owned.close)
        if client is None and (size := world_size_elsewhere()) > 1:
            raise ConfigError(
                f"{size} processes train together, and their manager knows no coordinator",
                hint="start them with `strata run`, or pass client=strata.connect()",
            )
        self._root = OpenRoot(self.config, client)
        self._closing.callback(lambda: self._root.close(saving=not self._writer.idle))
        self._tiers, self._storage = self._root.tiers, self._root.storage
        self._catalog, self._upkeep = self._root.catalog, self._root.upkeep
        self.root_ids = self._root.root_ids
        self._exchange: Exchange | None = None
        self._preemption: PreemptionPoint | None = None
        if client is not None and not isinstance(self._catalog, LocalCatalog):
            self._coordinate(client, self._catalog)
        self._claimed = client is not None
        self._progressed_to: int | None = None
        self._reached: int | None = None
        """The step that was saved or restored last."""
        self.rewound: str | None = None
        """The reason why no save is accepted any more (the caller restored an older step); None: saves are accepted."""
        self._tiers.start(self._catalog, afterwards=self._collect_garbage)
        tell = client.hold_saves if client is not None else (lambda hold: None)
        retry = SaveRetry(grace_s=self.config.save_grace_s, tell=tell)
        saver = Saver(
            storage=self._storage,
            catalog=self._catalog,
            commit_timeout_s=self.config.commit_timeout_s,
            damaged=self._tiers.damaged,
            threads=self.config.io_threads,
            exchange=self._exchange,
            retry=retry,
        )
        self._writer = AsyncCheckpointWriter(
            saver,
            after_save=self._retain,
            failing_grace_s=FAILING_GRACE_S if client is not None else None,
            when_full=WhenFull(self.config.when_full),
            low_memory=self.config.low_memory,
        )
        self._closing.callback(self._tiers.close)
        self.holds: Final = Holds(retry, self._writer)
        self._loading = Loading(self._root, lend=self._writer.lend)

    def _coordinate(self, client: SessionPort, catalog: CoordinatedCatalog) -> None:
        from strata.client.checkpoints.exchange import RankExchange  # noqa: PLC0415  # imports protobuf

        self._preemption = PreemptionPoint(client, storage_uri=self._storage.uri)
        self._closing.callback(self._preemption.close)
        if self.config.compares:
            wait_s = self.config.commit_timeout_s + self.config.save_grace_s
            self._exchange = RankExchange(client, catalog, wait_s=wait_s)

    # -- saving

    def save(
        self,
        model_bytes: bytes | bytearray | memoryview,
        step: int,
        epoch: int = 0,
        checkpoint_type: CheckpointType | str = CheckpointType.FULL,
        *,
        metadata: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        sync: bool = False,
    ) -> CheckpointInfo:
        """Save opaque bytes; return once they are copied, or with `sync` once the checkpoint is committed."""
        if not isinstance(model_bytes, bytes | bytearray | memoryview):
            raise InvalidArgument(
                f"save() takes bytes, not {type(model_bytes).__name__}", hint="save_state() takes a mapping"
            )
        request = self._request(step, epoch, type_named(checkpoint_type), metadata)
        return self._save(model_bytes, request, capture_rng=False, progress=progress, sync=sync)

    def save_state(
        self,
        state: Mapping[str, Any],
        step: int,
        epoch: int = 0,
        checkpoint_type: CheckpointType | str = CheckpointType.FULL,
        *,
        metadata: Mapping[str, str] | None = None,
        progress: Progress | None = None,
        sync: bool = False,
        replicated: Collection[str] | bool = (),
    ) -> CheckpointInfo:
        """Save modules, optimizers, tensors, arrays and plain values; return once they are copied.

        With `sync`, the ranks meet at a barrier, save, and meet again; the call then returns on all ranks once the
        checkpoint is committed.

        An Incremental writes the changes since the newest checkpoint. It becomes a Full if most of the state has
        changed, or if there is no checkpoint. MODEL_ONLY and OPTIMIZER_ONLY save the keys of the state that match
        `model_keys` and `optimizer_keys`; no world starts from such checkpoints. Tensors that are equal on all ranks
        in this save are written once, divided between the ranks; each rank writes its other tensors itself. Tensors
        under the paths in `replicated`, here or in the configuration, must be equal on all ranks; otherwise the save
        fails and names the tensor. Raise `CheckpointError`, naming the key, for a value that cannot be saved.
        """
        if not isinstance(state, Mapping):
            raise InvalidArgument(
                f"save_state() takes a mapping, not {type(state).__name__}", hint='{"model": model, …}'
            )
        kind = type_named(checkpoint_type)
        chosen = self.config.selected(state, kind)
        request = self._request(step, epoch, kind, metadata)
        # random generators belong to the whole training, not to a part of its state
        capture_rng = self.config.capture_rng and kind in RESTORABLE_TYPES
        return self._save(
            chosen, request, capture_rng=capture_rng, progress=progress, sync=sync, replicated=replicated
        )

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory for saves of `state`, so that the first saves block no longer than later ones.

        An optimizer has its state only after its first step, so call this after that step, or not at all.
        """
        self._writer.prepare(dict(state), capture_rng=self.config.capture_rng)

    def _save(
        self,
        state: Any,
        request: SaveRequest,
        *,
        capture_rng: bool,
        progress: Progress | None,
        sync: bool,
        replicated: Collection[str] | bool = (),
    ) -> CheckpointInfo:
        replication = Replication(
            rank=self._catalog.rank,
            ranks=self._catalog.world_size,
            paths=paths_of(self.config.replicated) | paths_of(replicated),
            mesh=self.config.mesh,
            finds=self.config.low_memory and self.config.replicated is not False,
        )
        if sync:
            self._meet()
        info = self._writer.write(
            state, request, capture_rng=capture_rng, progress=progress, replication=replication
        )
        self._tiers.follow(info)
        if sync:
            info.wait()
            self._meet()
        return info

    def _meet(self) -> None:
        if not isinstance(self._catalog, LocalCatalog):
            self._catalog.meet(self.config.commit_timeout_s)

    def _request(
        self, step: int, epoch: int, checkpoint_type: CheckpointType, metadata: Mapping[str, str] | None
    ) -> SaveRequest:
        step, epoch = integer("step", step, below=MAX_STEP), integer("epoch", epoch, below=2**63)
        checked = arguments.metadata(metadata)
        if self.rewound is not None:
            raise CheckpointError(self.rewound, hint="start the job again to train on from there")
        if not self._claimed:
            with self.holds.retry.excusing(f"{self._storage.uri} has no owner until the next save"):
                self._root.claim()
                self._claimed = True
        self._progressed_to = self._reached = step
        return SaveRequest(step=step, epoch=epoch, type=checkpoint_type, metadata=checked)

    def _retain(self, saved: CheckpointMetadata | None) -> None:
        if saved is not None:
            self._tiers.committed(saved)
        if not self._tiers.two and (saved is not None or isinstance(self._catalog, LocalCatalog)):
            self._collect_garbage()

    def _collect_garbage(self) -> None:
        with self.holds.retry.excusing("old checkpoints stay until the next save"):
            self._root.collect_garbage()

    # -- restoring

    def restore(
        self,
        state: MutableMapping[str, Any],
        step: int | Sequence[int] | None = None,
        *,
        of_rank_0: Collection[str] = (),
    ) -> CheckpointMetadata | None:
        """Put a checkpoint into `state`: tensors in place, objects by `load_state_dict`.

        Only the keys that `state` has are restored. Without `step`, the checkpoint is this world's restore
        point under coordinators, else the newest good checkpoint. With several steps, each key comes from the first
        step that has the key. Return the restored checkpoint (the first of several), or None if there is no
        checkpoint to start from.

        Raise `CheckpointCorrupt` if bytes differ from the saved ones; without coordinators, log an error and
        restore the previous checkpoint instead. Raise `CheckpointError`, naming the key or tensor, if a value does
        not fit. If the call raises either error, it has changed nothing.

        If this world is larger than the world that saved, a rank without a saved part takes the values that were
        equal on all ranks. At and below the paths in `of_rank_0`, such a rank takes rank 0's values.
        """
        self._writer.settle()
        found = self._loading.each(step, state, begins=self._progressed_to is None)
        if not found:
            alone = isinstance(self._catalog, LocalCatalog)
            why = (
                f"{self._storage.uri} has no checkpoint" if alone else "this world begins from no checkpoint"
            )
            log.info("nothing to restore: %s", why)
            return None
        try:
            capture_rng = self.config.capture_rng
            put_into(state, found, of_rank_0=of_rank_0, rank=self._catalog.rank, restore_rng=capture_rng)
            for checkpoint in [checkpoint for checkpoint, _ in found]:
                self._note_restored(checkpoint)
                log.info("step %d is restored: %s", checkpoint.step, checkpoint.path)
            return replace(found[0][0], metadata=found[0][1].manifest.metadata)
        finally:
            found.clear()
            self._writer.take_back()

    def load_bytes(self, step: int | None = None) -> bytes:
        """Return the bytes that were passed to `save`; raise `CheckpointNotFound` if no bytes were saved."""
        self._writer.settle()
        found = self._loading.one(step, None, begins=self._progressed_to is None)
        if found is None:
            raise CheckpointNotFound("no checkpoint is there to load")
        checkpoint, loaded = found
        tree = loaded.saved.tree
        if not (isinstance(tree, dict) and "b" in tree):
            raise CheckpointError(f"step {checkpoint.step} holds a state, not bytes", hint="use restore()")
        if loaded.differing:
            raise CheckpointError(f"the ranks saved different bytes, none for rank {self._catalog.rank}")
        self._note_restored(checkpoint)
        return bytes(loaded.saved.value(tree))

    def _note_restored(self, checkpoint: CheckpointMetadata) -> None:
        """Record the restored checkpoint: if it has a whole state, later saves continue from it, not from a newer
        one.
        """
        if checkpoint.checkpoint_type in RESTORABLE_TYPES:
            self._reached = self.holds.retry.committed_step = checkpoint.step
        if isinstance(self._catalog, LocalCatalog):
            self._catalog.go_back()
        elif checkpoint.checkpoint_type in RESTORABLE_TYPES:
            point = self._catalog.restore_point()
            begun = point is not None and point.id == checkpoint.id
            if not begun or (self._progressed_to is not None and self._progressed_to > checkpoint.step):
                self.rewound = (
                    f"step {checkpoint.step} was restored by hand, and this generation did not begin there"
                )

    # -- when to save

    def should_save(self, step: int) -> bool:
        """Return whether a loop should save this step; all ranks that call it for the same steps get the same answer.

        True for the very first step, for multiples of `save_interval_steps`, and if `reached_preemption` is
        true. False for a step that is not greater than the step last saved, restored or started from.
        """
        step = integer("step", step, below=MAX_STEP)
        if self._reached is None:
            # under coordinators not the newest checkpoint: ranks may call this before and after a commit
            alone = isinstance(self._catalog, LocalCatalog)
            point = self._catalog.latest() if alone else self._catalog.restore_point()
            self._reached = point.step if point is not None else -1
        stops = self.reached_preemption(step)
        if step <= self._reached:
            return False
        return stops or self._reached < 0 or step % self.config.save_interval_steps == 0

    def reached_preemption(self, step: int) -> bool:
        """Return whether this job is requested to stop and `step` should be saved before the program exits.

        All ranks must call this for the same steps. It becomes true on all ranks at the same step, whichever rank
        received the request first. Always False without coordinators. Under `strata.init` the run calls it by itself.
        """
        step = integer("step", step, below=MAX_STEP)
        return self._preemption is not None and self._preemption.reached(step)

    def is_saving_in_progress(self) -> bool:
        """Return whether a save is in flight: staged, and not yet committed or aborted."""
        return not self._writer.idle

    # -- reading the catalog

    @property
    def directory(self) -> Path | str:
        """The storage root: the path of a folder, or the URI of a place in S3."""
        place = self.config.place()
        return place if isinstance(place, Path) else place.uri

    def best_step(self) -> int | None:
        """Return the step of the best whole checkpoint by the number under `best_metric` in its metadata.

        `best_mode` decides whether the highest or the lowest number is best; of equals, the newer. None if no metric
        is configured (`keep_best`, `best_metric`), or if no checkpoint has such a number.
        """
        return best_step(self._catalog.all(), self.config.keep)

    def latest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint, or None before the first."""
        latest = self._catalog.latest()
        return latest.step if latest is not None else None

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, in order."""
        return steps_of(self._catalog.all())

    def all_checkpoints(self) -> list[CheckpointMetadata]:
        """Return every checkpoint the catalog knows, oldest first."""
        return self._catalog.all()

    def texts_of_ranks(self, checkpoint: CheckpointMetadata, *path: str) -> dict[int, str]:
        """Return the text that each rank saved at `path`, a sequence of nested keys; ranks without text are absent."""
        return self._tiers.texts_of_ranks(checkpoint, self._catalog.folder(checkpoint), path)

    # -- deleting

    def delete(self, step: int) -> None:
        """Delete the committed checkpoints of `step`, and their bytes; only one rank of the job should call this.

        Raise `Refused`, with the reason, if the checkpoint is the newest, is pinned or tagged, is used by an
        Incremental, or is being read. Raise `CheckpointNotFound` if `step` has no checkpoint.
        """
        delete_step(self._catalog, self._storage, self._upkeep, integer("step", step, below=MAX_STEP))

    # -- the end

    def wait_until_finished(self, timeout_s: float | None = None) -> None:
        """Return once no save is in flight; raise the error of a failed save or copy."""
        self._writer.wait_until_finished(arguments.timeout(timeout_s, zero=True))
        self._tiers.check_for_errors()

    def settle(self, timeout_s: float | None = None) -> None:
        """Return once no save is in flight; the next save does not raise an earlier save's error, later calls do.

        Raise `Unavailable` after `timeout_s`; the saves go on.
        """
        self._writer.settle(arguments.timeout(timeout_s, zero=True))
        self._writer.ignore_earlier_errors()

    def stand(self, stands: Callable[[], bool]) -> None:
        """Let saves wait for coordinators without a time limit while `stands()` is true."""
        if not isinstance(self._catalog, LocalCatalog):
            self._catalog.stands = stands

    def wait_until_replicated(self, timeout_s: float | None = None) -> None:
        """Return once every committed checkpoint is in the second storage, too.

        Raise `StorageError` after `timeout_s`, with the cause of the delay; the copying goes on.
        """
        timeout_s = arguments.timeout(timeout_s, zero=True)
        self._writer.wait_until_finished(timeout_s)
        self._tiers.wait(timeout_s)

    def check_for_errors(self) -> None:
        """Raise the error of a failed save or copy, unless it was raised before."""
        self._writer.check_for_errors()
        self._tiers.check_for_errors()

    def close(self) -> None:
        """Wait for the saves in flight and their copies; raise the error of a failed save or copy."""
        self._close(failing=False)

    def _close(self, *, failing: bool) -> None:
        with self._closing:
            self._writer.close(failing=failing)
            if self._tiers.two and not failing:
                self._tiers.wait(self.config.commit_timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(failing=True)
        except StrataError as lost:
            # the training's own error is raised; the save's error becomes a note on it
            error.add_note(f"a checkpoint was lost as well: {lost}")
            log.error("a checkpoint was lost: %s", lost)  # noqa: TRY400  # as above
