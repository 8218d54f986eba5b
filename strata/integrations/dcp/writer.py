"""`StrataWriter`: DCP saves through Strata's engine, and commits in Strata's catalog.

    rank 0, global plan: begin ─▶ every rank, write_data: image, manifest, ack ─▶ rank 0, finish:
    global manifest, seal, COMMITTED, marker

DCP's collectives replace the barrier before a save. A rank that fails ends the save for all: DCP raises on every rank,
and the attempt is aborted in the catalog. A pickled writer, as in DCP's process mode, has no session: the
trainer's process sends the writer's requests to the coordinators.
"""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent import futures
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock, Thread, local
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata, SaveRequest
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.save.bases import Plan
from strata.checkpoint.save.handle import CheckpointInfo
from strata.checkpoint.save.saver import Saver
from strata.checkpoint.snapshot.memory import Arena
from strata.checkpoint.snapshot.state import Json
from strata.client.api import arguments
from strata.client.checkpoints.config import CheckpointManagerConfig, merged
from strata.client.checkpoints.port import SessionPort
from strata.client.checkpoints.restore import MAX_STEP
from strata.client.checkpoints.root import OpenRoot
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointAborted, ConfigError, Conflict
from strata.integrations.dcp.arguments import DCP_VERSION, opened, session_of, step_of
from strata.integrations.dcp.image import snapshot_of
from strata.integrations.dcp.relay import BorrowedPort, Loan, lend

END_S: Final = 5.0
"""How long the program's exit waits for the removal of old checkpoints; the next removal handles the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """The data that rank 0 attaches to each rank's plan: the save's record, the rank's number, the state's tree."""

    record: CheckpointMetadata
    rank: int
    tree: Json


class _Save:
    """One of a writer's saves. DCP runs each in one thread, and reports no failure of other ranks to the writer."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.begun: CheckpointMetadata | None = None
        """The attempt that rank 0 began, and has neither committed nor aborted."""


