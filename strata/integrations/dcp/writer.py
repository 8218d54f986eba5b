"""`StrataWriter`: DCP saves through Strata's engine, and commits in its catalog.

    rank 0, global plan: begin ─▶ every rank, write_data: image, manifest, ack ─▶ rank 0, finish:
    global manifest, seal, COMMITTED, marker

DCP's collectives take the place of the barrier before a save. A rank that fails ends the save for
all: DCP tells every rank, and the attempt is given up in the catalog.

The writer holds no channel when it is pickled, as DCP's process mode does: what it asks of the
coordinators then is asked for it by the trainer's process.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import Any, Final

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from strata.checkpoint.catalog import CheckpointAck, CheckpointMetadata, SaveRequest
from strata.checkpoint.composing import compose, seal_of
from strata.checkpoint.digest import named_digest
from strata.checkpoint.local_catalog import LocalCatalog
from strata.checkpoint.manifest import GLOBAL_NAME, RankManifest, rank_manifest_name
from strata.checkpoint.marker import NAME as MARKER
from strata.checkpoint.marker import read_manifest, write_marker
from strata.checkpoint.sink import put
from strata.checkpoint.state import Json
from strata.client import arguments
from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.client.checkpoint_keeping import Keeping
from strata.client.checkpoint_port import SessionPort
from strata.client.checkpoint_retention import retain
from strata.client.surroundings import now_unix_ms
from strata.core.records import CheckpointState
from strata.errors import CheckpointAborted, ConfigError, Conflict, StrataError
from strata.integrations.dcp.image import Staging, write_part
from strata.integrations.dcp.relay import Address, BorrowedPort, Lender
from strata.integrations.dcp.room import Room, configured, open_room, session_of, step_of
from strata.integrations.dcp.tidying import Tidying

_MAX_STEP: Final = 10**12


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What rank 0 gives each rank with its plan: the save, and which of its ranks this one is."""

    record: CheckpointMetadata
    folder: str
    rank: int
    tree: Json


