"""The manifests: JSON documents beside the images; they list the contents of the files and the digests of the bytes.

A rank's manifest lists the digests of every tensor's chunks, the digest of the image's header, and the tree of the
state. The global manifest lists the ranks' manifests by digest. So the global manifest's own digest (in the catalog's
record and in the COMMIT marker) proves every byte of the checkpoint.

Readers ignore fields they do not know, and reject a newer `version` than theirs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from strata.checkpoint.format.digest import ALGORITHM, CHUNK_BYTES, digest, named_digest
from strata.checkpoint.format.entries import ImageRef, Run, Shard, TensorEntry
from strata.checkpoint.format.tree_check import check_tree
from strata.checkpoint.snapshot.state import Json
from strata.checkpoint.storage.sink import NotAnObject, Storage
from strata.core.kv.records import CheckpointType
from strata.documents import parsing
from strata.documents.parsing import file_name, shown, text, whole
from strata.errors import CheckpointCorrupt, CheckpointError

__all__ = [
    "GLOBAL_NAME",
    "Identity",
    "ImageRef",
    "Manifest",
    "Part",
    "RankManifest",
    "Run",
    "Shard",
    "TensorEntry",
    "as_corrupt",
    "image_name",
    "model_hash",
    "rank_manifest_name",
    "read_document",
    "read_object",
    "read_sealed",
    "sealed",
    "unsealed",
]

VERSION: Final = 1
"""The version of every document; a newer one comes from a newer release."""
_LIMITS: Final[Mapping[str, parsing.Limits]] = {
    "strata-rank-manifest": parsing.MANIFEST,
    "strata-manifest": parsing.MANIFEST,
    "strata-uses": parsing.LIST,
}
"""The parsing limits of each kind of document; a kind not listed has the limits `NOTE`."""
GLOBAL_NAME: Final = "manifest.json"
MAX_RANKS: Final = 1_000_000
_MAX_HEADER_BYTES: Final = 8 + parsing.HEADER.size_bytes
"""The most bytes before the tensors of a safetensors file: 8 for the header's length, and the header."""


def image_name(rank: int) -> str:
    """Return the name of a rank's image in its attempt's folder."""
    return f"rank-{rank:05d}.safetensors"


