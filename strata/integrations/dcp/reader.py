"""`StrataReader`: DCP loads Strata's checkpoints, with every byte verified.

It reads checkpoints that `StrataWriter` wrote, with any number of ranks, or that a `CheckpointManager` saved.

Each rank looks up the checkpoint by itself, and a new one may be committed between two lookups, so ranks may find
different checkpoints. DCP's coordinator rank therefore puts the checkpoint that it found into every rank's load plan,
and all ranks read this checkpoint. The plans travel through DCP's own collectives, in any process group. A rank may
have made its plan for another checkpoint. Its plan then applies if the parts have the same layout in both
checkpoints; otherwise the load is refused. From step to step the layout is usually the same.
"""

from __future__ import annotations

import io
import json
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import distributed
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from strata.checkpoint.catalog.local import LocalCatalog
from strata.checkpoint.catalog.protocol import CheckpointMetadata
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.format.marker import read_manifest, read_rank_manifests
from strata.checkpoint.restore.assembling import Assembler, RequestedTensor, Take
from strata.checkpoint.restore.global_tensors import GlobalTensor, Piece, global_tensors
from strata.checkpoint.save.sharding import Box
from strata.checkpoint.snapshot.memory import Arena
from strata.checkpoint.snapshot.state import Json, children
from strata.checkpoint.snapshot.tensors import DTYPES
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.config import CheckpointManagerConfig, merged
from strata.client.checkpoints.port import SessionPort
from strata.client.checkpoints.reader_lease import ReaderLease
from strata.client.checkpoints.restore import Loading, check_there
from strata.client.checkpoints.root import OpenRoot
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointError, CheckpointNotFound, ConfigError
from strata.integrations.dcp.arguments import DCP_VERSION, opened, session_of, step_of
from strata.integrations.dcp.damage import corrupt, proven
from strata.integrations.dcp.planners import SavedBytes, is_json

BATCH_BYTES: Final = 64 << 20
"""The approximate size of a batch: the memory that a load uses and reuses in addition to the state."""

log: Final = logging.getLogger("strata.checkpoint")


