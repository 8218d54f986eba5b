"""The tensors of the whole training, assembled from the parts in the ranks' manifests.

A part is named by its rank and by its name in that rank's manifest. Several ranks may have the same box: then their
entries must have the same digests, and any of these entries may locate a chunk of the box.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from strata.checkpoint.format.entries import TensorEntry
from strata.checkpoint.format.manifest import RankManifest
from strata.checkpoint.save.sharding import Box, Shape, gap
from strata.checkpoint.snapshot.tensors import TensorSpec
from strata.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a tensor, and one rank's entry for it."""

    box: Box
    rank: int
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalTensor:
    """The spec of a whole tensor, and the boxes in which it was saved, without duplicates."""

    spec: TensorSpec
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> Shape:
        return self.spec.shape


def global_tensors(manifests: Sequence[RankManifest]) -> dict[str, GlobalTensor]:
    """Return the tensors that were saved in parts, by their names.

    `CheckpointError`, naming the tensor, if the parts belong to different tensors, overlap, or leave a gap. Two
    pipeline stages may have different tensors of one name and shape: then their values of the same box differ.
    """
    specs: dict[str, TensorSpec] = {}
    pieces: dict[str, dict[Box, Piece]] = {}
    plain: dict[str, int] = {}
    for rank, manifest in enumerate(manifests):
        for name, entry in manifest.tensors.items():
            found = part_of(name, entry)
            if found is None:
                plain.setdefault(name, rank)
                continue
            tensor, spec, box = found
            if specs.setdefault(tensor, spec) != spec:
                raise CheckpointError(f"{tensor} is {specs[tensor]} on one rank and {spec} on rank {rank}")
            first = pieces.setdefault(tensor, {}).setdefault(box, Piece(box=box, rank=rank, name=name))
            if manifests[first.rank].tensors[first.name].chunks != entry.chunks:
                raise CheckpointError(
                    f"ranks {first.rank} and {rank} have different values of the same part of {tensor}",
                    hint="different tensors of pipeline stages need names of their own, such as"
                    ' state={f"optim{stage}": optimizer}; copies of one tensor have drifted apart: make them equal',
                )
    for tensor, spec in specs.items():
        if tensor in plain:
            raise CheckpointError(
                f"{tensor} lies on several ranks, and rank {plain[tensor]} has one of its own under that name"
            )
        reason = gap(spec.shape, list(pieces[tensor]))
        if reason is not None:
            raise CheckpointError(f"the ranks hold no whole of {tensor} {spec}: {reason}")
    return {
        name: GlobalTensor(spec=spec, pieces=tuple(pieces[name].values())) for name, spec in specs.items()
    }


def part_of(name: str, entry: TensorEntry) -> tuple[str, TensorSpec, Box] | None:
    """Return the tensor of which an entry is a part, as name, spec and box; None if the entry is a whole tensor."""
    shard = entry.shard
    if shard is None:
        return None
    spec = TensorSpec(kind=entry.spec.kind, dtype=entry.spec.dtype, shape=shard.global_shape)
    return shard.tensor or name, spec, Box(shard.offsets, entry.spec.shape)


def check_replicas(manifests: Sequence[RankManifest]) -> None:
    """Raise `CheckpointError`, naming the tensor, unless all ranks have equal values of replicated tensors.

    Raise it, too, if no rank has written some chunk: then the ranks did not have the same tensors.
    """
    for key, holders in _replicated(manifests).items():
        name, (first, entry) = key[0], holders[0]
        for rank, other in holders[1:]:
            if (entry.spec.dtype, entry.spec.shape) != (other.spec.dtype, other.spec.shape):
                raise CheckpointError(
                    f"{name} is {entry.spec} on rank {first} and {other.spec} on rank {rank}, and it was"
                    " declared replicated"
                )
            if entry.chunks != other.chunks:
                raise CheckpointError(
                    f"{name} differs between rank {first} and rank {rank}, and it was declared replicated",
                    hint="find out why the ranks differ, or leave it out of `replicated`",
                )
        written = {number for _, each in holders for number, _, _ in each.located()}
        missing = set(range(len(entry.chunks))) - written
        if missing:
            raise CheckpointError(
                f"{name} is declared replicated, and the ranks {[rank for rank, _ in holders]} did not"
                f" write chunk {min(missing)} of it",
                hint="every rank must declare the same tensors",
            )


def _replicated(
    manifests: Sequence[RankManifest],
) -> Mapping[tuple[str, Shape], list[tuple[int, TensorEntry]]]:
    """Return the ranks that have each replicated tensor, or each box of a replicated tensor."""
    holders: dict[tuple[str, Shape], list[tuple[int, TensorEntry]]] = {}
    for rank, manifest in enumerate(manifests):
        for name, entry in manifest.tensors.items():
            if entry.replicated:
                offsets = entry.shard.offsets if entry.shard is not None else ()
                holders.setdefault((name, offsets), []).append((rank, entry))
    return holders


def wholes(manifest: RankManifest) -> Iterator[tuple[str, TensorEntry]]:
    """Yield the tensors of a rank's manifest that are not parts of others."""
    for name, entry in manifest.tensors.items():
        if entry.shard is None:
            yield name, entry
