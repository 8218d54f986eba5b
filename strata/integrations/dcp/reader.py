"""`StrataReader`: DCP loads what Strata saved, every byte proven.

It reads what `StrataWriter` wrote, by any number of ranks, and what a `CheckpointManager` saved.

Each rank looks for the checkpoint by itself, and one may be committed between two looks. So each says
with its plan what it found, and all read what the coordinator of DCP's group found: the plans travel
through DCP's own collectives, whichever group it works with. A plan that was made for another checkpoint
holds if the parts lie alike in both, as they do from step to step; else the load is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

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

from strata.checkpoint.assembling import Assembler, Take, Wish
from strata.checkpoint.catalog import CheckpointMetadata
from strata.checkpoint.global_tensors import GlobalTensor, Piece, global_tensors
from strata.checkpoint.manifest import RankManifest
from strata.checkpoint.marker import read_manifest, read_rank_manifests
from strata.checkpoint.memory import Arena
from strata.checkpoint.sharding import Box
from strata.checkpoint.sink import Storage
from strata.checkpoint.state import Json, children
from strata.checkpoint.tensors import DTYPES
from strata.client.checkpoint_config import CheckpointManagerConfig
from strata.client.checkpoint_loading import check_there
from strata.client.checkpoint_port import SessionPort
from strata.errors import CheckpointCorrupt, CheckpointError, CheckpointNotFound, ConfigError, StrataError
from strata.integrations.dcp.damage import look, removed, told, untold
from strata.integrations.dcp.holding import Hold
from strata.integrations.dcp.planners import SavedBytes, is_json
from strata.integrations.dcp.room import configured, open_room, session_of, step_of

_T = TypeVar("_T")

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
        self._config = configured(storage_path, config, settings)
        self._port = session_of(client)
        self._step = step
        self.checkpoint: CheckpointMetadata | None = None
        """What is loaded, once that is known."""
        self._storage: Storage | None = None
        self._found: _Found | None = None
        self._hold = Hold()

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew; `checkpoint_id` is a step as text."""
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)
        self._found = None
        self._hold.release()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Never by itself: a step alone does not say where."""
        return False

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds; its manifests are proven. It stays until it is read."""
        with self._hold.beginning():
            found = self._found = self._find()
            return Metadata(
                state_dict_metadata={fqn: item.metadata for fqn, item in found.items.items()},
                planner_data={fqn: item.path for fqn, item in found.items.items()},
            )

    def _find(self) -> _Found:
        room = open_room(self._config, self._port, ranks=1, writing=False)
        try:
            look(room, self._port, self._config)
            checkpoint = self._hold.find(room, self._step)
            folder = room.catalog.folder(checkpoint)
        finally:
            room.close()
        self._storage = room.storage
        chosen = Chosen(checkpoint=checkpoint, folder=folder)
        with self._telling(chosen):
            return _twice(partial(self._open, chosen))

    @contextlib.contextmanager
    def _telling(self, chosen: Chosen) -> Iterator[None]:
        """Have damage told to the coordinators, and raised with the step to load instead."""
        try:
            yield
        except CheckpointCorrupt as error:
            raise self._told(error, chosen.checkpoint) from error

    def _told(self, error: CheckpointCorrupt, checkpoint: CheckpointMetadata) -> StrataError:
        """Return what to raise for damage: whatever else fails now, it is the damage.

        `CheckpointNotFound` for a checkpoint that was removed while it was read.
        """
        try:
            room = open_room(self._config, self._port, ranks=1, writing=False)
        except StrataError as other:
            log.warning("step %d is damaged, which nobody was told: %s", checkpoint.step, other.message)
            return untold(error, checkpoint)
        try:
            with contextlib.suppress(StrataError):  # who cannot be asked does not change what was read
                if removed(checkpoint, room):
                    return CheckpointNotFound(
                        f"step {checkpoint.step} was removed while it was read",
                        hint="load again, or keep more of them: keep_count=",
                    )
            return told(error, checkpoint, room, self._config)
        finally:
            room.close()

    def _open(self, chosen: Chosen) -> _Found:
        """Prove the manifests of a checkpoint, and make it what is loaded."""
        assert self._storage is not None, "read_metadata comes first"
        folder = chosen.folder
        check_there(self._storage, chosen.checkpoint, folder)
        manifest = read_manifest(self._storage, folder, chosen.checkpoint.manifest_digest)
        manifests = read_rank_manifests(self._storage, folder, manifest)
        rank = distributed.get_rank() if distributed.is_initialized() else 0
        items = items_of(manifests, rank if rank < len(manifests) else 0)
        self.checkpoint = chosen.checkpoint
        return _Found(
            chosen=chosen,
            assembler=Assembler(self._storage, folder, manifests),
            items={item.fqn: item for item in items},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Nothing is to be set up."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is: who reads what is the planner's matter."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Say in each plan what all load: what this rank, the coordinator, found."""
        assert self._found is not None, "read_metadata comes first"
        return [replace(plan, storage_data=self._found.chosen) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read, prove and hand over all that the plan asks for."""
        assert self._found is not None, "read_metadata comes first"
        chosen = plan.storage_data
        if not isinstance(chosen, Chosen):
            raise ConfigError("the plan does not say which checkpoint all ranks load")
        with self._hold.reading(chosen.checkpoint):
            self._read(chosen, plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, chosen: Chosen, plan: LoadPlan, planner: LoadPlanner) -> None:
        assert self._found is not None, "read_metadata comes first"
        if chosen.checkpoint.id != self._found.chosen.checkpoint.id:
            log.info(
                "step %d was found here, and step %d is what all ranks load",
                self._found.chosen.checkpoint.step,
                chosen.checkpoint.step,
            )
            before = self._found
            with self._telling(chosen):
                self._found = _twice(partial(self._open, chosen))
            _check_alike(plan.items, before, self._found)
        found, arena = self._found, Arena()
        for batch in _batches(plan.items, found):
            wishes = {
                number: found.items[item.storage_index.fqn].wish(item)
                for number, item in enumerate(batch)
                if not found.items[item.storage_index.fqn].is_plain
            }
            with self._telling(chosen):
                data = _twice(partial(found.assembler.read, wishes, arena=arena))
            for number, item in enumerate(batch):
                _hand_over(planner, item, found.items[item.storage_index.fqn], data.get(number))


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
class Chosen:
    """What the coordinator of a load tells all ranks with their plans."""

    checkpoint: CheckpointMetadata
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    chosen: Chosen
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
                f"the ranks found step {planned.chosen.checkpoint.step} and step"
                f" {found.chosen.checkpoint.step}, and {fqn} does not lie alike in them",
                hint="load again, or name the step: StrataReader(…, step=…)",
            )


def _twice(read: Callable[[], _T]) -> _T:
    """Return what is read, proven; damage is read again before it counts."""
    try:
        return read()
    except CheckpointCorrupt as error:
        log.error("read again: %s", error.message)  # noqa: TRY400  # the reason says it all
        return read()


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
