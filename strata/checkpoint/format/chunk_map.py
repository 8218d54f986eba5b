"""The place of each chunk of a rank's tensors, in the rank's own image or in another image.

A chunk is in the rank's own image, in an image of an earlier attempt (if the save is an Incremental), or in another
rank's image of the same save (if the tensor is replicated: such a tensor is written once). The folders of all
attempts of a job have the same parent, so an image is named by its attempt's folder and its file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.entries import ImageRef, TensorEntry
from strata.checkpoint.format.manifest import RankManifest
from strata.errors import CheckpointCorrupt

_OBJECT: Final = re.compile(r"step-[^/\s]+/(?:rank-\d+\.(?:safetensors|json)|manifest\.json)")
"""Matches the name of an object in a complaint (a text about damage); a complaint may name only the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkPlace:
    """One chunk: its image, the offset of its first byte in the image, its size, and its digest."""

    image: ImageRef
    offset: int
    size_bytes: int
    digest: str


def images_of(folder: str, manifest: RankManifest) -> tuple[ImageRef, ...]:
    """Return the images to which `manifest` refers, in the order of their file numbers; the rank's own is number 0."""
    own = ImageRef(folder=folder.rpartition("/")[2], image=manifest.image, size_bytes=manifest.image_bytes)
    return (own, *manifest.files)


def object_name(folder: str, image: ImageRef) -> str:
    """Return the name in storage of an image to which a checkpoint in `folder` refers."""
    above = folder.rpartition("/")[0]
    return f"{above}/{image.folder}/{image.image}" if above else f"{image.folder}/{image.image}"


def objects_in(complaint: str) -> list[str]:
    """Return the names ("folder/file") of the objects that a complaint mentions; the list may be empty."""
    return sorted(set(_OBJECT.findall(complaint)))


def known_places(folder: str, manifest: RankManifest) -> dict[str, dict[int, ChunkPlace]]:
    """Return the places of the chunks that one rank's manifest locates, by tensor and number."""
    images = images_of(folder, manifest)
    return {
        tensor: {
            number: ChunkPlace(
                image=images[file],
                offset=offset,
                size_bytes=entry.chunk_bytes(number),
                digest=entry.chunks[number],
            )
            for number, file, offset in entry.located()
        }
        for tensor, entry in manifest.tensors.items()
    }


def chunk_places(
    folder: str, manifests: Sequence[RankManifest], rank: int
) -> dict[str, tuple[ChunkPlace, ...]]:
    """Return, for each tensor of `rank`, the places of its chunks in the order of their numbers.

    `manifests` are the manifests of all ranks of the checkpoint in `folder`. `CheckpointCorrupt`, naming the tensor,
    if a chunk of a replicated tensor is in no rank's image, or if the ranks' values of the tensor differ.
    """
    manifest = manifests[rank]
    places = known_places(folder, manifest)
    if any(entry.replicated for entry in manifest.tensors.values()):
        _add_shares(folder, manifests, rank, places)
    for tensor, entry in manifest.tensors.items():
        missing = next((n for n in range(len(entry.chunks)) if n not in places[tensor]), None)
        if missing is not None:
            raise CheckpointCorrupt(f"{folder}: no rank has chunk {missing} of tensor {tensor}")
    return {tensor: tuple(found[number] for number in range(len(found))) for tensor, found in places.items()}


def _add_shares(
    folder: str,
    manifests: Sequence[RankManifest],
    rank: int,
    places: dict[str, dict[int, ChunkPlace]],
) -> None:
    """Add to `places` the chunks of replicated tensors that other ranks wrote."""
    mine = manifests[rank].tensors
    for other, manifest in enumerate(manifests):
        if other == rank:
            continue
        for tensor, found in known_places(folder, manifest).items():
            entry, theirs = mine.get(tensor), manifest.tensors[tensor]
            if (
                entry is not None
                and entry.replicated
                and theirs.replicated
                and (entry.shard, entry.spec.shape) == (theirs.shard, theirs.spec.shape)
            ):
                _check_same(folder, tensor, entry, theirs)
                places[tensor] = found | places[tensor]


def _check_same(folder: str, tensor: str, one: TensorEntry, other: TensorEntry) -> None:
    if (one.spec.dtype, one.spec.shape, one.chunks) != (other.spec.dtype, other.spec.shape, other.chunks):
        raise CheckpointCorrupt(
            f"{folder}: the ranks have different values of the replicated tensor {tensor}"
        )