class StrataReader(StorageReader):
    """Loads the checkpoint of `step`. Without `step`, it loads the checkpoint that this world begins from, or
    if there is none, the newest.
    """

    def __init__(
        self,
        storage_path: str | Path | None = None,
        *,
        step: int | None = None,
        client: SessionPort | None = None,
        config: CheckpointManagerConfig | None = None,
        **settings: Any,
    ) -> None:
        """Take the arguments of a `CheckpointManager`; nothing is read yet."""
        # a reader does not apply retention
        self._config = replace(merged(storage_path, config, settings), keep_count=None)
        self._port = session_of(client)
        self._step = step
        self.checkpoint: CheckpointMetadata | None = None
        """The checkpoint that is loaded, once it is known."""
        self._load: _Load | None = None
        self._end: Callable[[], object] = lambda: None
        self._found: _Found | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start a new load; `checkpoint_id` is a step as text."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        if self._load is not None:
            self._load.release()
        self._end()
        self._load = self._found = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return False: a step alone does not name a storage location."""
        return False

    def read_metadata(self) -> Metadata:
        """Return the checkpoint's metadata from its verified manifests, and protect the checkpoint until it is read."""
        self.reset()
        load = self._load = _Load(opened(self._config, self._port))
        # DCP does not call the reader when a load ends: a rank that fails ends the load for all ranks
        self._end = weakref.finalize(self, load.end)
        try:
            checkpoint = load.find(self._step)
            load.keep(checkpoint)
            found = self._found = self._open(load, checkpoint)
        except BaseException:
            load.release()
            raise
        return Metadata(
            state_dict_metadata={fqn: item.metadata for fqn, item in found.items.items()},
            planner_data={fqn: item.path for fqn, item in found.items.items()},
            version=DCP_VERSION,
        )

    def _open(self, load: _Load, checkpoint: CheckpointMetadata) -> _Found:
        """Verify the manifests of a checkpoint, and make it the one to load."""
        folder = load.root.catalog.folder(checkpoint)
        check_there(load.root.storage, checkpoint, folder)

        def read(storage: Storage) -> _Found:
            manifests = read_rank_manifests(
                storage, folder, read_manifest(storage, folder, checkpoint.manifest_digest)
            )
            rank = distributed.get_rank() if distributed.is_initialized() else 0
            items = items_of(manifests, rank if rank < len(manifests) else 0)
            return _Found(
                checkpoint=checkpoint,
                assembler=Assembler(storage, folder, manifests),
                items={item.fqn: item for item in items},
            )

        found = proven(load.root, checkpoint, read)
        self.checkpoint = checkpoint
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Do nothing: there is nothing to set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged: the planner decides which rank reads what."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Put the checkpoint that this rank, DCP's coordinator, found into every plan, so that all ranks load it."""
        assert self._found is not None, "read_metadata comes first"
        return [replace(plan, storage_data=self._found.checkpoint) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify the items of the plan, and hand them to the planner."""
        assert self._load is not None, "read_metadata comes first"
        assert self._found is not None, "as above"
        chosen = plan.storage_data
        if not isinstance(chosen, CheckpointMetadata):
            raise ConfigError("the plan does not name the checkpoint that all ranks load")
        try:
            self._read(self._load, self._agreed(self._load, self._found, chosen, plan), plan, planner)
        finally:
            self._load.release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _agreed(self, load: _Load, found: _Found, chosen: CheckpointMetadata, plan: LoadPlan) -> _Found:
        """Open and return the checkpoint that all ranks load."""
        if chosen.id == found.checkpoint.id:
            return found
        log.info("step %d was found here, and all ranks load step %d", found.checkpoint.step, chosen.step)
        load.keep(chosen)
        self._found = self._open(load, chosen)
        _check_same_layout(plan.items, found, self._found)
        return self._found

    def _read(self, load: _Load, found: _Found, plan: LoadPlan, planner: LoadPlanner) -> None:
        arena = Arena()
        for batch in _batches(plan.items, found):
            data = proven(load.root, found.checkpoint, partial(_read_batch, found, batch, arena))
            for number, item in enumerate(batch):
                _hand_over(planner, item, found.items[item.storage_index.fqn], data.get(number))


class _Load:
    """A storage root opened for one load; a reader lease protects its checkpoint until it is read (PROTOCOLS 8.5).

    While it is open, one process per host also checks the root's checkpoints that other hosts report as corrupt.
    """

    def __init__(self, root: OpenRoot) -> None:
        self.root = root
        self._key: ReaderLease | None = None

    def find(self, step: int | None) -> CheckpointMetadata:
        """Return the committed checkpoint of `step`, or without `step` the restore point."""
        if step is not None:
            found = Loading(self.root).find(step)
            if found.state is CheckpointState.CORRUPT:
                raise corrupt(self.root, found, found.reason)
            return found
        point = self.root.catalog.restore_point()
        if point is None:
            if isinstance(self.root.catalog, LocalCatalog):
                raise CheckpointNotFound(f"{self.root.storage.uri} has no checkpoint to begin from")
            raise CheckpointNotFound(
                "this world began from no checkpoint", hint="name the step that is to be loaded"
            )
        return point

    def keep(self, checkpoint: CheckpointMetadata) -> None:
        """Protect only this checkpoint from deletion from now on; `Refused` if its deletion has begun."""
        self.release()
        if self.root.upkeep is not None:
            self._key = self.root.upkeep.hold(checkpoint)

    def release(self) -> None:
        """End the protection. Idempotent."""
        key, self._key = self._key, None
        if key is not None:
            key.close()

    def end(self) -> None:
        """Release everything, without waiting."""
        if self._key is not None:
            self._key.stop()
        self.root.release()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A value of the state as DCP sees it: a tensor, bytes, or a `plain` value of the tree.

    Bytes are a DCP planner's encoding of a value, or with `as_saved` a tensor or bytes value of a `CheckpointManager`.
    """

    fqn: str
    path: tuple[str | int, ...]
    tensor: GlobalTensor | None = None
    plain: Json = None
    is_bytes: bool = False
    as_saved: bool = False

    @property
    def is_plain(self) -> bool:
        return self.tensor is None

    @property
    def shape(self) -> object:
        """A key that is equal for two values to which the same plan applies: for a tensor, the layout of its parts."""
        if self.tensor is None or self.is_bytes:
            return self.is_plain, self.is_bytes, self.as_saved
        return self.tensor.spec.dtype, self.tensor.shape, {piece.box for piece in self.tensor.pieces}

    @property
    def metadata(self) -> BytesStorageMetadata | TensorStorageMetadata:
        """The value's metadata for DCP's planners."""
        if self.tensor is None or self.is_bytes:
            return BytesStorageMetadata()
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size(p.box.offsets), sizes=torch.Size(p.box.shape))
            for p in self.tensor.pieces
        ]
        dtype = getattr(torch, self.tensor.spec.dtype)
        return TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype), size=torch.Size(self.tensor.shape), chunks=chunks
        )

    def requested(self, item: ReadItem) -> RequestedTensor:
        """Return the read request for a planner's item, all of whose bytes are in one saved chunk."""
        tensor = self.tensor
        assert tensor is not None, "not plain"
        if self.is_bytes:
            piece, box = tensor.pieces[0], tensor.pieces[0].box
        else:
            piece = self._piece(item)
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        take = Take(rank=piece.rank, name=piece.name, source=box, into=Box.whole(box.shape))
        return RequestedTensor(
            shape=box.shape, item_bytes=DTYPES[tensor.spec.dtype].item_bytes, takes=(take,)
        )

    def _piece(self, item: ReadItem) -> Piece:
        assert self.tensor is not None, "not plain"
        offsets, hint = item.storage_index.offset, item.storage_index.index
        pieces = self.tensor.pieces
        if offsets is None:
            return pieces[hint or 0]
        if hint is not None and hint < len(pieces) and pieces[hint].box.offsets == tuple(offsets):
            return pieces[hint]
        for piece in pieces:
            if piece.box.offsets == tuple(offsets):
                return piece
        raise CheckpointError(f"{self.fqn} was saved in no part that begins at {list(offsets)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    checkpoint: CheckpointMetadata
    assembler: Assembler
    items: dict[str, Item]


def items_of(manifests: Sequence[RankManifest], rank: int) -> Iterator[Item]:
    """Yield the values in the manifest of rank number `rank`, then the further values of the other ranks."""
    tensors = global_tensors(manifests)
    seen: set[str] = set()
    for number in (rank, *(n for n in range(len(manifests)) if n != rank)):
        for path, tree in leaves(manifests[number].tree):
            fqn = ".".join(map(str, path))
            if fqn in seen:
                continue
            seen.add(fqn)
            if not (isinstance(tree, dict) and ("t" in tree or "b" in tree)):
                yield Item(fqn=fqn, path=path, plain=tree)
                continue
            name = tree.get("t") or tree["b"]
            tensor = tensors.get(name)
            entry = manifests[number].tensors.get(name)
            as_saved = entry is not None and entry.shard is None
            if entry is not None and as_saved:
                piece = Piece(box=Box.whole(entry.spec.shape), rank=number, name=name)
                tensor = GlobalTensor(spec=entry.spec, pieces=(piece,))
            if tensor is None:
                raise CheckpointError(f"the checkpoint names {name}, and no rank has saved it")
            yield Item(fqn=fqn, path=path, tensor=tensor, is_bytes="b" in tree, as_saved=as_saved)


def leaves(tree: Json, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Json]]:
    """Yield the values as DCP splits a state: a list that contains no tensor and no mapping is one value."""
    parts = children(tree)
    if parts is None or ("d" not in tree and not _holds_tensors(tree)):
        yield path, tree
        return
    for key, part in parts:
        yield from leaves(part, (*path, str(key) if "d" in tree else key))