def rank_manifest_name(rank: int) -> str:
    """Return the name of a rank's manifest in its attempt's folder."""
    return f"rank-{rank:05d}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The save to which a manifest belongs."""

    step: int
    generation: int
    attempt: str
    world_size: int
    epoch: int = 0
    type: str = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankManifest:
    """The contents of one rank's part.

    `files` are the images of earlier attempts to which tensors refer. `mesh` is the rank's place in the
    partitioning: (index, size) by the name of each dimension, such as dp, tp, pp.
    """

    identity: Identity
    rank: int
    image: str
    image_bytes: int
    header_bytes: int
    header_digest: str
    tensors: Mapping[str, TensorEntry]
    tree: Json
    rng: Json
    files: tuple[ImageRef, ...] = ()
    mesh: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        return _write(
            "strata-rank-manifest",
            {
                **_plain_identity(self.identity),
                "rank": self.rank,
                "digest": ALGORITHM,
                "chunk_bytes": CHUNK_BYTES,
                "image": {
                    "file": self.image,
                    "size_bytes": self.image_bytes,
                    "header_bytes": self.header_bytes,
                    "header_digest": self.header_digest,
                },
                "files": [[file.folder, file.image, file.size_bytes] for file in self.files],
                "mesh": {name: list(place) for name, place in self.mesh.items()},
                "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
                "tree": self.tree,
                "rng": self.rng,
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str) -> RankManifest:
        """Return the manifest that `data` holds; `what` names it in errors."""
        body = read_document("strata-rank-manifest", data, what=what)
        with as_corrupt(what):
            image = body["image"]
            files = tuple(_image_ref(file) for file in body.get("files", ()))
            sizes = [whole(image["size_bytes"]), *(file.size_bytes for file in files)]
            tensors = {
                name: TensorEntry.from_json(entry, sizes=sizes) for name, entry in body["tensors"].items()
            }
            _check_no_overlap(tensors, sizes)
            for tree in (body["tree"], body["rng"]):
                check_tree(tree)
            return cls(
                identity=_identity(body),
                rank=whole(body["rank"], most=MAX_RANKS),
                image=file_name(image["file"]),
                image_bytes=sizes[0],
                header_bytes=whole(image["header_bytes"], most=min(sizes[0], _MAX_HEADER_BYTES)),
                header_digest=text(image["header_digest"]),
                tensors=tensors,
                tree=body["tree"],
                rng=body["rng"],
                files=files,
                mesh={name: (whole(i), whole(n)) for name, (i, n) in body.get("mesh", {}).items()},
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank's share: the digest of its manifest, and the size of its image."""

    rank: int
    manifest: str
    digest: str
    image: str
    image_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A whole checkpoint. `predecessor` is (step, generation, attempt) of the previous checkpoint.

    `uses` are the folders of the attempts to whose images the checkpoint refers. These folders and the
    checkpoint's own folder have the same parent.
    """

    identity: Identity
    parts: tuple[Part, ...]
    model_hash: str
    created_unix_ms: int
    metadata: Mapping[str, str]
    predecessor: tuple[int, int, str] | None
    uses: tuple[str, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(part.image_bytes for part in self.parts)

    def to_bytes(self) -> bytes:
        return _write(
            "strata-manifest",
            {
                **_plain_identity(self.identity),
                "digest": ALGORITHM,
                "created_unix_ms": self.created_unix_ms,
                "size_bytes": self.size_bytes,
                "model_hash": self.model_hash,
                "metadata": dict(self.metadata),
                "predecessor": list(self.predecessor) if self.predecessor else None,
                "uses": list(self.uses),
                "ranks": [
                    {
                        "rank": part.rank,
                        "manifest": part.manifest,
                        "digest": part.digest,
                        "image": part.image,
                        "image_bytes": part.image_bytes,
                    }
                    for part in self.parts
                ],
            },
        )

    @classmethod
    def from_bytes(cls, data: bytes, *, what: str) -> Manifest:
        """Return the manifest that `data` holds; `what` names it in errors."""
        body = read_document("strata-manifest", data, what=what)
        with as_corrupt(what):
            identity = _identity(body)
            # the document must list as many ranks as it claims, so that a claim of 10^12 ranks allocates nothing
            if len(body["ranks"]) != identity.world_size:
                raise ValueError(f"it is of {identity.world_size} ranks, and names {len(body['ranks'])}")
            return cls(
                identity=identity,
                parts=tuple(_part(rank, part) for rank, part in enumerate(body["ranks"])),
                model_hash=text(body["model_hash"]),
                created_unix_ms=whole(body["created_unix_ms"], most=parsing.MAX_UNIX_MS),
                metadata={name: text(value) for name, value in body["metadata"].items()},
                predecessor=predecessor_of(body),
                uses=tuple(file_name(folder) for folder in body.get("uses", ())),
            )


def model_hash(manifests: Sequence[RankManifest]) -> str:
    """Return a fingerprint of the weights: equal for equal tensors, no matter when they were saved.

    It covers the tensors below the key `model`, or every tensor of the state if no tensor is below `model`. Of tensors
    that are neither replicated nor sharded, only rank 0's count. Of sharded tensors every part counts, so another
    partitioning has another fingerprint.
    """
    found = {name: entry for name, entry in manifests[0].tensors.items() if entry.shard is None}
    for manifest in manifests:
        for name, entry in manifest.tensors.items():
            if entry.shard is not None:
                found[f"{entry.shard.tensor or name}\0{list(entry.shard.offsets)}"] = entry
    chosen = {n: e for n, e in found.items() if n == "model" or n.startswith(("model.", "model\0"))}
    if not chosen:
        chosen = {n: e for n, e in found.items() if not n.startswith("__rng__")}
    lines = [
        f"{name}\0{entry.spec.dtype}\0{list(entry.spec.shape)}\0{','.join(entry.chunks)}"
        for name, entry in sorted(chosen.items())
    ]
    return named_digest("\n".join(lines).encode("utf-8", "surrogatepass"))


# -- documents --------------------------------------------------------------------------------


def read_document(kind: str, data: bytes, *, what: str) -> dict[str, Any]:
    """Return the JSON object if it is a document of this kind; else `CheckpointCorrupt`.

    `CheckpointError` if a newer version of Strata wrote it.
    """
    with as_corrupt(what):
        body = parsing.json_object(data, _LIMITS.get(kind, parsing.NOTE))
        if body["format"] != kind:
            raise ValueError(f"it is a {shown(body['format'])}")
        version = whole(body["version"])
    if version > VERSION:
        raise CheckpointError(
            f"{what} has format {version}, and this release reads up to {VERSION}",
            hint="read it with the release that wrote it, or a newer one",
        )
    return body


def sealed(body: Mapping[str, Json]) -> bytes:
    """Return a document that contains its own digest, for documents whose digest is recorded nowhere else."""
    return json.dumps({**body, "self": digest(json.dumps(body).encode())}).encode()


def unsealed(data: bytes, limits: parsing.Limits, *, what: str) -> dict[str, Any]:
    """Return the body that was passed to `sealed`; `CheckpointCorrupt` if its bytes have changed."""
    with as_corrupt(what):
        body = parsing.json_object(data, limits)
        if body.pop("self", None) != digest(json.dumps(body).encode()):
            raise ValueError("it differs from its own digest")
        return body


def read_sealed(kind: str, data: bytes, *, what: str) -> dict[str, Any]:
    """Return the JSON object like `read_document`, after verifying the digest that the document contains."""
    unsealed(data, _LIMITS.get(kind, parsing.NOTE), what=what)
    return read_document(kind, data, what=what)


def read_object(storage: Storage, name: str) -> bytes:
    """Return a document's bytes; `CheckpointCorrupt` if something else than an object has its name."""
    try:
        return storage.read(name)
    except NotAnObject as error:
        raise CheckpointCorrupt(error.message, hint=error.hint) from error


def predecessor_of(body: Mapping[str, Any]) -> tuple[int, int, str] | None:
    """Return the document's predecessor as (step, generation, attempt), or None."""
    before = body["predecessor"]
    return (whole(before[0]), whole(before[1]), file_name(before[2])) if before else None


def _write(kind: str, body: dict[str, Json]) -> bytes:
    """Return the bytes of a document; `CheckpointError` if it exceeds the limits that readers apply."""
    document = {"format": kind, "version": VERSION, **body}
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    try:
        parsing.check_json(data, _LIMITS[kind])
    except ValueError as error:
        raise CheckpointError(
            f"the description of the saved state is too large: {error}",
            hint="keep long lists of plain values as tensors or as bytes, or spread the tensors over more ranks",
        ) from error
    return data


def _plain_identity(identity: Identity) -> dict[str, Json]:
    return {name: getattr(identity, name) for name in Identity.__slots__}


def _identity(body: Mapping[str, Any]) -> Identity:
    return Identity(
        step=whole(body["step"]),
        generation=whole(body["generation"]),
        attempt=file_name(body["attempt"]),
        world_size=whole(body["world_size"], least=1, most=MAX_RANKS),
        epoch=whole(body["epoch"]),
        type=CheckpointType(body["type"]).value,
    )


def _part(rank: int, body: Mapping[str, Any]) -> Part:
    """Return the part of `rank`; each rank must have its own manifest, so that no manifest is read twice."""
    found = Part(
        rank=whole(body["rank"]),
        manifest=file_name(body["manifest"]),
        digest=text(body["digest"]),
        image=file_name(body["image"]),
        image_bytes=whole(body["image_bytes"]),
    )
    if (found.rank, found.manifest) != (rank, rank_manifest_name(rank)):
        raise ValueError(f"the manifest of rank {rank} is not that of rank {found.rank}: {found.manifest}")
    return found


def _image_ref(body: Sequence[Any]) -> ImageRef:
    folder, image, size_bytes = body
    return ImageRef(folder=file_name(folder), image=file_name(image), size_bytes=whole(size_bytes))


def _check_no_overlap(tensors: Mapping[str, TensorEntry], sizes: Sequence[int]) -> None:
    """Raise `ValueError` if the tensors have more bytes than the files: then some tensors overlap."""
    taken = sum(entry.located_bytes for entry in tensors.values())
    if taken > sum(sizes):
        raise ValueError(f"its tensors take {taken} bytes of files that have {sum(sizes)}")


@contextlib.contextmanager
def as_corrupt(what: str) -> Iterator[None]:
    """Turn the exceptions that Python raises for a malformed document into `CheckpointCorrupt`."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError) as error:
        raise CheckpointCorrupt(f"{what} cannot be read: {error}") from error
