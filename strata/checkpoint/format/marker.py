"""The COMMIT marker: it proves in storage, without the catalog, that a checkpoint is committed.

After the catalog has committed, the first rank or restore that reaches this step writes the marker once. The marker's
bytes follow from the manifest, so all writers write the same bytes. The marker is valid only together with the
manifest, the ranks' manifests and every image.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from strata.checkpoint.format.chunk_map import object_name
from strata.checkpoint.format.digest import named_digest
from strata.checkpoint.format.manifest import (
    GLOBAL_NAME,
    VERSION,
    Manifest,
    Part,
    RankManifest,
    as_corrupt,
    predecessor_of,
    read_object,
    read_sealed,
    sealed,
)
from strata.checkpoint.storage.sink import ObjectMissing, Storage, proving
from strata.documents.parsing import file_name, text, whole
from strata.errors import CheckpointCorrupt, StorageError

NAME: Final = "COMMIT"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """The contents of a marker."""

    step: int
    generation: int
    attempt: str
    manifest_digest: str
    predecessor: tuple[int, int, str] | None

    def to_bytes(self) -> bytes:
        body = {
            "format": "strata-commit",
            "version": VERSION,
            "step": self.step,
            "generation": self.generation,
            "attempt": self.attempt,
            "manifest": GLOBAL_NAME,
            "manifest_digest": self.manifest_digest,
            "predecessor": list(self.predecessor) if self.predecessor else None,
        }
        return sealed(body)

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str) -> Marker:
        body = read_sealed("strata-commit", data, what=what)
        with as_corrupt(what):
            return cls(
                step=whole(body["step"]),
                generation=whole(body["generation"]),
                attempt=file_name(body["attempt"]),
                manifest_digest=text(body["manifest_digest"]),
                predecessor=predecessor_of(body),
            )


def write_marker(storage: Storage, folder: str, manifest: Manifest, manifest_digest: str) -> None:
    """Ensure that the marker exists; another rank may have written it."""
    marker = Marker(
        step=manifest.identity.step,
        generation=manifest.identity.generation,
        attempt=manifest.identity.attempt,
        manifest_digest=manifest_digest,
        predecessor=manifest.predecessor,
    )
    name, data = f"{folder}/{NAME}", marker.to_bytes()
    try:
        made = storage.create_once(name, data)
    except StorageError as error:
        if not error.transient or not storage.exists(name):
            raise
        made = False  # if the disk is full, the call fails even if the object exists
    if not made and read_object(storage, name) != data:
        raise CheckpointCorrupt(f"{name} names another checkpoint than the one beside it")


def read_manifest(storage: Storage, folder: str, manifest_digest: str) -> Manifest:
    """Return the global manifest if it has the committed digest; else `CheckpointCorrupt`."""
    name = f"{folder}/{GLOBAL_NAME}"
    return Manifest.from_bytes(read_named(storage, name, manifest_digest), what=name)


def read_rank_manifests(storage: Storage, folder: str, manifest: Manifest) -> list[RankManifest]:
    """Return every rank's manifest, verified.

    `CheckpointCorrupt` also if an image of this attempt or of an earlier one is missing.
    """
    manifests = []
    elsewhere: dict[str, int] = {}
    for part in manifest.parts:
        read = read_rank_manifest(storage, folder, part)
        manifests.append(read)
        check_size(storage, f"{folder}/{part.image}", part.image_bytes)
        elsewhere |= {object_name(folder, image): image.size_bytes for image in read.files}
    for name, size_bytes in elsewhere.items():
        check_size(storage, name, size_bytes)
    return manifests


def read_rank_manifest(storage: Storage, folder: str, part: Part) -> RankManifest:
    """Return one rank's manifest if it has the committed digest; else `CheckpointCorrupt`."""
    name = f"{folder}/{part.manifest}"
    return RankManifest.from_bytes(read_named(storage, name, part.digest), what=name)


def read_marker(storage: Storage, folder: str) -> Marker | None:
    """Return the marker, or None if there is none; `CheckpointCorrupt` if it is damaged."""
    name = f"{folder}/{NAME}"
    try:
        return Marker.from_bytes(read_object(storage, name), what=name)
    except ObjectMissing:
        return None


def committed(storage: Storage, folder: str) -> tuple[Manifest, str] | None:
    """Return the manifest and its digest if storage alone proves `folder` to be committed.

    Return None if there is no marker; `CheckpointCorrupt` if there is a marker and anything else is missing or
    damaged.
    """
    marker = read_marker(storage, folder)
    if marker is None:
        return None
    manifest = read_manifest(storage, folder, marker.manifest_digest)
    read_rank_manifests(storage, folder, manifest)
    return manifest, marker.manifest_digest


def read_named(storage: Storage, name: str, named: str) -> bytes:
    """Return a document if it has the digest `named`; else `CheckpointCorrupt`."""
    with proving(name):
        data = storage.read(name)
    if named_digest(data) != named:
        raise CheckpointCorrupt(f"{name} differs from the committed one")
    return data


def check_size(storage: Storage, name: str, size_bytes: int) -> None:
    """Raise `CheckpointCorrupt` unless the object exists with that size."""
    with proving(name):
        found = storage.size(name)
    if found != size_bytes:
        raise CheckpointCorrupt(f"{name} has {found} bytes instead of {size_bytes}")