def _holds_tensors(tree: Json) -> bool:
    parts = children(tree)
    if parts is None:
        return isinstance(tree, dict) and "t" in tree
    return "d" in tree or any(_holds_tensors(part) for _, part in parts)


def _check_same_layout(items: Sequence[ReadItem], planned: _Found, found: _Found) -> None:
    """Raise `CheckpointError` unless a plan made for the checkpoint `planned` also applies to `found`."""
    for item in items:
        fqn = item.storage_index.fqn
        if fqn not in found.items or found.items[fqn].shape != planned.items[fqn].shape:
            raise CheckpointError(
                f"the ranks found step {planned.checkpoint.step} and step"
                f" {found.checkpoint.step}, and {fqn} is laid out differently in them",
                hint="load again, or name the step: StrataReader(…, step=…)",
            )


def _read_batch(
    found: _Found, batch: Sequence[ReadItem], arena: Arena, _: Storage
) -> Mapping[int, memoryview]:
    """Return the bytes of a batch's items by item number; plain items are left out."""
    requests = {
        number: found.items[item.storage_index.fqn].requested(item)
        for number, item in enumerate(batch)
        if not found.items[item.storage_index.fqn].is_plain
    }
    return found.assembler.read(requests, arena=arena)


def _batches(items: Sequence[ReadItem], found: _Found) -> Iterator[list[ReadItem]]:
    batch: list[ReadItem] = []
    size_bytes = 0
    for item in items:
        batch.append(item)
        known = found.items[item.storage_index.fqn]
        size_bytes += 0 if known.is_plain else known.requested(item).size_bytes
        if size_bytes >= BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    yield batch


def _hand_over(planner: LoadPlanner, item: ReadItem, known: Item, data: memoryview | None) -> None:
    if data is None:
        _load_bytes(planner, item, io.BytesIO(json.dumps(known.plain, separators=(",", ":")).encode()))
    elif item.type == LoadItemType.BYTE_IO:
        _load_bytes(planner, item, SavedBytes(data) if known.as_saved else io.BytesIO(data))
    else:
        assert known.tensor is not None, "a tensor"
        target = planner.resolve_tensor(item).detach()
        dtype = getattr(torch, known.tensor.spec.dtype)
        if data.nbytes:
            saved = torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(tuple(item.lengths))
            target.copy_(saved)
        planner.commit_tensor(item, target)


def _load_bytes(planner: LoadPlanner, item: ReadItem, data: io.BytesIO) -> None:
    """Hand a non-tensor value to the planner; `CheckpointError` if torch's planner would unpickle a non-pickle."""
    if getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes:
        saved_as = "bytes" if isinstance(data, SavedBytes) else "JSON" if is_json(data.getvalue()) else ""
        if saved_as:
            raise CheckpointError(
                f"{item.storage_index.fqn} was saved as {saved_as}, and {type(planner).__name__} unpickles values that are no tensors",
                hint="dcp.load(…, planner=JsonLoadPlanner()), of strata.integrations.dcp",
            )
    planner.load_bytes(item, data)
