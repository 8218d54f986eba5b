"""Reading a checkpoint: every byte is verified before any is returned.

The chain of proof: the catalog's record (or the marker) has the digest of the global manifest. The global manifest has
the digests of the ranks' manifests. These have the digest of each header and of each chunk of each tensor.

In a world of another size, each rank gets the part that the rank of the same number saved. If the saving world had
no rank of this number, the rank gets rank 0's part, except for values that differed between the saving ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from strata.checkpoint.format.chunk_map import ChunkPlace, chunk_places, object_name
from strata.checkpoint.format.digest import CHUNK_BYTES
from strata.checkpoint.format.image import ALIGNMENT
from strata.checkpoint.format.manifest import Manifest, RankManifest, as_corrupt, rank_manifest_name
from strata.checkpoint.format.marker import read_manifest, read_rank_manifests
from strata.checkpoint.format.tree_check import check_names, with_json
from strata.checkpoint.restore.assembling import Assembler, requested_tensor
from strata.checkpoint.restore.global_tensors import GlobalTensor, global_tensors, wholes
from strata.checkpoint.restore.requested_tensors import wanted
from strata.checkpoint.restore.restore import Saved
from strata.checkpoint.save.sharding import Box
from strata.checkpoint.snapshot.memory import allocate, keep_in_children
from strata.checkpoint.snapshot.parts import distributed_of
from strata.checkpoint.snapshot.state import Json, children, leaves, named_by
from strata.checkpoint.storage.pipeline import DEFAULT_THREADS, Stored, read_chunks
from strata.checkpoint.storage.sink import Storage
from strata.errors import CheckpointCorrupt, CheckpointError

Lend = Callable[[int], memoryview]
"""Returns memory of that size; the caller must reference it as long as it uses values read into it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """A rank's part, verified. `differing` are the paths whose values differ between the ranks.

    `differing` is set only for a rank that has no part of its own, because the saving world had fewer ranks.
    """

    manifest: Manifest
    saved: Saved
    own: bool
    differing: tuple[str, ...] = field(default=())

    def check_known(self, keys: Collection[str], of_rank_0: Collection[str], *, rank: int) -> None:
        """Raise `CheckpointError` if a value under `keys`, but not under `of_rank_0`, differed between the ranks."""
        identity = self.manifest.identity
        for path in self.differing:
            is_requested = path.partition(".")[0] in keys or path in keys
            if is_requested and not is_under(path, of_rank_0):
                raise CheckpointError(
                    f"{path} differs between the {identity.world_size} ranks that saved step {identity.step},"
                    f" so rank {rank} has no value for it",
                    hint="restore with at most as many ranks, or leave this key out",
                )


def load(
    storage: Storage,
    folder: str,
    *,
    manifest_digest: str,
    rank: int,
    threads: int = DEFAULT_THREADS,
    state: Mapping[Any, Any] | None = None,
    lend: Lend | None = None,
) -> Loaded:
    """Return the part of the checkpoint in `folder` for `rank`, in memory from `lend`, or in new memory.

    Tensors saved in parts are read from all ranks' images. With `state`, only the parts that it needs are read;
    without `state`, all are read whole. `CheckpointCorrupt`, naming the file and the tensor, if a byte differs from
    the saved one. The error does not reference memory of this read, so that reading another copy next takes no
    additional memory.
    """
    try:
        return _load(storage, folder, manifest_digest, rank, threads, state, lend)
    except CheckpointCorrupt as error:
        found = type(error)(error.message, hint=error.hint)
    raise found


def _load(
    storage: Storage,
    folder: str,
    manifest_digest: str,
    rank: int,
    threads: int,
    state: Mapping[Any, Any] | None,
    lend: Lend | None,
) -> Loaded:
    manifest = read_manifest(storage, folder, manifest_digest)
    manifests = read_rank_manifests(storage, folder, manifest)
    own = rank < len(manifests)
    index = rank if own else 0
    places = chunk_places(folder, manifests, index)
    tensors = tensors_of(folder, manifests)
    check_refers(folder, manifests[index], tensors)
    saved = _read_image(storage, folder, manifests[index], places, threads, lend)
    assembler = Assembler(storage, folder, manifests, threads=threads)
    saved = _with_parts(saved, assembler, tensors, state)
    return Loaded(
        manifest=manifest,
        saved=saved,
        own=own,
        differing=() if own else tuple(differing(manifests)),
    )


def tensors_of(folder: str, manifests: Sequence[RankManifest]) -> dict[str, GlobalTensor]:
    """Return the tensors that were saved in parts; `CheckpointCorrupt` if the parts do not fit together."""
    try:
        return global_tensors(manifests)
    except CheckpointError as error:  # the parts fitted at the commit, so the manifests are damaged
        raise CheckpointCorrupt(f"{folder}: {error.message}", hint=error.hint) from error


def check_refers(folder: str, manifest: RankManifest, tensors: Collection[str]) -> None:
    """Raise `CheckpointCorrupt` if a rank's state refers to a tensor that is neither in `tensors` nor its own."""
    known = {*tensors, *(name for name, _ in wholes(manifest))}
    with as_corrupt(f"{folder}/{rank_manifest_name(manifest.rank)}"):
        for tree in (manifest.tree, manifest.rng):
            check_names(tree, known)


