"""`StrataReader`: DCP loads what Strata saved, every byte proven.

It reads what `StrataWriter` wrote, by any number of ranks, and what a `CheckpointManager` saved.

Each rank looks for the checkpoint by itself, and one may be committed between two looks. So each says
with its plan what it found, and all read what the coordinator of DCP's group found: the plans travel
through DCP's own collectives, whichever group it works with. A plan that was made for another checkpoint
holds if the parts lie alike in both, as they do from step to step; else the load is refused.
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
from strata.checkpoint.restore.assembling import Assembler, Take, Wish
from strata.checkpoint.restore.global_tensors import GlobalTensor, Piece, global_tensors
from strata.checkpoint.save.sharding import Box
from strata.checkpoint.snapshot.memory import Arena
from strata.checkpoint.snapshot.state import Json, children
from strata.checkpoint.snapshot.tensors import DTYPES
from strata.checkpoint.storage.sink import Storage
from strata.client.checkpoints.config import CheckpointManagerConfig, merged
from strata.client.checkpoints.port import SessionPort
from strata.client.checkpoints.reader_lease import ReaderKey
from strata.client.checkpoints.restore import Loading, check_there
from strata.client.checkpoints.root import OpenRoot
from strata.core.kv.records import CheckpointState
from strata.errors import CheckpointError, CheckpointNotFound, ConfigError
from strata.integrations.dcp.arguments import DCP_VERSION, opened, session_of, step_of
from strata.integrations.dcp.damage import corrupt, proven
from strata.integrations.dcp.planners import SavedBytes, is_json

BATCH_BYTES: Final = 64 << 20
"""About how much is read before it is handed on: what a load takes beside the state, and uses again."""

log: Final = logging.getLogger("strata.checkpoint")


class StrataReader(StorageReader):
    """Loads the checkpoint of `step`, else the one that this world begins from, else the newest."""

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
        # what stays is not a reader's matter
        self._config = replace(merged(storage_path, config, settings), keep_count=None)
        self._port = session_of(client)
        self._step = step
        self.checkpoint: CheckpointMetadata | None = None
        """What is loaded, once that is known."""
        self._load: _Load | None = None
        self._end: Callable[[], object] = lambda: None
        self._found: _Found | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew; `checkpoint_id` is a step as text."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        if self._load is not None:
            self._load.release()
        self._end()
        self._load = self._found = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never by itself: a step alone does not say where."""
        return False

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds; its manifests are proven. It stays until it is read."""
        self.reset()
        load = self._load = _Load(opened(self._config, self._port))
        # DCP tells no reader that a load has ended: a rank that fails ends it for all of them
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
        """Prove the manifests of a checkpoint, and make it what is loaded."""
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
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is: who reads what is the planner's matter."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Say in each plan what all load: what this rank, the coordinator, found."""
        assert self._found is not None, "read_metadata comes first"
        return [replace(plan, storage_data=self._found.checkpoint) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, prove and hand over all that the plan asks for."""
        assert self._load is not None, "read_metadata comes first"
        assert self._found is not None, "as above"
        chosen = plan.storage_data
        if not isinstance(chosen, CheckpointMetadata):
            raise ConfigError("the plan does not say which checkpoint all ranks load")
        try:
            self._read(self._load, self._agreed(self._load, self._found, chosen, plan), plan, planner)
        finally:
            self._load.release()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _agreed(self, load: _Load, found: _Found, chosen: CheckpointMetadata, plan: LoadPlan) -> _Found:
        """Return what all ranks load, opened."""
        if chosen.id == found.checkpoint.id:
            return found
        log.info(
            "step %d was found here, and step %d is what all ranks load", found.checkpoint.step, chosen.step
        )
        load.keep(chosen)
        self._found = self._open(load, chosen)
        _check_alike(plan.items, found, self._found)
        return self._found

    def _read(self, load: _Load, found: _Found, plan: LoadPlan, planner: LoadPlanner) -> None:
        arena = Arena()
        for batch in _batches(plan.items, found):
            data = proven(load.root, found.checkpoint, partial(_read_batch, found, batch, arena))
            for number, item in enumerate(batch):
                _hand_over(planner, item, found.items[item.storage_index.fqn], data.get(number))


class _Load:
    """A storage root that is open for one load, and the checkpoint in it that stays until it is read (PROTOCOLS 8.5).

    As long as it is open, one process of each host reads what other hosts find damaged in the root, too.
    """

    def __init__(self, root: OpenRoot) -> None:
        self.root = root
        self._key: ReaderKey | None = None

    def find(self, step: int | None) -> CheckpointMetadata:
        """Return the committed checkpoint of `step`, or where a restore begins."""
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
        """Keep this one from now on, and no other; `Refused` when it is to be deleted."""
        self.release()
        if self.root.keeping is not None:
            self._key = self.root.keeping.hold(checkpoint)

    def release(self) -> None:
        """Keep nothing any more; harmless when repeated."""
        key, self._key = self._key, None
        if key is not None:
            key.close()

    def end(self) -> None:
        """Let go of all, and wait for nothing."""
        if self._key is not None:
            self._key.stop()
        self.root.let_go()


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A value of the state as DCP sees it: a tensor, bytes, or a `plain` value of the tree.

    Bytes are what DCP's planner made of a value, or `as_saved` those of the state, by a `CheckpointManager`.
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
        """What two values have in common for which the same plan holds: of a tensor, how its parts lie."""
        if self.tensor is None or self.is_bytes:
            return self.is_plain, self.is_bytes, self.as_saved
        return self.tensor.spec.dtype, self.tensor.shape, {piece.box for piece in self.tensor.pieces}

    @property
    def metadata(self) -> BytesStorageMetadata | TensorStorageMetadata:
        """What DCP's planners are told of it."""
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

    def wish(self, item: ReadItem) -> Wish:
        """Return what a planner asks for, of one saved chunk."""
        tensor = self.tensor
        assert tensor is not None, "not plain"
        if self.is_bytes:
            piece, box = tensor.pieces[0], tensor.pieces[0].box
        else:
            piece = self._piece(item)
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
        take = Take(rank=piece.rank, name=piece.name, source=box, into=Box.whole(box.shape))
        return Wish(shape=box.shape, item_bytes=DTYPES[tensor.spec.dtype].item_bytes, takes=(take,))

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
    """Yield the values of the checkpoint, as rank number `rank` sees them; then those of the others."""
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
    """Yield what DCP takes for values: lists without tensors and mappings are values themselves."""
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


def _check_alike(items: Sequence[ReadItem], planned: _Found, found: _Found) -> None:
    """Raise `CheckpointError` unless what a plan asks of one checkpoint means the same in another."""
    for item in items:
        fqn = item.storage_index.fqn
        if fqn not in found.items or found.items[fqn].shape != planned.items[fqn].shape:
            raise CheckpointError(
                f"the ranks found step {planned.checkpoint.step} and step"
                f" {found.checkpoint.step}, and {fqn} does not lie alike in them",
                hint="load again, or name the step: StrataReader(…, step=…)",
            )


def _read_batch(
    found: _Found, batch: Sequence[ReadItem], arena: Arena, _: Storage
) -> Mapping[int, memoryview]:
    """Return the bytes of each item of a batch, by its number, that is not plain."""
    wishes = {
        number: found.items[item.storage_index.fqn].wish(item)
        for number, item in enumerate(batch)
        if not found.items[item.storage_index.fqn].is_plain
    }
    return found.assembler.read(wishes, arena=arena)


def _batches(items: Sequence[ReadItem], found: _Found) -> Iterator[list[ReadItem]]:
    batch: list[ReadItem] = []
    size_bytes = 0
    for item in items:
        batch.append(item)
        known = found.items[item.storage_index.fqn]
        size_bytes += 0 if known.is_plain else known.wish(item).size_bytes
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
    """Hand over what is no tensor; `CheckpointError` for what torch's own planner would unpickle and is no pickle."""
    if getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes:
        saved_as = "bytes" if isinstance(data, SavedBytes) else "JSON" if is_json(data.getvalue()) else ""
        if saved_as:
            raise CheckpointError(
                f"{item.storage_index.fqn} was saved as {saved_as}, and {type(planner).__name__} unpickles what is no tensor",
                hint="dcp.load(…, planner=JsonLoadPlanner()), of strata.integrations.dcp",
            )
    planner.load_bytes(item, data)