class StrataWriter(StorageWriter):
    """Saves one step after the other under a storage root, together with all ranks of DCP's group.

    The step is the `checkpoint_id` ("120") of each save, else `step`. Without coordinators, a step that is saved
    again is a new checkpoint, newer than all others, and a load of that step takes the new one. With coordinators, a
    committed step is never replaced: a second save raises `Conflict`. If the first save failed between its commit and
    its marker, the second save writes the marker, and raises `Conflict` too.
    """

    def __init__(
        self,
        storage_path: str | Path | None = None,
        *,
        step: int | None = None,
        epoch: int = 0,
        metadata: Mapping[str, str] | None = None,
        client: SessionPort | None = None,
        config: CheckpointManagerConfig | None = None,
        **settings: Any,
    ) -> None:
        """Take the arguments of a `CheckpointManager`; nothing is opened yet."""
        self._set_up(merged(storage_path, config, settings), session_of(client))
        self._set_save(step, epoch, arguments.metadata(metadata))

    def _set_save(self, step: int | None, epoch: int, metadata: Mapping[str, str]) -> None:
        self.step = step
        self.epoch = epoch
        self.metadata = metadata

    def _set_up(self, config: CheckpointManagerConfig, port: SessionPort | None) -> None:
        self.config = config
        self.last: CheckpointMetadata | None = None
        """The newest saved checkpoint; set on rank 0 only."""
        self._port = port
        self._root: OpenRoot | None = None
        self._end: Callable[[], object] = lambda: None
        self._save = _Save(None)
        self._mine = local()
        """Thread-local: `save` is the calling thread's save."""
        self._writing = Lock()
        self._reached = -1
        """The step of the newest begun save."""
        self._failed: dict[int, str] = {}
        self._written: dict[str, RankManifest] = {}
        """The manifest of the newest written part, by its digest."""
        self._arena = Arena()
        self._collecting: futures.Future[None] | None = None
        self._revived = False

    def close(self) -> None:
        """Close the writer's storage root; saved checkpoints stay.

        Waits for the removal of old checkpoints; `StorageError` if one cannot be removed.
        """
        try:
            self._wait_collected()
        finally:
            root, self._root = self._root, None
            self._end()
            if root is not None:
                root.close()

    def __reduce__(self) -> Any:
        loan = lend(self._port) if self._port is not None else None
        return _revived, (self.config, loan, self.step, self.epoch, self.metadata)

    # -- what DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new save; `checkpoint_id` is its step as text."""
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)
        before, self._save = self._save, _Save(self.step)
        self._save.begun = before.begun
        self._mine.save = self._save

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a step alone does not name a storage location."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Return the save's id, for DCP's own logs."""
        return StorageMeta(checkpoint_id=str(self.step), save_id=None)

    def _current(self) -> _Save:
        """Return this thread's save; `CheckpointAborted` if a newer save has begun since."""
        save: _Save | None = getattr(self._mine, "save", None)
        if save is None:  # the caller is not DCP, and saves without a `reset`
            self.reset()
            save = self._save
        if save is not self._save:
            raise CheckpointAborted(
                f"the save of step {save.step} was given up: that of step {self._save.step} began before it had ended",
                hint="wait for the future of one async_save before the next",
            )
        return save

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check the arguments that every rank has."""
        if kwargs.get("use_collectives") is False:
            raise ConfigError(
                "DCP has use_collectives=False, and a checkpoint is committed by all ranks together",
                hint="leave use_collectives as it is",
            )
        step = self._current().step
        if step is None:
            raise ConfigError("no step is given", hint='dcp.save(state, checkpoint_id="120", …)')
        arguments.integer("step", step, below=MAX_STEP)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan unchanged: the planner decides which rank writes what."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save, and attach its record to every rank's plan."""
        save = self._current()
        if self._collecting is not None:
            futures.wait([self._collecting])
        record = self._begin(self._enter(len(plans)), save)
        tree = tree_of(plans)
        return [
            # the state belongs to all ranks together, so only rank 0's manifest has its tree
            replace(
                plan, storage_data=Given(record=record, rank=rank, tree=tree if rank == 0 else tree_of([]))
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's image and manifest, and ack them once both are durable."""
        given = plan.storage_data
        if not isinstance(given, Given) or given.record.step != self._current().step:
            raise ConfigError(
                "this save came with the plan of an earlier one", hint="leave enable_plan_caching off"
            )
        done: Future[list[WriteResult]] = Future()
        with self._writing:  # all saves share one arena
            self._current()
            done.set_result(self._write(given, plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Return once the checkpoint of all ranks is committed, and its marker is in storage.

        Old checkpoints are removed afterwards. The next save waits for the removal, and raises the removal's error
        after its own commit. In DCP's own process, where no trainer waits, the removal ends before this returns.
        """
        metadata.version = DCP_VERSION
        root, save = self._root, self._current()
        record = save.begun
        assert root is not None, "the ranks wrote what was begun here"
        assert record is not None, "as above"
        saver, info, folder = self._saver(root), _info(record), root.catalog.folder(record)
        try:
            record, manifest = saver.commit(
                record, folder, info, acked=_acked(results), written=self._written
            )
            self.last = saver.mark(record, folder, manifest, info)
        except BaseException as error:
            self._give_up(root, record, error)
            raise
        save.begun = None
        self._failed.pop(record.step, None)
        before, self._collecting = self._collecting, _collect_garbage(root)
        if before is not None:
            before.result()
        if self._revived:
            self._wait_collected()

    # -- inside

    def _wait_collected(self) -> None:
        """Wait until no old checkpoint is being removed; raise the error of a failed removal once."""
        if self._collecting is not None:
            futures.wait(
                [self._collecting]
            )  # before the reset: after an interrupt the removal is still under way
            collecting, self._collecting = self._collecting, None
            collecting.result()

    def _enter(self, ranks: int) -> OpenRoot:
        if self._root is None:
            root = opened(self.config, self._port, ranks=ranks)
            root.claim()
            self._root, self._end = root, weakref.finalize(self, root.release)
        if self._root.catalog.world_size != ranks:
            raise ConfigError(
                f"DCP's group has {ranks} ranks, and {self._root.catalog.world_size} save together",
                hint="save with the group of all ranks",
            )
        return self._root

    def _saver(self, root: OpenRoot) -> Saver:
        return Saver(
            storage=root.storage,
            catalog=root.catalog,
            commit_timeout_s=self.config.commit_timeout_s,
            threads=self.config.io_threads,
        )

    def _begin(self, root: OpenRoot, save: _Save) -> CheckpointMetadata:
        step = save.step
        assert step is not None, "checked by set_up_storage_writer"
        if save.begun is not None:
            self._give_up(root, save.begun, CheckpointAborted("another rank failed, or the next save began"))
        if isinstance(root.catalog, LocalCatalog) and step <= self._reached:
            root.catalog.go_back()  # the new save must count as newest, or it would be removed as an old one
        self._reached = step
        request = SaveRequest(
            step=step, epoch=self.epoch, metadata=self.metadata, replaces=self._failed.get(step, "")
        )
        record = root.catalog.begin(request)
        if record.state is CheckpointState.COMMITTED:
            # the first save may have failed before its marker: its data is valid for this step, so write the marker
            self._saver(root).mark(record, root.catalog.folder(record), None, _info(record))
            raise Conflict(
                f"step {step} is saved already in this generation, and stays as it is",
                hint="save it under another checkpoint_id, a later step",
            )
        if record.state is not CheckpointState.OPEN:
            raise CheckpointAborted(
                f"the save of step {step} is {record.state.value}: {record.reason}", hint="save it again"
            )
        save.begun = record
        return record

    def _write(self, given: Given, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        record = given.record
        root = self._enter(record.ranks)
        saver, coordinated = self._saver(root), not isinstance(root.catalog, LocalCatalog)
        try:
            if coordinated and root.catalog.rank != given.rank:
                raise ConfigError(
                    f"this is rank {given.rank} of DCP's group, and rank {root.catalog.rank} of its job",
                    hint="save with the group of all ranks",
                )
            info = _info(record)
            values = {item.index: (item, planner.resolve_data(item)) for item in plan.items}
            own, digest = saver.part(
                record,
                root.catalog.folder(record),
                snapshot_of(values.values(), tree=given.tree, arena=self._arena),
                Plan(request=SaveRequest(step=record.step)),
                info,
                rank=given.rank,
            )
            if coordinated:
                saver.ack(record, own, digest, info)
        except BaseException as error:
            if coordinated:  # else rank 0 aborts the attempt when it begins the next save
                self._give_up(root, record, error)
            raise
        self._written = {digest: own}
        return [
            WriteResult(index=item.index, size_in_bytes=_size(own, item), storage_data=digest)
            for item in plan.items
        ]

    def _give_up(self, root: OpenRoot, record: CheckpointMetadata, error: BaseException) -> None:
        if self._save.begun is record:
            self._save.begun = None
        self._failed[record.step] = record.id
        self._saver(root).abort(record, error)


_COLLECTING: Final[weakref.WeakSet[futures.Future[None]]] = weakref.WeakSet()


def _collect_garbage(root: OpenRoot) -> futures.Future[None]:
    """Remove old checkpoints in a thread; in this thread if none can be started, as at the program's exit."""
    done: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            root.collect_garbage()
        except BaseException as error:  # noqa: BLE001  # raised where the future's result is read
            done.set_exception(error)
        else:
            done.set_result(None)

    _COLLECTING.add(done)
    try:
        Thread(target=run, name="strata-garbage-collection", daemon=True).start()
    except RuntimeError:
        run()
    return done


def _end() -> None:
    futures.wait(list(_COLLECTING), END_S)


atexit.register(_end)

_REVIVED: Final[dict[object, StrataWriter]] = {}
"""Writers that were unpickled in this process: the next save of the same writer reuses its memory."""


def _revived(
    config: CheckpointManagerConfig,
    loan: Loan | None,
    step: int | None,
    epoch: int,
    metadata: Mapping[str, str],
) -> StrataWriter:
    key = repr(config), loan is None
    writer = _REVIVED.get(key)
    if writer is None:
        writer = _REVIVED[key] = StrataWriter.__new__(StrataWriter)
        writer._set_up(config, BorrowedPort(loan) if loan is not None else None)
        writer._revived = True
    elif loan is not None and isinstance(writer._port, BorrowedPort):
        writer._port.take(loan)
    writer._set_save(step, epoch, metadata)
    return writer


def _info(record: CheckpointMetadata) -> CheckpointInfo:
    return CheckpointInfo(
        step=record.step, epoch=record.epoch, checkpoint_type=record.checkpoint_type, metadata=record.metadata
    )


def tree_of(plans: list[SavePlan]) -> Json:
    """Return the tree of the state that these plans save together."""
    nested: dict[Any, Any] = {}
    for plan in plans:
        paths = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
        for item in plan.items:
            fqn = item.index.fqn
            path = paths.get(fqn, (fqn,))
            node = nested
            for key in path[:-1]:
                node = node.setdefault(key, {})
            node[path[-1]] = _Leaf("b" if item.type == WriteItemType.BYTE_IO else "t", fqn)
    return _tree(nested)


@dataclass(frozen=True, slots=True)
class _Leaf:
    kind: str
    name: str


def _tree(node: Any) -> Json:
    if isinstance(node, _Leaf):
        return {node.kind: node.name}
    if node and set(node) == set(range(len(node))):
        return {"l": [_tree(node[index]) for index in range(len(node))]}
    return {"d": [[key, _tree(part)] for key, part in node.items()], "c": "dict"}


def _acked(results: list[list[WriteResult]]) -> dict[int, str]:
    """Return the manifest digest of each rank that had anything to write."""
    return {rank: written[0].storage_data for rank, written in enumerate(results) if written}


def _size(own: RankManifest, item: WriteItem) -> int:
    entry = own.tensors.get(item.index.fqn)
    return entry.spec.size_bytes if entry is not None else 0
