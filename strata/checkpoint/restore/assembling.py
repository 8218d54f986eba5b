"""Boxes of tensors assembled from the parts that ranks saved, with every byte verified.

If a part is needed whole, and is one consecutive run of the result, it is read straight into its place. For any other
part, the chunks that contain the needed bytes are read into separate memory and verified; then the needed bytes are
copied into the result.
"""

from __future__ import annotations

import itertools
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from strata.checkpoint.format.chunk_map import ChunkPlace, chunk_places, object_name
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.restore.global_tensors import GlobalTensor
from strata.checkpoint.save.sharding import Box, Shape, sources
from strata.checkpoint.snapshot.memory import PAGE_BYTES, Arena, allocate
from strata.checkpoint.snapshot.tensors import DTYPES
from strata.checkpoint.storage.pipeline import DEFAULT_THREADS, Stored, read_chunks
from strata.checkpoint.storage.sink import Storage
from strata.errors import CheckpointError

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True, kw_only=True)
class Take:
    """A box of one rank's part, and its place in the assembled tensor."""

    rank: int
    name: str
    source: Box
    into: Box


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestedTensor:
    """A requested tensor of `shape`, to be assembled from boxes."""

    shape: Shape
    item_bytes: int
    takes: tuple[Take, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


def requested_tensor(name: str, tensor: GlobalTensor, requested: Box) -> RequestedTensor:
    """Return the boxes that make up `requested`; `CheckpointError`, naming the tensor, if it is outside the tensor."""
    found = sources(requested, [piece.box for piece in tensor.pieces])
    if found is None or not requested.fits(tensor.shape):
        raise CheckpointError(
            f"{name} is {tensor.spec}, which has no {list(requested.shape)} at {list(requested.offsets)}"
        )
    takes = []
    for number, common in found:
        piece = tensor.pieces[number]
        takes.append(
            Take(
                rank=piece.rank,
                name=piece.name,
                source=common.within(piece.box),
                into=common.within(requested),
            )
        )
    return RequestedTensor(
        shape=requested.shape, item_bytes=DTYPES[tensor.spec.dtype].item_bytes, takes=tuple(takes)
    )


class Assembler:
    """Assembles requested tensors from the checkpoint in `folder`, whose ranks' manifests are verified already."""

    def __init__(
        self,
        storage: Storage,
        folder: str,
        manifests: Sequence[RankManifest],
        *,
        threads: int = DEFAULT_THREADS,
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._manifests = manifests
        self._threads = threads
        self._places: dict[int, Mapping[str, Sequence[ChunkPlace]]] = {}

    def read(
        self, requests: Mapping[Key, RequestedTensor], *, arena: Arena | None = None
    ) -> dict[Key, memoryview]:
        """Return the bytes of each requested tensor; in the arena, if one is given.

        `CheckpointCorrupt`, naming the file and the tensor, if a byte differs from the saved one.
        """
        layout = _Memory()
        begins = {key: layout.take(one.size_bytes) for key, one in requests.items()}
        reads = [
            self._plan(one, take, begins[key], layout) for key, one in requests.items() for take in one.takes
        ]
        # inherited: an object may keep a tensor in this memory, and a forked worker may use it
        size_bytes = layout.size_bytes
        memory = allocate(size_bytes, inherited=True) if arena is None else arena.take(size_bytes)
        chunks = [chunk for read in reads for chunk in self._chunks(read)]
        read_chunks(self._storage, memory, chunks, threads=self._threads)
        for read in reads:
            if read.aside:
                read.copy(memory)
        return {key: memory[begin : begin + requests[key].size_bytes] for key, begin in begins.items()}

    def _plan(self, request: RequestedTensor, take: Take, begin: int, layout: _Memory) -> _Read:
        """Return the chunks to read, and their place in memory."""
        spec = self._manifests[take.rank].tensors[take.name].spec
        item = request.item_bytes
        first, end = take.source.hull(spec.shape)
        places = self._of_rank(take.rank)[take.name]
        if (first, end) == (0, math.prod(spec.shape)) and take.into.is_run(request.shape):
            chunks, aside = range(len(places)), False
            position = begin + take.into.hull(request.shape)[0] * item
        else:
            chunks, aside = range(first * item // CHUNK_BYTES, -(-end * item // CHUNK_BYTES)), True
            end_byte = min(chunks.stop * CHUNK_BYTES, spec.size_bytes)
            position = layout.take(end_byte - chunks.start * CHUNK_BYTES)
        return _Read(
            request=request,
            take=take,
            shape=spec.shape,
            begin=begin,
            places=places[chunks.start : chunks.stop],
            first=chunks.start,
            position=position,
            aside=aside,
        )

    def _of_rank(self, rank: int) -> Mapping[str, Sequence[ChunkPlace]]:
        if rank not in self._places:
            self._places[rank] = chunk_places(self._folder, self._manifests, rank)
        return self._places[rank]

    def _chunks(self, read: _Read) -> Iterator[Stored]:
        position = read.position
        for number, place in enumerate(read.places, read.first):
            name = object_name(self._folder, place.image)
            yield Stored(
                name=name,
                offset=place.offset,
                position=position,
                size_bytes=place.size_bytes,
                digest=place.digest,
                complaint=f"{name}: tensor {read.take.name} differs from the saved data (chunk {number})",
            )
            position += place.size_bytes


@dataclass(slots=True)
class _Memory:
    """An allocator of page-aligned positions in memory, so that direct I/O can fill it."""

    size_bytes: int = 0

    def take(self, size_bytes: int) -> int:
        position = self.size_bytes
        self.size_bytes += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        return position


@dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Chunks of one part of `shape`, beginning with number `first`, and the position in memory to read them to.

    The position is the chunks' final place or, if `aside`, separate memory. Then `copy` copies the box to the tensor,
    which begins at `begin`.
    """

    request: RequestedTensor
    take: Take
    shape: Shape
    begin: int
    places: Sequence[ChunkPlace]
    first: int
    position: int
    aside: bool

    def copy(self, memory: memoryview) -> None:
        item, source, into = self.request.item_bytes, self.take.source, self.take.into
        copy_strided(
            memory,
            self.position - self.first * CHUNK_BYTES + source.hull(self.shape)[0] * item,
            _strides(self.shape, item),
            self.begin + into.hull(self.request.shape)[0] * item,
            _strides(self.request.shape, item),
            shape=source.shape,
            item_bytes=item,
        )


def _strides(shape: Shape, item_bytes: int) -> Shape:
    return tuple(math.prod(shape[dimension + 1 :]) * item_bytes for dimension in range(len(shape)))


def copy_strided(
    memory: memoryview,
    from_byte: int,
    from_strides: Shape,
    to_byte: int,
    to_strides: Shape,
    *,
    shape: Shape,
    item_bytes: int,
) -> None:
    """Copy a box of `shape` within `memory`; strides are in bytes, and source and target do not overlap."""
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        dtype = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "c16"}[item_bytes]
        source = numpy.ndarray(shape, dtype, memory, from_byte, from_strides)
        target = numpy.ndarray(shape, dtype, memory, to_byte, to_strides)
        numpy.copyto(target, source)
        return
    inner = shape[-1] * item_bytes if shape else item_bytes
    for index in itertools.product(*(range(n) for n in shape[:-1])):
        start = from_byte + sum(map(operator.mul, index, from_strides))
        into = to_byte + sum(map(operator.mul, index, to_strides))
        memory[into : into + inner] = memory[start : start + inner]