def _read_image(
    storage: Storage,
    folder: str,
    manifest: RankManifest,
    places: Mapping[str, Sequence[ChunkPlace]],
    threads: int,
    lend: Lend | None,
) -> Saved:
    name = f"{folder}/{manifest.image}"
    offsets, size_bytes = _in_memory(name, manifest, places)
    memory = lend(size_bytes) if lend is not None else allocate(size_bytes, inherited=False)
    chunks = [
        Stored(
            name=name,
            offset=0,
            position=0,
            size_bytes=manifest.header_bytes,
            digest=manifest.header_digest,
            complaint=f"{name}: the header differs from the saved data",
        )
    ]
    data: dict[str, memoryview] = {}
    specs = {tensor: entry.spec for tensor, entry in wholes(manifest)}
    for tensor, entry in wholes(manifest):
        begin = offsets[tensor]
        data[tensor] = memory[begin : begin + entry.spec.size_bytes]
        for number, place in enumerate(places[tensor]):
            lies_in = object_name(folder, place.image)
            chunks.append(
                Stored(
                    name=lies_in,
                    offset=place.offset,
                    position=begin + number * CHUNK_BYTES,
                    size_bytes=place.size_bytes,
                    digest=place.digest,
                    complaint=f"{lies_in}: tensor {tensor} differs from the saved data (chunk {number})",
                )
            )
    read_chunks(storage, memory, chunks, threads=threads)
    if lend is None:
        # an object may keep a tensor in this memory, and a forked worker may use it
        keep_in_children(memory)
    return Saved(tree=manifest.tree, rng=manifest.rng, specs=specs, data=data)


def _with_parts(
    saved: Saved, assembler: Assembler, tensors: Mapping[str, GlobalTensor], state: Mapping[Any, Any] | None
) -> Saved:
    """Return `saved` with the tensors assembled from the parts of all ranks."""
    specs = {**saved.specs, **{name: tensor.spec for name, tensor in tensors.items()}}
    examples = wanted(saved.tree, state, specs) if state is not None else dict.fromkeys(specs)
    boxes: dict[str, tuple[Box, ...]] = {}
    for name, example in examples.items():
        if name not in tensors:
            continue
        here = distributed_of(name, example)
        boxes[name] = (
            (Box.whole(specs[name].shape),) if here is None else tuple(part.box for part in here.parts)
        )
    requests = {
        (name, box): requested_tensor(name, tensors[name], box)
        for name, several in boxes.items()
        for box in several
    }
    found = assembler.read(requests)
    parts = {name: {box: found[name, box] for box in several} for name, several in boxes.items()}
    whole = {name: next(iter(parts[name].values())) for name in parts if examples[name] is None}
    return replace(
        saved,
        # opaque bytes saved as a part are a plain value, encoded by a DCP planner
        tree=with_json(saved.tree, whole),
        specs=specs,
        data={**saved.data, **whole},
        boxes={name: parts[name] for name in parts if examples[name] is not None},
        examples={name: example for name, example in examples.items() if example is not None},
    )


def _in_memory(
    name: str, manifest: RankManifest, places: Mapping[str, Sequence[ChunkPlace]]
) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor in memory, and the size of that memory.

    The header and the tensors that are whole in the image have the same offsets in memory as in the image. The
    other tensors follow in the order of their files, with the same offset within a page as in the file. So
    neighbours are read together, and by direct I/O.
    """
    end = manifest.header_bytes
    offsets: dict[str, int] = {}
    scattered = []
    for tensor, entry in wholes(manifest):
        if entry.runs is None:
            offsets[tensor] = entry.start
            end = max(end, entry.end)
            if entry.start < manifest.header_bytes or entry.end > manifest.image_bytes:
                raise CheckpointCorrupt(f"{name}: tensor {tensor} lies outside of the image")
        elif places[tensor]:
            first = places[tensor][0]
            scattered.append(((first.image.folder, first.image.image), first.offset, tensor))
        else:
            offsets[tensor] = 0
    last: tuple[tuple[str, str], int] | None = None
    for image, offset, tensor in sorted(scattered):
        if last != (image, offset):
            end = -(-end // ALIGNMENT) * ALIGNMENT + offset % ALIGNMENT
        offsets[tensor] = end
        size_bytes = manifest.tensors[tensor].spec.size_bytes
        last, end = (image, offset + size_bytes), end + size_bytes
    return offsets, end


def is_under(path: str, keys: Collection[str]) -> bool:
    """Return whether `path` is one of `keys`, or is below one of them."""
    while path not in keys:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return False
    return True


def differing(manifests: Sequence[RankManifest]) -> Iterator[str]:
    """Yield the paths at which the ranks saved different values."""
    saved = [{path: _fingerprint(m, leaf) for path, leaf in leaves(m.tree)} for m in manifests]
    paths = {path: None for each in saved for path in each}
    for path in paths:
        if any(each.get(path) != saved[0].get(path) for each in saved):
            yield path


def _fingerprint(manifest: RankManifest, leaf: Json) -> object:
    """Return a key that is equal for two ranks that saved equal values."""
    name = named_by(leaf)
    if name is None:
        return repr(leaf)
    entry = manifest.tensors.get(name)
    # a tensor assembled from the parts of all ranks is the same for each rank
    return name if entry is None or entry.shard is not None else (entry.spec, entry.chunks)


def texts_of_ranks(
    storage: Storage, folder: str, *, manifest_digest: str, path: Sequence[str]
) -> dict[int, str]:
    """Return the text that each rank saved at `path`, a list of nested keys; ranks without a text are absent.

    `CheckpointCorrupt` if a manifest differs from the committed one.
    """
    manifest = read_manifest(storage, folder, manifest_digest)
    found = {}
    for part in read_rank_manifests(storage, folder, manifest):
        value = value_at(part.tree, path)
        if isinstance(value, str):
            found[part.rank] = value
    return found


def value_at(tree: Json, path: Sequence[str]) -> Json:
    """Return the tree at `path`, a list of nested keys; None if there is none."""
    for key in path:
        tree = dict(children(tree) or ()).get(key)
    return tree
