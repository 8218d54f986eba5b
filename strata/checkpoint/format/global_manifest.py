"""The global manifest, composed from the manifests of all ranks once each has acked its part."""

from __future__ import annotations

from collections.abc import Mapping

from strata.checkpoint.catalog.protocol import CheckpointMetadata, CheckpointSeal
from strata.checkpoint.format.digest import named_digest
from strata.checkpoint.format.manifest import (
    Identity,
    Manifest,
    Part,
    RankManifest,
    model_hash,
    rank_manifest_name,
)
from strata.checkpoint.restore.global_tensors import check_replicas, global_tensors
from strata.checkpoint.storage.sink import ObjectMissing, Storage
from strata.errors import CheckpointError, StorageError


def identity_of(record: CheckpointMetadata) -> Identity:
    """Return the identity that all manifests of the attempt `record` contain."""
    return Identity(
        step=record.step,
        generation=record.generation,
        attempt=record.id,
        world_size=record.ranks,
        epoch=record.epoch,
        type=record.checkpoint_type.value,
    )


def compose(
    storage: Storage,
    record: CheckpointMetadata,
    folder: str,
    *,
    predecessor: CheckpointMetadata | None,
    acked: Mapping[int, str],
    written: Mapping[str, RankManifest],
) -> Manifest:
    """Return the global manifest of the parts that all ranks have saved in `folder`.

    `acked` has, by rank, the digests of acked parts that this process knows; the catalog compares all digests at the
    seal. `written` has, by digest, the manifests that this process wrote: they are read back but not parsed again.
    `StorageError` if a manifest in storage differs from the acked digest. `CheckpointError`, naming the tensor, if
    the ranks' parts of a tensor do not fit together.
    """
    parts: list[Part] = []
    manifests: list[RankManifest] = []
    for rank in range(record.ranks):
        name = rank_manifest_name(rank)
        data = _read_part(storage, f"{folder}/{name}", rank)
        read = named_digest(data)
        if acked.get(rank, read) != read:
            raise StorageError(
                f"{folder}/{name} differs from the file that rank {rank} wrote: {read} instead of {acked[rank]}",
                hint="the storage, or the way to it, changes bytes; save again",
            )
        manifest = written.get(read) or RankManifest.from_bytes(data, what=f"{folder}/{name}")
        if manifest.identity != identity_of(record) or manifest.rank != rank:
            raise CheckpointError(f"{folder}/{name} belongs to another save")
        manifests.append(manifest)
        parts.append(
            Part(
                rank=rank,
                manifest=name,
                digest=read,
                image=manifest.image,
                image_bytes=manifest.image_bytes,
            )
        )
    check_replicas(manifests)
    global_tensors(manifests)
    return Manifest(
        identity=identity_of(record),
        parts=tuple(parts),
        model_hash=model_hash(manifests),
        created_unix_ms=record.created_unix_ms,
        metadata=record.metadata,
        predecessor=(
            (predecessor.step, predecessor.generation, predecessor.id) if predecessor is not None else None
        ),
        uses=tuple(sorted({file.folder for manifest in manifests for file in manifest.files})),
    )


def seal_of(manifest: Manifest, data: bytes) -> CheckpointSeal:
    """Return the seal that the catalog records for a global manifest whose bytes are `data`."""
    return CheckpointSeal(
        manifest_digest=named_digest(data),
        size_bytes=manifest.size_bytes,
        model_hash=manifest.model_hash,
        part_digests=tuple(part.digest for part in manifest.parts),
    )


def _read_part(storage: Storage, name: str, rank: int) -> bytes:
    try:
        return storage.read(name)
    except ObjectMissing as error:
        raise StorageError(
            f"rank {rank} has saved its part, and {name} is not in the storage of rank 0",
            hint="ranks on several hosts need one storage root that they share",
        ) from error