class StrataWriter(StorageWriter):
    """Saves one step after the other below a storage root, together with all ranks of DCP's group.

    Which step is `checkpoint_id` ("120") of each save, else `step`. A step that is saved again is another
    checkpoint, newer than all before, and is what a load of that step takes. Under coordinators a committed
    step is never replaced: `Conflict`. Either holds also where the first save failed after its commit: what it
    saved is marked first.
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
        self._set_up(configured(storage_path, config, settings), session_of(client), None)
        self._say(step, epoch, arguments.metadata(metadata))

    def _say(self, step: int | None, epoch: int, metadata: Mapping[str, str]) -> None:
        self.step = step
        self.epoch = epoch
        self.metadata = metadata

    def _set_up(
        self, config: CheckpointManagerConfig, port: SessionPort | None, address: Address | None
    ) -> None:
        self.config = config
        self.last: CheckpointMetadata | None = None
        """The checkpoint that was saved last; rank 0 knows it."""
        self._port = port
        self._address = address
        self._lender: Lender | None = None
        self._room: Room | None = None
        self._keeping: Keeping | None = None
        self._begun: CheckpointMetadata | None = None
        self._written: dict[str, RankManifest] = {}
        """By its digest, the manifest of the part that was written last."""
        self._staging = Staging()
        self._failed: dict[int, str] = {}
        self._tidying = Tidying()
        self._revived = False

    def close(self) -> None:
        """End what the writer holds of its session; what is saved stays.

        Waits for the old checkpoints that are being removed; `StorageError` where one cannot be.
        """
        try:
            self._tidying.wait()
            self._tidying.check()
        finally:
            keeping, self._keeping = self._keeping, None
            if keeping is not None:
                keeping.close()
            room, self._room = self._room, None
            if room is not None:
                room.close()
            lender, self._lender = self._lender, None
            if lender is not None:
                lender.close()

    def __reduce__(self) -> Any:
        address = self._address
        if address is None and self._port is not None:
            self._lender = self._lender or Lender(self._port)
            address = self._lender.address
        return _revived, (self.config, address, self.step, self.epoch, self.metadata)

    # -- what DCP calls

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save; `checkpoint_id` is its step as text."""
        if checkpoint_id is not None:
            self.step = step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never by itself: a step alone does not say where."""
        return False

    def storage_meta(self) -> StorageMeta | None:
        """Say which save it is, for DCP's own logs."""
        return StorageMeta(checkpoint_id=str(self.step), save_id=None)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Check what is known on every rank."""
        if kwargs.get("use_collectives") is False:
            raise ConfigError(
                "DCP was told use_collectives=False, and a checkpoint is committed by all ranks together",
                hint="leave use_collectives as it is",
            )
        if self.step is None:
            raise ConfigError("no step is given", hint='dcp.save(state, checkpoint_id="120", …)')
        arguments.integer("step", self.step, below=_MAX_STEP)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is: who writes what is the planner's matter."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Begin the save, and tell every rank where to."""
        assert self.step is not None, "checked by set_up_storage_writer"
        self._tidying.wait()
        room = self._enter(len(plans))
        record = self._begin(room, self.step)
        folder = room.catalog.folder(record)
        tree = tree_of(plans)
        return [
            replace(
                plan,
                # the state is that of all ranks together, so one manifest describes it
                storage_data=Given(
                    record=record, folder=folder, rank=rank, tree=tree if rank == 0 else tree_of([])
                ),
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's image and manifest, and ack; return when both are durable."""
        given = plan.storage_data
        if not isinstance(given, Given) or given.record.step != self.step:
            raise ConfigError(
                "this save came with the plan of an earlier one", hint="leave enable_plan_caching off"
            )
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(given, plan, planner))
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Return once the checkpoint of all ranks is committed, and marked in storage.

        Old ones are removed after that: the next save waits for it, and raises what went wrong once it is
        committed itself. In DCP's own process, where no trainer waits, they are removed before this returns.
        """
        room, record = self._room, self._begun
        assert room is not None, "the ranks wrote what was begun here"
        assert record is not None, "as above"
        try:
            self.last = self._commit(room, record, _acked(results))
        except BaseException as error:
            self._give_up(room, record, error)
            raise
        self._begun = None
        self._failed.pop(record.step, None)
        try:
            self._tidying.check()
        finally:
            self._tidying.begin(lambda: self._tidy(room))
        if self._revived:
            self._tidying.wait()
            self._tidying.check()

    # -- inside

    def _tidy(self, room: Room) -> None:
        """Remove what the rules give up: the leader's marks under coordinators, else what storage shows."""
        if isinstance(room.catalog, LocalCatalog):
            retain(room.catalog, room.storage, self.config.keep, now_unix_ms=now_unix_ms())
            return
        if self._keeping is None:
            self._keeping = Keeping(room.catalog, room.storage, self.config)
        self._keeping.after_commit()

    def _enter(self, ranks: int) -> Room:
        if self._room is None:
            self._room = open_room(self.config, self._port, ranks=ranks, writing=True)
        if self._room.catalog.world_size != ranks:
            raise ConfigError(
                f"DCP's group has {ranks} ranks, and {self._room.catalog.world_size} save together",
                hint="save with the group of all ranks",
            )
        return self._room

    def _begin(self, room: Room, step: int) -> CheckpointMetadata:
        if self._begun is not None:  # DCP tells nobody of a save that failed on another rank
            self._give_up(room, self._begun, CheckpointAborted("another rank failed"))
        request = SaveRequest(
            step=step, epoch=self.epoch, metadata=self.metadata, replaces=self._failed.get(step, "")
        )
        if isinstance(room.catalog, LocalCatalog) and self.last is not None and step < self.last.step:
            room.catalog.go_back()  # it counts as newer than all there are; else it would go as an old one
        record = room.catalog.begin(request)
        if record.state is CheckpointState.COMMITTED:
            self._end(room, record)
            record = self._again(room, request)
        if record.state is not CheckpointState.OPEN:
            raise CheckpointAborted(
                f"the save of step {step} is {record.state.value}: {record.reason}", hint="save it again"
            )
        self._begun = record
        return record

    @staticmethod
    def _end(room: Room, record: CheckpointMetadata) -> None:
        """Mark a committed record in storage, where its save failed at that: its data is what was saved then."""
        folder = room.catalog.folder(record)
        if not room.storage.exists(f"{folder}/{MARKER}"):
            manifest = read_manifest(room.storage, folder, record.manifest_digest)
            write_marker(room.storage, folder, manifest, record.manifest_digest)

    @staticmethod
    def _again(room: Room, request: SaveRequest) -> CheckpointMetadata:
        """Begin another checkpoint of a step that is saved already; it counts as newer than all there are.

        `Conflict` under coordinators, where a step is saved once in a generation.
        """
        if not isinstance(room.catalog, LocalCatalog):
            raise Conflict(
                f"step {request.step} is saved already in this generation, and stays as it is",
                hint="save it under another checkpoint_id, a later step",
            )
        room.catalog.go_back()
        return room.catalog.begin(request)

    def _write(self, given: Given, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        room = self._enter(given.record.ranks)
        record = given.record
        try:
            if room.coordinated and room.catalog.rank != given.rank:
                raise ConfigError(
                    f"this is rank {given.rank} of DCP's group, and rank {room.catalog.rank} of its job",
                    hint="save with the group of all ranks",
                )
            values = {item.index: (item, planner.resolve_data(item)) for item in plan.items}
            own = write_part(
                room.storage,
                given.folder,
                list(values.values()),
                record=record,
                rank=given.rank,
                tree=given.tree,
                staging=self._staging,
            )
            data = own.to_bytes()
            put(room.storage, f"{given.folder}/{rank_manifest_name(own.rank)}", data)
            if room.coordinated:
                room.catalog.ack(record, _ack(own, data))
        except BaseException as error:
            if room.coordinated:  # else rank 0 gives it up when it begins the next
                self._give_up(room, record, error)
            raise
        acked = named_digest(data)
        self._written = {acked: own}
        return [
            WriteResult(index=item.index, size_in_bytes=_size(own, item), storage_data=acked)
            for item in plan.items
        ]

    def _commit(self, room: Room, record: CheckpointMetadata, acked: Mapping[int, str]) -> CheckpointMetadata:
        folder = room.catalog.folder(record)
        latest = room.catalog.latest()
        manifest = compose(
            room.storage, record, folder, predecessor=latest, acked=acked, written=self._written
        )
        data = manifest.to_bytes()
        put(room.storage, f"{folder}/{GLOBAL_NAME}", data)
        if not room.coordinated:
            record = room.catalog.ack(record, CheckpointAck(digest="", size_bytes=manifest.size_bytes))
        record = room.catalog.seal(record, seal_of(manifest, data))
        record = room.catalog.wait(
            record,
            lambda r: r.state is CheckpointState.COMMITTED,
            timeout_s=self.config.commit_timeout_s,
            cancelled=Event(),
        )
        write_marker(room.storage, folder, manifest, record.manifest_digest)
        return record

    def _give_up(self, room: Room, record: CheckpointMetadata, error: BaseException) -> None:
        self._begun = None
        self._failed[record.step] = record.id
        reason = f"rank {room.catalog.rank}: {str(error) or type(error).__name__}"
        with contextlib.suppress(StrataError):  # the first error is the one to report
            room.catalog.abort(record, reason[:1000])


_REVIVED: Final[dict[object, StrataWriter]] = {}
"""Writers that were unpickled here: the next save of the same one finds its memory warm."""


def _revived(
    config: CheckpointManagerConfig,
    address: Address | None,
    step: int | None,
    epoch: int,
    metadata: Mapping[str, str],
) -> StrataWriter:
    key = repr(config), address
    writer = _REVIVED.get(key)
    if writer is None:
        writer = _REVIVED[key] = StrataWriter.__new__(StrataWriter)
        writer._set_up(config, BorrowedPort(address) if address is not None else None, address)
        writer._revived = True
    writer._say(step, epoch, metadata)
    return writer


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
    """Return the digest of each rank's manifest, as far as it had anything to write."""
    return {rank: written[0].storage_data for rank, written in enumerate(results) if written}


def _ack(own: RankManifest, data: bytes) -> CheckpointAck:
    return CheckpointAck(digest=named_digest(data), size_bytes=own.image_bytes)


def _size(own: RankManifest, item: WriteItem) -> int:
    entry = own.tensors.get(item.index.fqn)
    return entry.spec.size_bytes if entry is not None else 0
